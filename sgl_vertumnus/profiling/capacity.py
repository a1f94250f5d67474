"""κ_C by bisection: the largest load at which a worker still meets the SLO. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from sgl_vertumnus.errors import ConfigurationError

#: Deadlines of section 8 by prompt length: below 8K, below 32K, and longer.
BOUNDS_TOKENS = (8192, 32768)
DEADLINES_S = (1.0, 5.0, 10.0)
_FIRST = 0.7
_GROWTH = 1.5
#: The search ends when the bounds are this close, relatively.
_CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Slo:
    """A first token is in time within ``deadlines_s`` by prompt length; ``target`` of the tokens
    have to be."""

    deadlines_s: tuple[float, float, float] = DEADLINES_S
    target: float = 0.9

    def __post_init__(self) -> None:
        if not all(0 < deadline < math.inf for deadline in self.deadlines_s):
            raise ConfigurationError(f"--slo-s {self.deadlines_s}: deadlines are above 0 s")
        if not 0 < self.target <= 1:
            raise ConfigurationError(f"--slo-target {self.target:g}: above 0, 1 at most")

    def deadline_s(self, tokens: int) -> float:
        return self.deadlines_s[sum(tokens >= bound for bound in BOUNDS_TOKENS)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt of a load, and its time to the first token, None if that never came."""

    tokens: int
    ttft_s: float | None


def attainment(slo: Slo, outcomes: Sequence[Outcome]) -> float:
    """Σ L·1[TTFT ≤ τ] / Σ L."""
    met = (
        one.tokens
        for one in outcomes
        if one.ttft_s is not None and one.ttft_s <= slo.deadline_s(one.tokens)
    )
    return sum(met) / sum(one.tokens for one in outcomes)


def largest_load(meets: Callable[[float], bool], steps: int) -> float | None:
    """The largest of up to ``steps`` loads that ``meets``, each chosen by how the last ones went;
    None when even the smallest one tried does not.

    A load is seconds of work a second, and may exceed 1: prompts that are prefilled together
    take less than one after the other.
    """
    low, high, load = 0.0, math.inf, _FIRST
    for _ in range(steps):
        if meets(load):
            low = load
        else:
            high = load
        if high - low <= _CLOSE * high < math.inf:
            break
        load = round(low * _GROWTH if high == math.inf else (low + high) / 2, 6)
    return low or None


def poisson(
    lengths: Sequence[int],
    service_s: Callable[[int], float],
    *,
    load: float,
    seconds: float,
    seed: int,
) -> list[tuple[float, int]]:
    """(arrival in seconds, tokens) of about ``seconds`` with exactly ``load`` seconds of work a
    second: lengths drawn from ``lengths`` in an order that the load does not change, until there
    is work for that long, at least two, with exponential gaps scaled to it."""
    source = Random(f"load of {seed}")
    gaps: list[float] = []
    drawn: list[int] = []
    work_s = 0.0
    while work_s < load * seconds or len(drawn) < 2:
        gaps.append(source.expovariate(1.0))
        drawn.append(source.choice(lengths))
        work_s += service_s(drawn[-1])
    scale = work_s / load / sum(gaps)
    arrivals, at_s = [], 0.0
    for gap, tokens in zip(gaps, drawn, strict=True):
        arrivals.append((at_s, tokens))
        at_s += gap * scale
    return arrivals
