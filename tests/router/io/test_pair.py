"""A pair of calls that a test makes answer piece by piece."""

import asyncio
import json
import time
from typing import Any, cast

import pytest
from vertumnus_router.core.events import Failure, Leg
from vertumnus_router.io import pair
from vertumnus_router.io.pair import Arrived, LegFailed, Pair
from vertumnus_router.io.upstream import Body, Broken, End, Front, Head, Message, Post

EVENTS = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]


class FakeCall:
    """A front and its only call."""

    def __init__(self) -> None:
        self.abandoned = False
        self.told = 0
        self._deliver: Any = None

    def send(self, _: Post, deliver: Any) -> "FakeCall":
        self._deliver = deliver
        return self

    def abandon(self) -> None:
        self.abandoned = True

    def consumed(self, size: int) -> None:
        pass

    def tell(self) -> None:
        self.told += 1

    def head(self, status: int = 200, headers: Any = JSON) -> None:
        self._deliver(Head(self, status, headers))

    def body(self, data: bytes) -> None:
        self._deliver(Body(self, data))

    def end(self) -> None:
        self._deliver(End(self))

    def breaks(self) -> None:
        self._deliver(Broken(self, "reset", connected=True))

    def answer(self, data: bytes, status: int = 200, headers: Any = JSON) -> None:
        self.head(status, headers)
        self.body(data)
        self.end()


class Legs:
    """Both legs of a pair that has been started, and what it has delivered."""

    def __init__(self, *, merges: bool = False) -> None:
        self.prefill, self.decode = FakeCall(), FakeCall()
        self.got: list[Message | Arrived | LegFailed] = []
        self.pair = Pair(
            deliver=self.got.append,
            tell_prefill=self.prefill.tell,
            tell_decode=self.decode.tell,
            merges=merges,
        )
        post = Post(b"", b"")
        self.pair.start(cast(Front, self.prefill), post, cast(Front, self.decode), post)

    @property
    def data(self) -> bytes:
        return b"".join(message.data for message in self.got if isinstance(message, Body))

    @property
    def failed(self) -> LegFailed | None:
        """How the attempt has ended, if it has."""
        found = [message for message in self.got if isinstance(message, LegFailed)]
        assert len(found) <= 1
        return found[0] if found else None

    def at_rest(self) -> bool:
        """Nothing is open or waited for."""
        return self.pair._timer is None and self.pair._withheld is None


def event(index: int, **meta: Any) -> bytes:
    return b"data: " + json.dumps({"text": f"t{index}", "meta_info": meta}).encode() + b"\n\n"


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("headers", [EVENTS, JSON], ids=["events", "json"])
def test_a_large_answer_in_small_pieces_takes_time_in_proportion(
    merges: bool, headers: Any
) -> None:
    content = json.dumps({"text": "x" * (6 << 20), "meta_info": {}}).encode()
    answer = b"data: " + content + b"\n\n" if headers is EVENTS else content

    async def scenario() -> None:
        legs = Legs(merges=merges)
        begun_s = time.thread_time()
        for call in (legs.prefill, legs.decode) if merges else (legs.decode,):
            call.head(headers=headers)
            for piece in in_pieces(answer, 512):
                call.body(piece)
            call.end()
        took_s = time.thread_time() - begun_s
        assert len(legs.data) == pytest.approx(len(answer), abs=64)
        legs.pair.abandon()
        # Copying or searching all of it at every piece takes many seconds.
        assert took_s < 1.0

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data: [DONE]\n\n\n", b"data: cut"])
def test_events_are_merged_however_they_are_cut(first: str, end: bytes, size: int) -> None:
    known = event(0, input_token_logprobs=[[-0.5, 1, None]])
    plain = b"".join(event(index, input_token_logprobs=[]) for index in range(3)) + end

    async def scenario() -> None:
        legs = Legs(merges=True)
        if first == "prefill":
            legs.prefill.answer(known, headers=EVENTS)
        legs.decode.head(headers=EVENTS)
        for piece in in_pieces(plain, size):
            legs.decode.body(piece)
        legs.decode.end()
        if first == "decode":
            assert not legs.data
            legs.prefill.answer(known, headers=EVENTS)
        *events, rest = legs.data.split(b"\n\n", 3)
        assert rest == end
        for index, one in enumerate(events):
            content = json.loads(one.removeprefix(b"data: "))
            assert content["text"] == f"t{index}"
            assert content["meta_info"]["input_token_logprobs"] == [[-0.5, 1, None]]
        assert isinstance(legs.got[-1], End)

    asyncio.run(scenario())


# -- who is to blame ------------------------------------------------------------------------------


ABORT = event(0, finish_reason={"type": "abort", "message": "x", "status_code": 500})
BAD_REQUEST = event(0, finish_reason={"type": "abort", "message": "x", "status_code": 400})

#: What a decode server says of a room that the prefill side has failed.
DECODE_FAILS = {
    "500": lambda call: call.answer(b"{}", 500),
    "503": lambda call: call.answer(b"{}", 503),
    "aborted": lambda call: call.answer(ABORT[6:]),
    "aborted in events": lambda call: call.answer(ABORT, headers=EVENTS),
    "aborted, and goes on": lambda call: (call.head(headers=EVENTS), call.body(ABORT)),
    "an error event": lambda call: call.answer(
        b'data: {"error": {"message": "x", "code": 500}}\n\n', headers=EVENTS
    ),
}
PREFILL_FAILS = {
    "500": (lambda call: call.answer(b"{}", 500), Failure.SERVER_ERROR),
    "400": (lambda call: call.answer(b"{}", 400), Failure.CLIENT_ERROR),
    "aborted": (lambda call: call.answer(ABORT[6:]), Failure.SERVER_ERROR),
    "broken": (lambda call: call.breaks(), Failure.DISCONNECTED),
}


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("word", PREFILL_FAILS)
@pytest.mark.parametrize("said", DECODE_FAILS)
def test_the_prefill_leg_is_to_blame_if_it_fails_a_moment_later(
    said: str, word: str, merges: bool
) -> None:
    async def scenario() -> None:
        legs = Legs(merges=merges)
        DECODE_FAILS[said](legs.decode)
        await asyncio.sleep(0.02)
        assert not legs.got and not legs.prefill.told
        fail, failure = PREFILL_FAILS[word]
        fail(legs.prefill)
        assert legs.failed is not None
        assert (legs.failed.leg, legs.failed.failure) == (Leg.PREFILL, failure)
        assert legs.at_rest()
        assert legs.decode.told == (said == "aborted, and goes on")

    asyncio.run(scenario())


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("word", ["nothing", "success", "late"])
@pytest.mark.parametrize("said", DECODE_FAILS)
def test_the_decode_leg_is_to_blame_if_the_prefill_leg_does_not_fail(
    said: str, word: str, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_LAST_WORD_S", 10 if word == "success" else 0.05)

    async def scenario() -> None:
        legs = Legs(merges=merges)
        DECODE_FAILS[said](legs.decode)
        if said == "aborted, and goes on":
            for _ in range(3):
                legs.decode.body(event(1))
        assert legs.failed is None
        if word == "success":
            legs.prefill.answer(event(0)[6:])
        else:
            await asyncio.sleep(0.1)
            assert legs.prefill.abandoned and legs.prefill.told == 1
            if word == "late":
                PREFILL_FAILS["500"][0](legs.prefill)
        assert legs.failed is not None and legs.got[-1] is legs.failed
        overloaded = said == "503"
        expected = Failure.OVERLOADED if overloaded else Failure.SERVER_ERROR
        assert (legs.failed.leg, legs.failed.failure) == (Leg.DECODE, expected)
        assert legs.at_rest()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "says",
    [
        lambda call: call.answer(b"{}", 400),
        lambda call: call.answer(b"{}", 429),
        lambda call: call.answer(BAD_REQUEST[6:]),
        lambda call: call.breaks(),
        lambda call: (call.head(headers=EVENTS), call.body(ABORT), call.breaks()),
    ],
    ids=["400", "429", "aborted with 400", "broken", "broken after an abort"],
)
def test_what_can_only_be_the_decode_legs_own_is_not_waited_for(says: Any) -> None:
    async def scenario() -> None:
        legs = Legs()
        says(legs.decode)
        assert legs.failed is not None and legs.failed.leg is Leg.DECODE
        assert legs.prefill.abandoned and legs.prefill.told == 1
        assert legs.at_rest()

    asyncio.run(scenario())


def test_nothing_is_waited_for_once_the_prefill_leg_has_ended() -> None:
    async def scenario() -> None:
        legs = Legs()
        legs.prefill.answer(b"{}")
        legs.decode.answer(b"{}", 500)
        assert legs.failed is not None and legs.failed.leg is Leg.DECODE

    asyncio.run(scenario())


def test_an_abandoned_pair_does_not_wait_for_the_last_word() -> None:
    async def scenario() -> None:
        legs = Legs()
        DECODE_FAILS["aborted, and goes on"](legs.decode)
        legs.pair.abandon()
        for call in (legs.prefill, legs.decode):
            assert call.abandoned and call.told == 1
        assert legs.at_rest()
        await asyncio.sleep(pair._LAST_WORD_S + 0.05)
        assert not legs.got and legs.prefill.told == legs.decode.told == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("merges", [False, True])
def test_no_timer_is_left_behind_when_the_prefill_leg_ends_last(merges: bool) -> None:
    async def scenario() -> None:
        legs = Legs(merges=merges)
        legs.decode.answer(event(0)[6:])
        legs.prefill.answer(event(0)[6:])
        assert isinstance(legs.got[-1], End)
        assert legs.at_rest()

    asyncio.run(scenario())
