"""Simulates one point, in whatever process."""

from collections.abc import Sequence
from functools import lru_cache

from vertumnus_router.core.effects import Effect
from vertumnus_router.core.events import Event, RequestArrived, RequestFinished
from vertumnus_router.core.profile import Profile
from vertumnus_router.profiles import load_profile
from vertumnus_sim import settings
from vertumnus_sim.run import Run, simulate
from vertumnus_sim.scenario import Cluster, Delays, Hardware, lay_out
from vertumnus_sim.workloads.arrivals import at_rate
from vertumnus_sim.workloads.traces import TraceRequest

from vertumnus_bench.study.loads import BINS_PER_PHASE, load_requests, phases
from vertumnus_bench.study.point import (
    DEGREES,
    GPUS,
    NODE_GPUS,
    Bin,
    Point,
    Result,
    Setup,
    StudyError,
)


class Recorder:
    """The TTFT of each request from what the router is told, by the time of its arrival.

    ``skip`` requests come first and do not count; the router hears of a first token ``report_s``
    after it.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], skip: int, report_s: float, bin_s: float
    ) -> None:
        self._requests, self._skip = requests, skip
        self._report_s, self._bin_s = report_s, bin_s
        self._arrived: dict[str, float] = {}
        self._bins: dict[int, tuple[int, float]] = {}

    def __call__(self, event: Event, now: float, effects: list[Effect]) -> None:
        match event:
            case RequestArrived(request):
                self._arrived[request.id] = now
            case RequestFinished(request_id):
                ttft_s = now - self._report_s - self._arrived.pop(request_id)
                # The simulator numbers the requests.
                number = int(request_id)
                if number >= self._skip:
                    at = int(self._requests[number].arrival_s // self._bin_s)
                    count, total_s = self._bins.get(at, (0, 0.0))
                    self._bins[at] = count + 1, total_s + ttft_s

    def bins(self) -> list[Bin]:
        return [
            Bin(at * self._bin_s, self._bin_s, count, total_s)
            for at, (count, total_s) in sorted(self._bins.items())
        ]


def run_point(point: Point, setup: Setup) -> Result:
    """Raises ``StudyError`` for what cannot be simulated, naming the point; what is raised by
    mistake gets a note that does."""
    try:
        return _run(point, setup)
    except (ValueError, RuntimeError) as exc:
        raise StudyError(f"{point}: {exc}") from exc
    except Exception as exc:
        exc.add_note(f"while {point} was simulated")
        raise


def _run(point: Point, setup: Setup) -> Result:
    parts = dict(point.settings)
    hardware = settings.apply(Hardware(), _take(parts, "hardware."))
    delays = settings.apply(Delays(), _take(parts, "delays."))
    cluster = Cluster(
        node_gpus=NODE_GPUS,
        degrees=DEGREES,
        compositions=lay_out(point.composition, GPUS, NODE_GPUS, DEGREES),
        hardware=hardware,
        delays=delays,
    )
    run = Run(
        workload=point.workload,
        rate=point.rate,
        policy=point.policy,
        composition=point.composition,
        cluster=cluster,
        profile=setup.profile,
        seed=point.seed,
        settings=parts,
    )
    found = load_requests(point.workload, point.seed, setup.traces, point.phase_share)
    requests = found[: point.requests]
    recorder = None
    if point.over_time:
        timed = requests if point.rate is None else at_rate(requests, point.rate)
        bin_s = phases(point.phase_share)[0].seconds / BINS_PER_PHASE
        recorder = Recorder(timed, int(run.warm_up * len(requests)), delays.report_s, bin_s)
    row = simulate(run, requests, _profile(setup.profile), recorder)
    return Result(row, None if recorder is None else recorder.bins())


def _take(given: dict[str, str], prefix: str) -> dict[str, str]:
    """Those below ``prefix``, which ``given`` loses."""
    names = [name for name in given if name.startswith(prefix)]
    return {name.removeprefix(prefix): given.pop(name) for name in names}


@lru_cache(maxsize=1)
def _profile(name: str) -> Profile:
    return load_profile(name)
