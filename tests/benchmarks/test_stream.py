"""The accounting must see every way in which a stream can go wrong."""

import json
from typing import Any

import pytest
from vertumnus_bench.stream import Fault, Stream, causes, hit_rate, tally
from vertumnus_bench.workload import Ask

ANSWER = [7, 8, 9, 10]
DONE = b"[DONE]"


def event(ids: list[int], reason: str | None = None, *, counted: int | None = None) -> bytes:
    meta: dict[str, Any] = {
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "completion_tokens": len(ids) if counted is None else counted,
        "finish_reason": None if reason is None else {"type": reason},
    }
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


def whole() -> list[bytes]:
    return [event(ANSWER[:1]), event(ANSWER[:3]), event(ANSWER, "length"), DONE]


def seen(*events: bytes, cause: str | None = None, left: bool = False) -> Stream:
    stream = Stream(Ask(prompt=(1,) * 40, new_tokens=len(ANSWER)))
    for data in events:
        stream.event(data)
    stream.left = left
    stream.close(cause)
    return stream


def kinds(stream: Stream) -> set[Fault]:
    return {fault for fault, _ in stream.faults}


def test_a_whole_stream_is_right() -> None:
    stream = seen(*whole())
    assert stream.faults == [] and stream.output == ANSWER
    assert (stream.prompt_tokens, stream.cached_tokens) == (40, 16)


@pytest.mark.parametrize(
    "events",
    [
        [],
        whole()[:1],
        whole()[:3],
        [event(ANSWER[:1]), DONE],
        [event(ANSWER[:1]), b'{"error": {"message": "gone"}}', DONE],
        [event(ANSWER[:2], "abort"), DONE],
        [event(ANSWER, "stop"), DONE],
        [event(ANSWER[:3], "length"), DONE],
        [event(ANSWER, "length", counted=5), DONE],
    ],
    ids=[
        "nothing came",
        "cut in the middle",
        "cut before the end",
        "no finish",
        "error in the stream",
        "aborted",
        "ended early by a stop token",
        "too short",
        "a gap that the engine's count shows",
    ],
)
def test_what_does_not_end_whole_is_lost(events: list[bytes]) -> None:
    assert kinds(seen(*events)) == {Fault.LOST}


def test_a_refused_request_is_lost_with_its_cause() -> None:
    stream = seen(cause="503: no worker")
    assert stream.faults == [(Fault.LOST, "503: no worker")]


def test_a_stream_that_hangs_is_not_lost_as_well() -> None:
    stream = Stream(Ask(prompt=(1,), new_tokens=len(ANSWER)))
    stream.event(event(ANSWER[:1]))
    stream.hang("silence")
    stream.close("hung up on")
    assert stream.faults == [(Fault.HUNG, "silence")]


@pytest.mark.parametrize(
    "events",
    [
        [*whole(), DONE],
        [*whole()[:3], event(ANSWER, "length"), DONE],
        [*whole(), event(ANSWER)],
        [event(ANSWER[:1]), event([*ANSWER, 11], "length"), DONE],
        [event(ANSWER, "length", counted=3), DONE],
    ],
    ids=["ended twice", "finished twice", "more after the end", "too long", "repeated tokens"],
)
def test_what_comes_twice_is_duplicated(events: list[bytes]) -> None:
    assert kinds(seen(*events)) == {Fault.DUPLICATED}


@pytest.mark.parametrize("second", [[7], [7, 9, 9], [8]])
def test_tokens_that_are_taken_back_are_wrong(second: list[int]) -> None:
    stream = seen(event(ANSWER[:2]), event(second), event(ANSWER, "length"), DONE)
    assert Fault.WRONG in kinds(stream)


def test_a_token_that_the_reference_does_not_have_is_wrong() -> None:
    stream = seen(*whole())
    stream.differs(2, 55)
    assert stream.faults == [(Fault.WRONG, "token 2 is 9, not 55")]


def test_who_leaves_has_lost_nothing_but_can_have_seen_wrong_tokens() -> None:
    assert seen(event(ANSWER[:2]), left=True).faults == []
    assert seen(cause="no end", left=True).faults == []
    assert kinds(seen(event(ANSWER[:2]), event([9]), left=True)) == {Fault.WRONG}


def test_a_tally_counts_streams_and_not_faults() -> None:
    twice = seen(*whole(), DONE, DONE)
    assert len(twice.faults) == 2
    streams = [twice, seen(), seen(*whole())]
    assert tally(streams) == {"lost": 1, "hung": 0, "duplicated": 1, "wrong": 0}
    assert causes(streams) == {
        "duplicated: the stream ended twice": 2,
        "lost: the stream stopped after 0 tokens": 1,
    }


def test_the_hit_rate_weighs_tokens_and_skips_what_never_began() -> None:
    assert hit_rate([seen(*whole()), seen()]) == 16 / 40
    assert hit_rate([]) == 0.0
