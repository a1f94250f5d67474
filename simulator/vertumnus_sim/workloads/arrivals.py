"""When requests come: at random, spread out, faster or slower."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from random import Random

from vertumnus_sim.workloads.traces import TraceRequest

#: How coarse the clock of Mooncake's traces is.
TICK_S = 3.0


def poisson(count: int, rate_per_s: float, source: Random) -> list[float]:
    """Times of ``count`` independent arrivals, in seconds from 0."""
    at_s = 0.0
    found: list[float] = []
    for _ in range(count):
        at_s += source.expovariate(rate_per_s)
        found.append(at_s)
    return found


def spread_ticks(
    requests: Sequence[TraceRequest], seed: int, tick_s: float = TICK_S
) -> list[TraceRequest]:
    """Requests of the same time come at random within ``tick_s``, or until the next ones.

    Their order stays. In a Mooncake trace up to 28 requests have one time stamp; unless a burst
    is what is wanted, that is the clock's doing and not the clients'.
    """
    source = Random(f"ticks {seed}")
    groups = [list(group) for _, group in groupby(requests, key=lambda r: r.arrival_s)]
    found: list[TraceRequest] = []
    for number, group in enumerate(groups):
        began_s = group[0].arrival_s
        width_s = tick_s
        if number + 1 < len(groups):
            width_s = min(tick_s, groups[number + 1][0].arrival_s - began_s)
        offsets = sorted(source.random() * width_s for _ in group)
        found += [
            replace(request, arrival_s=began_s + offset)
            for request, offset in zip(group, offsets, strict=True)
        ]
    return found


def at_speed(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """``speed`` times as fast, the first request at 0. Raises ``ValueError`` unless positive."""
    if not speed > 0:
        raise ValueError(f"a speed is a number above 0, not {speed:g}")
    if not requests:
        return []
    first_s = requests[0].arrival_s
    return [replace(r, arrival_s=(r.arrival_s - first_s) / speed) for r in requests]


def at_rate(requests: Sequence[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """As fast as it takes for ``rate_per_s`` on average.

    Raises ``ValueError`` when all come at once: no speed makes a rate of that.
    """
    return at_speed(requests, rate_per_s / mean_rate(requests))


def mean_rate(requests: Sequence[TraceRequest]) -> float:
    """Requests per second from the first to the last arrival. Raises ``ValueError`` when that is
    no time."""
    seconds = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if not seconds > 0:
        raise ValueError("the rate of requests that all come at once is not known")
    return (len(requests) - 1) / seconds
