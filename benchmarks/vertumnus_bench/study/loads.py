"""The workloads and loads of the study."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vertumnus_sim.workloads import traces
from vertumnus_sim.workloads.arrivals import spread_ticks
from vertumnus_sim.workloads.fetch import TRACES, fetched
from vertumnus_sim.workloads.named import Sources, workload
from vertumnus_sim.workloads.traces import TraceRequest
from vertumnus_sim.workloads.varying import PHASES, Phase

from vertumnus_bench.study.point import StudyError

VARYING = "varying"
#: Mean TTFT over time is taken over so many equal parts of a phase.
BINS_PER_PHASE = 6


@dataclass(frozen=True, slots=True)
class Load:
    """A workload at rates in requests per second for 40 GPUs, ascending. None: as it comes."""

    workload: str
    rates: tuple[float | None, ...]


LOADS = (
    Load("conversation", (20, 26)),
    Load("tool-agent", (45, 60)),
    Load("production", (26, 32)),
    Load("l-eval", (32, 64)),
    Load("synthetic", (20, 26)),
    Load(VARYING, (None,)),
)
#: Enough of each kind to see every figure drawn, and no more.
QUICK_LOADS = (
    Load("conversation", (20, 26)),
    Load("tool-agent", (45,)),
    Load(VARYING, (None,)),
)


def phases(share: float) -> tuple[Phase, ...]:
    """Those of the varying workload, ``share`` of their time long."""
    return tuple(replace(phase, seconds=phase.seconds * share) for phase in PHASES)


@lru_cache(maxsize=2)
def load_requests(
    name: str, seed: int, folder: Path, phase_share: float
) -> tuple[TraceRequest, ...]:
    """All requests of a workload. Raises ``StudyError`` for one that is not here, ``ValueError``
    for one that there is not."""
    if name == "synthetic":
        path = fetched(TRACES["synthetic"], folder)
        if path is None:
            raise StudyError(_absent(folder))
        return tuple(spread_ticks(traces.read_mooncake(path), seed))
    # What was taken for it is said once for the study, not by every process.
    with contextlib.redirect_stderr(io.StringIO()):
        return tuple(workload(name, seed, Sources(folder), phases(phase_share)))


def origins(loads: Sequence[Load], folder: Path) -> dict[str, str]:
    """Where the requests of each workload come from: a public trace, or a generator."""
    public = {name: fetched(trace, folder) is not None for name, trace in TRACES.items()}
    conversation = "the public trace" if public["conversation"] else "generated"
    tool_agent = (
        "the public trace"
        if public["toolagent"]
        else f"a surrogate: conversation ({conversation}) and generated tool calls"
    )
    known = {
        "conversation": conversation,
        "tool-agent": tool_agent,
        "synthetic": "the public trace",
    }
    known[VARYING] = "a mix of tool-agent, production and l-eval"
    return {load.workload: known.get(load.workload, "generated") for load in loads}


def present(loads: Sequence[Load], folder: Path) -> tuple[list[Load], dict[str, str]]:
    """The loads that can be had, and why each of the other workloads is left out."""
    if fetched(TRACES["synthetic"], folder) is not None:
        return list(loads), {}
    kept = [load for load in loads if load.workload != "synthetic"]
    return kept, {} if len(kept) == len(loads) else {"synthetic": _absent(folder)}


def _absent(folder: Path) -> str:
    file = TRACES["synthetic"].file
    return f"{file} is not in {folder}: scripts/fetch_traces gets it, --traces names another folder"
