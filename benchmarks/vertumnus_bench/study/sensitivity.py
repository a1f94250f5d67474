"""How much hangs on what is assumed: one workload at one load, one assumption changed at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vertumnus_bench.study.contenders import FLUID, LATE, NO_PULL, PAPER

SWITCH = "switch, ms"
BANDWIDTH = "bandwidth, GB/s"
NOISE = "noise of a step, %"
MEMORY = "KV blocks per GPU"
#: How workers may keep their KV other than as they do: who has it, and what a plot calls it.
_LAYOUTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (LATE, "", {}),
    (LATE, ", KV partitioned", {"hardware.kv_partitioned": "true"}),
    (PAPER, ", KV partitioned", {"hardware.kv_partitioned": "true"}),
    (FLUID, ", all copies alike", {"hardware.keep_one": "false"}),
)


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """``contender`` under ``assumption`` = ``value``, which ``settings`` say; ``series`` is what a
    plot calls it."""

    assumption: str
    value: float
    series: str
    contender: str
    settings: Mapping[str, str]


def variants(*, quick: bool) -> list[Variant]:
    """Quick: the ends of each range."""
    found: list[Variant] = []
    for switch_ms in (0, 200) if quick else (0, 20, 50, 100, 200):
        cost_s = f"{switch_ms / 1000:g}"
        # All of it in the switch: what the router expects of a move is what one takes.
        costs = {"delays.vote_s": "0", "delays.switch_s": cost_s, "fluid.step_s": cost_s}
        found.append(Variant(SWITCH, switch_ms, "fluid", FLUID, costs))
    for gb_per_s in (1, 20) if quick else (1, 2, 5, 20):
        links = {f"hardware.{link}_bytes_per_s": f"{gb_per_s}e9" for link in ("local", "remote")}
        found.append(Variant(BANDWIDTH, gb_per_s, "fluid", FLUID, links))
        # The hand-over to decode goes over the same links: only the difference is the pulls'.
        without = {**links, **NO_PULL}
        found.append(Variant(BANDWIDTH, gb_per_s, "fluid without pull", FLUID, without))
    for assumption, values in ((NOISE, (8, 25)), (MEMORY, (550, 1_100))):
        for value in values:
            setting = (
                {"hardware.noise": f"{value / 100:g}"}
                if assumption == NOISE
                else {"hardware.kv_blocks": str(value)}
            )
            for name in (FLUID, PAPER):
                found.append(Variant(assumption, value, name, name, setting))
            if assumption == MEMORY:
                for name, suffix, layout in _LAYOUTS:
                    both = {**setting, **layout}
                    found.append(Variant(assumption, value, name + suffix, name, both))
    return found


def by_assumption(found: Iterable[Variant]) -> dict[str, list[Variant]]:
    groups: dict[str, list[Variant]] = {}
    for variant in found:
        groups.setdefault(variant.assumption, []).append(variant)
    return groups
