"""The baselines by name, and their knobs as ``KEY=VALUE``."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from vertumnus_router.core.profile import Profile

from vertumnus_sim.baselines import (
    cache_aware,
    dynamo_like,
    least_loaded,
    power_of_two,
    round_robin,
    static_length,
)
from vertumnus_sim.baselines.router import BaselineRouter
from vertumnus_sim.baselines.rule import Grid, Rule, Setting


class BaselineError(ValueError):
    """There is no such baseline or knob, or no such setting of it; the message says what is."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """``make(knobs, seed)`` gives the rule; ``knobs`` is the type of its settings, and ``grid``
    what a tuner tries."""

    name: str
    knobs: type[msgspec.Struct]
    grid: Grid
    make: Callable[[Any, int], Rule]

    def describe(self) -> str:
        """Its knobs, each with its default and what it does, a line for each."""
        return "\n".join(
            f"  {name}={default}: {meaning}" for name, default, meaning in self._described()
        )

    def _described(self) -> Iterable[tuple[str, object, str]]:
        info = msgspec.inspect.type_info(self.knobs)
        assert isinstance(info, msgspec.inspect.StructType)
        for field in info.fields:
            extra = getattr(field.type, "extra_json_schema", None) or {}
            yield field.name, field.default, extra.get("description", "")


BASELINES: Mapping[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("least_loaded", least_loaded.Knobs, least_loaded.GRID, least_loaded.LeastLoaded),
        Baseline("round_robin", round_robin.Knobs, round_robin.GRID, round_robin.RoundRobin),
        Baseline("power_of_two", power_of_two.Knobs, power_of_two.GRID, power_of_two.PowerOfTwo),
        Baseline("cache_aware", cache_aware.Knobs, cache_aware.GRID, cache_aware.CacheAware),
        Baseline("dynamo_like", dynamo_like.Knobs, dynamo_like.GRID, dynamo_like.DynamoLike),
        Baseline(
            "static_length", static_length.Knobs, static_length.GRID, static_length.StaticLength
        ),
    )
}


def parse_knobs(texts: Iterable[str]) -> dict[str, Setting]:
    """``KEY=VALUE`` texts as ``make_baseline`` takes them. ``BaselineError`` for any other."""
    knobs: dict[str, Setting] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise BaselineError(f"{text!r} is not KEY=VALUE, as in cache_threshold=0.5")
        if name in knobs:
            raise BaselineError(f"{name} is set twice, to {knobs[name]} and {value}: choose one")
        knobs[name] = value
    return knobs


def make_baseline(
    name: str, knobs: Mapping[str, Setting], profile: Profile, seed: int = 0
) -> BaselineRouter:
    """A router with the rule of that name. A value may be a number or its text; knobs that are
    not set have their defaults. ``BaselineError`` names the choices."""
    baseline = BASELINES.get(name)
    if baseline is None:
        raise BaselineError(f"baseline {name!r}: choose one of {', '.join(BASELINES)}")
    return BaselineRouter(baseline.make(_checked(baseline, knobs), seed), profile)


def _checked(baseline: Baseline, knobs: Mapping[str, Setting]) -> msgspec.Struct:
    names = baseline.knobs.__struct_fields__
    for name, value in knobs.items():
        if name not in names:
            raise BaselineError(_refusal(baseline, f"it has no knob {name!r}"))
        if _is_endless(value):
            # Every comparison with NaN is false, those of the limits included.
            raise BaselineError(_refusal(baseline, f"{name}={value} is not a finite number"))
    try:
        return msgspec.convert(dict(knobs), baseline.knobs, strict=False)
    except msgspec.ValidationError as exc:
        given = ", ".join(f"{name}={value}" for name, value in knobs.items())
        raise BaselineError(_refusal(baseline, f"{given}: {exc}")) from exc


def _is_endless(value: Setting) -> bool:
    try:
        return not math.isfinite(float(value))
    except ValueError:
        return False  # a word


def _refusal(baseline: Baseline, fault: str) -> str:
    knobs = baseline.describe()
    choices = f"its knobs, as they are by default:\n{knobs}" if knobs else "it has no knobs"
    return f"baseline {baseline.name}: {fault}; {choices}"
