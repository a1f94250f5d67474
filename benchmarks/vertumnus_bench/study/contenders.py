"""What is compared, and what each may choose for itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vertumnus_sim.baselines import BASELINES

from vertumnus_bench.study.point import GPUS

#: The fixed compositions that a policy for persistent workers may choose from.
MIXES = (
    "40x1",
    "24x1,8x2",
    "16x1,12x2",
    "8x1,16x2",
    "20x2",
    "16x1,8x2,2x4",
    "8x1,8x2,4x4",
    "10x2,5x4",
    "10x4",
)
#: For rules that do not know degrees.
HOMOGENEOUS = ("40x1", "20x2", "10x4")
MIXED = tuple(mix for mix in MIXES if mix not in HOMOGENEOUS)
#: Of late binding, which has one setting for all workloads.
LATE_MIX = "16x1,12x2"
PULL: Mapping[str, str] = {"prefix.pull": "true"}
NO_PULL: Mapping[str, str] = {"prefix.pull": "false"}
#: What the paper has beside its placement.
SYSTEM: Mapping[str, str] = {**NO_PULL, "controller.mode": "on", "prefix.mode": "on"}
PAPER_GRID = tuple(
    {"beta": beta, "lam": lam} for beta in ("1.5", "3.0", "5.0") for lam in ("0.1", "0.3", "1.0")
)
#: Copies and switches that cost nothing, and all KV memory of the cluster at every rank.
_FREE = {
    "hardware.local_bytes_per_s": "1e15",
    "hardware.remote_bytes_per_s": "1e15",
    "hardware.copy_latency_s": "0",
    "hardware.kv_blocks": str(1_100 * GPUS),
    "delays.dispatch_s": "0",
    "delays.report_s": "0",
    "delays.vote_s": "0",
    "delays.switch_s": "0",
    "fluid.step_s": "0",
}


class Role(StrEnum):
    """``BASELINE``: what others do. ``PAPER``: the paper's policy. ``OURS``: one setting for all.
    ``BOUND``: what could be if moving things were free. ``PART``: on the way from the paper's
    policy to ours. ``CONTROL``: ours with one thing changed."""

    BASELINE = "baseline"
    PAPER = "paper"
    OURS = "ours"
    BOUND = "bound"
    PART = "part"
    CONTROL = "control"


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """``policy`` always has ``settings``. It is tuned over ``compositions`` and, on the best of
    these, over ``grid``; or it takes what was chosen for the contender ``like``: the composition,
    and with ``inherits`` the settings too."""

    name: str
    role: Role
    policy: str
    compositions: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    grid: tuple[Mapping[str, object], ...] = ()
    like: str | None = None
    inherits: bool = False


def _baseline(name: str, compositions: tuple[str, ...]) -> Contender:
    return Contender(name, Role.BASELINE, name, compositions, grid=BASELINES[name].grid)


PAPER = "paper"
LATE = "late"
FLUID = "fluid"
ORACLE = "oracle"
#: Each of ours with its queue in the order of arrival.
FCFS: Mapping[str, str] = {LATE: "late_fcfs", FLUID: "fluid_fcfs"}
CONTENDERS = (
    *(
        Contender(
            f"homogeneous_{mix.partition('x')[2]}",
            Role.BASELINE,
            "paper",
            (mix,),
            NO_PULL,
            PAPER_GRID,
        )
        for mix in HOMOGENEOUS
    ),
    _baseline("static_length", MIXED),
    _baseline("cache_aware", HOMOGENEOUS),
    _baseline("dynamo_like", HOMOGENEOUS),
    _baseline("least_loaded", HOMOGENEOUS),
    Contender(PAPER, Role.PAPER, "paper", MIXES, NO_PULL, PAPER_GRID),
    Contender("paper_system", Role.PART, "paper", settings=SYSTEM, like=PAPER, inherits=True),
    Contender("paper_pull", Role.PART, "paper", settings=PULL, like=PAPER, inherits=True),
    Contender(
        "late_blind",
        Role.PART,
        "late",
        settings={**PULL, "late.in_flight": "false"},
        like=PAPER,
    ),
    Contender("late_best_mix", Role.PART, "late", settings=PULL, like=PAPER),
    Contender(LATE, Role.OURS, "late", (LATE_MIX,), PULL),
    Contender("late_no_pull", Role.CONTROL, "late", (LATE_MIX,), NO_PULL),
    Contender(FLUID, Role.OURS, "fluid", ("40x1",), PULL),
    # Urgency is GPU-seconds + ageing · arrival: with this much of it arrival alone counts.
    Contender(FCFS[LATE], Role.CONTROL, "late", (LATE_MIX,), {**PULL, "late.ageing": "1e6"}),
    Contender(FCFS[FLUID], Role.CONTROL, "fluid", ("40x1",), {**PULL, "fluid.ageing": "1e6"}),
    Contender(ORACLE, Role.BOUND, "fluid", ("40x1",), {**PULL, **_FREE}),
)
#: From the paper's policy to ours, one part after the other; each is a contender.
CHAIN = (
    (PAPER, "paper's policy: early binding, best fixed mix"),
    ("paper_pull", "+ pull of prefixes"),
    ("late_blind", "+ late binding"),
    ("late_best_mix", "+ prefixes in flight count"),
    (FLUID, "+ fluid composition"),
)

#: Under a load that changes: late binding with the controller, and on every fixed mix.
CONTROLLER = "late_controller"
FIXED = "fixed "
OVER_TIME = (
    Contender(CONTROLLER, Role.OURS, "late", (LATE_MIX,), {**PULL, "controller.mode": "on"}),
    *(Contender(FIXED + mix, Role.CONTROL, "late", (mix,), PULL) for mix in MIXES),
)
