"""From what a run is asked to be to its row of figures."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vertumnus_router.core.profile import Profile

from vertumnus_sim.metrics import DEADLINES_S, Row, figures
from vertumnus_sim.policies import make_router
from vertumnus_sim.scenario import Cluster
from vertumnus_sim.simulation import Log, Simulation
from vertumnus_sim.workloads.arrivals import at_rate, mean_rate
from vertumnus_sim.workloads.traces import TraceRequest

#: Of the requests, how many come before those that count: caches are empty at first.
WARM_UP = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """One point: ``policy`` with ``settings`` on ``cluster``, which is called ``composition``,
    under ``workload`` at ``rate`` requests per second (None: as it comes)."""

    workload: str
    rate: float | None
    policy: str
    composition: str
    cluster: Cluster
    profile: str
    seed: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    deadlines_s: tuple[float, float, float] = DEADLINES_S
    warm_up: float = WARM_UP


def simulate(
    run: Run, requests: Sequence[TraceRequest], profile: Profile, log: Log | None = None
) -> Row:
    """Raises ``ValueError`` for what cannot be simulated."""
    if run.rate is not None:
        requests = at_rate(requests, run.rate)
    hardware = run.cluster.hardware
    router = make_router(run.policy, run.settings, profile, hardware, run.seed)
    simulation = Simulation(
        run.cluster,
        profile,
        router,
        requests,
        run.seed,
        warm_up=int(run.warm_up * len(requests)),
        log=log,
    )
    began_s = _cpu_s()
    outcome = simulation.run()
    spent_s = max(_cpu_s() - began_s, 1e-9)
    return Row(
        workload=run.workload,
        rate=mean_rate(requests) if run.rate is None else run.rate,
        policy=run.policy,
        composition=run.composition,
        gpus=run.cluster.gpus,
        seed=run.seed,
        sim_requests_per_s=len(requests) / spent_s,
        profile=run.profile,
        settings=dict(run.settings),
        **figures(outcome, run.cluster.gpus, run.deadlines_s),
    )


def _cpu_s() -> float:
    """CPU time of this process: what else the machine does must not count."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
