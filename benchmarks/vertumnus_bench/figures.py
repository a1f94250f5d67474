"""Figures from samples."""

import math
import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Progress, for whoever watches; results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of them do not exceed (nearest rank).

    Raises ``ValueError`` without values.
    """
    if not values:
        raise ValueError("no percentile of nothing")
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} is not a percentage above 0")
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99, maximum and number of the values; only ``n`` when there are none."""
    if not values:
        return {"n": 0}
    return {
        "p50": round(percentile(values, 50), 3),
        "p99": round(percentile(values, 99), 3),
        "max": round(max(values), 3),
        "n": len(values),
    }
