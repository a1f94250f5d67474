"""What becomes of requests when the decode server dies: who is excused, and who is lost."""

import json

import pytest
from vertumnus_bench.lossless import KILLED, LosslessPlan, Outcome, arrivals, told_after_beginning
from vertumnus_bench.router_metrics import Counted
from vertumnus_bench.stream import Stream
from vertumnus_bench.workload import Ask, Leave

ERROR = b'{"error": {"message": "the decode server is gone"}}'


def seen(*events: bytes, cause: str | None = None, leave: Leave | None = None) -> Stream:
    stream = Stream(Ask(prompt=(1, 2), new_tokens=2, leave=leave), left=leave is not None)
    for data in events:
        stream.event(data)
    stream.close(cause)
    return stream


def tokens(*ids: int, ended: bool = False) -> bytes:
    meta = {
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": len(ids),
        "finish_reason": {"type": "length"} if ended else None,
    }
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


def whole() -> Stream:
    return seen(tokens(7), tokens(7, 8, ended=True), b"[DONE]")


def told() -> Stream:
    return seen(tokens(7), ERROR)


@pytest.mark.parametrize(
    "stream",
    [
        seen(ERROR),
        seen(tokens(7)),
        seen(tokens(7), cause="connection reset"),
        seen(cause="503: no decode server"),
        seen(tokens(7), tokens(8), ERROR),
        whole(),
    ],
    ids=["before a token", "cut", "reset", "refused", "wrong as well", "served"],
)
def test_only_who_had_begun_and_was_told_why_is_excused(stream: Stream) -> None:
    assert not told_after_beginning(stream)
    assert told_after_beginning(told())


def outcome(*streams: Stream, down_s: float | None) -> dict[str, object]:
    return Outcome(
        streams=list(streams),
        moves=[],
        counted=Counted({}),
        compared_outputs=0,
        kv_held_tokens=0,
        down_s=down_s,
    ).figures()


def test_without_a_killed_server_nobody_is_excused() -> None:
    left = seen(tokens(7), leave=Leave(after_events=1))
    streams = (whole(), told(), seen(cause="503"), left)
    quiet, killed = (outcome(*streams, down_s=down_s) for down_s in (None, 20.0))
    names = ("requests", "served", "left", "lost", "failed_with_cause")
    assert [quiet[name] for name in names] == [4, 1, 1, 2, 0]
    assert [killed[name] for name in names] == [4, 1, 1, 1, 1]


def test_arrivals_repeat_themselves_and_some_leave() -> None:
    plan = LosslessPlan()
    found = arrivals(plan)
    assert found == arrivals(plan) and len(found) == plan.requests == 200
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert 10 <= sum(one.ask.leave is not None for one in found) <= 30
    assert arrivals(KILLED)[-1].at_s > (KILLED.kill_at_s or 0) + 30, "it goes on after the start"
