"""Workloads by name: generated, or from the public traces where they are here."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vertumnus_sim.workloads import traces
from vertumnus_sim.workloads.arrivals import spread_ticks
from vertumnus_sim.workloads.conversation import TRACE, conversation_like
from vertumnus_sim.workloads.fetch import TRACES, fetched
from vertumnus_sim.workloads.long_documents import l_eval_like
from vertumnus_sim.workloads.production import production_like
from vertumnus_sim.workloads.statistics import PAPER, Statistics
from vertumnus_sim.workloads.tool_agent import tool_agent_like
from vertumnus_sim.workloads.traces import TraceRequest
from vertumnus_sim.workloads.varying import PHASES, Phase, time_varying

#: What each is expected to look like; ``varying`` is a mix of them.
EXPECTED: Mapping[str, Statistics] = {**PAPER, "conversation": TRACE}
NAMES = (*EXPECTED, "varying")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the public traces are: a folder, and a conversation trace of one's own.
    ``keep_ticks``: leave a trace's equal time stamps as they are."""

    folder: Path
    conversation: Path | None = None
    keep_ticks: bool = False


def workload(
    name: str, seed: int, sources: Sources, phases: tuple[Phase, ...] = PHASES
) -> list[TraceRequest]:
    """The requests of ``name``; what was taken for it is said on standard error. Raises
    ``ValueError`` for a name that is not there, ``TraceError`` for a file that cannot be read."""
    match name:
        case "conversation":
            return _conversation(seed, sources)
        case "tool-agent":
            return _tool_agent(seed, sources)
        case "production":
            return production_like(seed)
        case "l-eval":
            return l_eval_like(seed)
        case "varying":
            parts = sorted({part for phase in phases for part in phase.mix})
            if unknown := [part for part in parts if part not in EXPECTED]:
                raise ValueError(
                    f"no workload {', '.join(unknown)}; there are {', '.join(EXPECTED)}"
                )
            mixed = {part: workload(part, seed, sources) for part in parts}
            return time_varying(phases, mixed, seed)
    raise ValueError(f"no workload {name}; there are {', '.join(NAMES)}")


def _conversation(seed: int, sources: Sources) -> list[TraceRequest]:
    path = sources.conversation or fetched(TRACES["conversation"], sources.folder)
    if path is None:
        _say(
            "conversation: generated, as the public trace is not here (scripts/fetch_traces gets "
            "it): its lengths and reuse, not its requests"
        )
        return conversation_like(seed)
    _say(f"conversation: {path}")
    return _spread(traces.read_mooncake(path), seed, sources)


def _tool_agent(seed: int, sources: Sources) -> list[TraceRequest]:
    path = None if sources.conversation else fetched(TRACES["toolagent"], sources.folder)
    if path is not None:
        _say(f"tool-agent: {path}")
        return _spread(traces.read_mooncake(path), seed, sources)
    _say("tool-agent: a surrogate, conversations and generated tool calls")
    return tool_agent_like(_conversation(seed, sources), seed)


def _spread(requests: list[TraceRequest], seed: int, sources: Sources) -> list[TraceRequest]:
    return requests if sources.keep_ticks else spread_ticks(requests, seed)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
