"""Generated workloads against the figures that they are fitted to."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from itertools import pairwise

import pytest
from vertumnus_sim.workloads.conversation import TRACE, conversation_like
from vertumnus_sim.workloads.long_documents import l_eval_like
from vertumnus_sim.workloads.production import production_like
from vertumnus_sim.workloads.statistics import PAPER, Statistics, statistics
from vertumnus_sim.workloads.tool_agent import tool_agent_like
from vertumnus_sim.workloads.traces import TraceRequest

TOLERANCE = 0.05

WORKLOADS: dict[str, tuple[Callable[[int], list[TraceRequest]], Statistics]] = {
    "conversation": (conversation_like, TRACE),
    "tool-agent": (
        lambda seed: tool_agent_like(conversation_like(seed), seed),
        PAPER["tool-agent"],
    ),
    "production": (production_like, PAPER["production"]),
    "l-eval": (l_eval_like, PAPER["l-eval"]),
}


def digest(requests: Sequence[TraceRequest]) -> str:
    return hashlib.sha256(repr([astuple(request) for request in requests]).encode()).hexdigest()


@cache
def workload(name: str) -> list[TraceRequest]:
    return WORKLOADS[name][0](0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_figure_is_near_the_papers(name: str) -> None:
    paper = WORKLOADS[name][1]
    found = statistics(workload(name))
    assert found.requests == paper.requests
    for ours, theirs in zip(astuple(found), astuple(paper), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_make_sense(name: str) -> None:
    requests = workload(name)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    behind: dict[int, tuple[int, ...]] = {}
    for request in requests:
        assert len(request.blocks) == -(-request.input_tokens // request.block_tokens)
        assert request.output_tokens >= 1
        # An id stands for its block and all before it.
        for place, block in enumerate(request.blocks):
            before = request.blocks[max(0, place - 1) : place]
            assert behind.setdefault(block, before) == before


def test_another_process_generates_the_same_and_another_seed_does_not() -> None:
    code = (
        "from tests.simulator.test_generators import *;"
        "print(digest(conversation_like(3, 500) + production_like(3, 500) + l_eval_like(3)"
        " + tool_agent_like(conversation_like(3, 500), 3)))"
    )
    env = {"PYTHONPATH": ":".join([".", *sys.path]), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    here = [
        *conversation_like(3, 500),
        *production_like(3, 500),
        *l_eval_like(3),
        *tool_agent_like(conversation_like(3, 500), 3),
    ]
    assert told.strip() == digest(here)
    assert digest(production_like(3, 500)) != digest(production_like(4, 500))


def test_a_surrogate_keeps_the_conversations_requests_and_shares_nothing_with_them() -> None:
    conversation = conversation_like(1, 600)
    found = tool_agent_like(conversation, 1)
    known = set(conversation)
    calls = [request for request in found if request not in known]
    assert len(found) - len(calls) > 0.99 * len(conversation)
    ids = {block for request in conversation for block in request.blocks}
    assert not any(ids & set(call.blocks) for call in calls)
    prefixes = {
        call.blocks[:12] if call.input_tokens > 6_100 else call.blocks[:5] for call in calls
    }
    assert sorted(map(len, prefixes)) == [5, 12]


def test_a_surrogate_needs_a_conversation() -> None:
    with pytest.raises(ValueError, match="no conversation"):
        tool_agent_like([], 1)
    with pytest.raises(ValueError, match="blocks of 512"):
        tool_agent_like([TraceRequest(0.0, 5, 1, (), 1024)], 1)
