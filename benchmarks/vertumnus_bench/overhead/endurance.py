"""Many streams at once for a long time: does anything fail, grow or slow down?"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vertumnus_router.clock import WallClock

from vertumnus_bench.overhead.child import Child
from vertumnus_bench.overhead.comparison import STREAM
from vertumnus_bench.overhead.load import Load, Seen, Times, loading, run
from vertumnus_bench.overhead.mock_pool import MockPool

_MIB = 1024 * 1024
#: Parts of the run whose first but one and last are compared: the first is still filling up.
_PARTS = 5
_BASELINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``streams`` at a time for ``seconds``, each of ``events`` that are ``gap_us`` apart."""

    streams: int = 1000
    seconds: float = 600.0
    events: int = 50
    gap_us: int = 100_000

    @property
    def stream_ms(self) -> int:
        """How long one stream takes."""
        return self.events * self.gap_us // 1000


@dataclass(frozen=True, slots=True)
class Sample:
    """What the router held at one moment."""

    rss_bytes: int
    descriptors: int


def endure(pool: MockPool, router: Child, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the load through ``router``, and for a moment without it."""
    pool.stream(events=plan.events, gap_us=plan.gap_us)
    seconds = min(plan.seconds, _BASELINE_S)
    direct = run(pool.port, STREAM, Load(plan.streams, seconds, spread_ms=plan.stream_ms))
    idle = _sample(router)
    cpu_s = router.cpu_s()
    clock = WallClock()
    samples: list[Sample] = []
    load = Load(plan.streams, plan.seconds, spread_ms=plan.stream_ms)
    with loading(router.port, STREAM, load) as running:
        while running.runs:
            clock.pause(plan.seconds / 100)
            samples.append(_sample(router))
            if len(samples) % 10 == 0:
                say(f"{samples[-1].rss_bytes / _MIB:.1f} MiB, {samples[-1].descriptors} open files")
        seen = running.result()
    cpu_s = router.cpu_s() - cpu_s
    return {
        "streams": plan.streams,
        "seconds": round(seen.seconds, 1),
        "requests": seen.requests,
        "errors": seen.errors,
        "lost_events": seen.requests * plan.events - _events(seen).count,
        "events_per_s": round(_events(seen).count / seen.seconds, 1),
        "added_event_ms": _added(_events(seen), _events(direct)),
        "added_first_event_ms": _added(seen.first, direct.first),
        "rss_mib": _drift([sample.rss_bytes / _MIB for sample in samples]),
        "descriptors": {
            **_drift([sample.descriptors for sample in samples]),
            "before": idle.descriptors,
        },
        "cpu_share": round(cpu_s / seen.seconds, 3),
    }


def _sample(router: Child) -> Sample:
    return Sample(router.rss_bytes(), router.descriptors())


def _events(seen: Seen) -> Times:
    if seen.event is None:
        raise RuntimeError("no event arrived")
    return seen.event


def _added(through: Times | None, direct: Times | None) -> dict[str, float]:
    """Milliseconds that the router adds at the median and at the 99th percentile."""
    if through is None or direct is None:
        raise RuntimeError("no request was answered")
    return {
        "p50": round((through.p50_us - direct.p50_us) / 1000, 3),
        "p99": round((through.p99_us - direct.p99_us) / 1000, 3),
    }


def _drift(values: Sequence[float]) -> dict[str, float]:
    """The median early and late in the run, and the difference."""
    part = max(1, len(values) // _PARTS)
    early = statistics.median(values[part : 2 * part] or values)
    late = statistics.median(values[-part:])
    return {"early": round(early, 2), "late": round(late, 2), "drift": round(late - early, 2)}
