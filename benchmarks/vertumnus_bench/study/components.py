"""Which part of the way from the paper's policy to ours gives how much."""

from collections.abc import Iterable, Sequence

import msgspec

from vertumnus_bench.study.aggregate import Figures, by_name, geometric_mean
from vertumnus_bench.study.contenders import CHAIN


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Mean TTFT with this part and all before it: geometric mean over ``points`` of its ratio to
    that without the part (None for the first), and to that with none."""

    part: str
    policy: str
    to_previous: float | None
    to_first: float
    mean_ms: float
    points: int


def components(rows: Iterable[Figures], chain: Sequence[tuple[str, str]] = CHAIN) -> list[Part]:
    """Over the points that are not saturated and where all parts were run; empty without any."""
    cases = [
        [of[name].mean_ms for name, _ in chain]
        for of in by_name(row for row in rows if not row.saturated).values()
        if all(name in of for name, _ in chain)
    ]
    if not cases:
        return []
    return [
        Part(
            part=title,
            policy=name,
            to_previous=geometric_mean([c[at] / c[at - 1] for c in cases]) if at else None,
            to_first=geometric_mean([c[at] / c[0] for c in cases]),
            mean_ms=geometric_mean([c[at] for c in cases]),
            points=len(cases),
        )
        for at, (name, title) in enumerate(chain)
    ]
