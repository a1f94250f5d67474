"""The two legs of one attempt, which to its exchange are a single call.

The decode leg's answer is the client's. The prefill leg's is read and thrown away: its end says
that the KV has arrived. They race: whichever fails first decides the attempt, and the other one's
connection is closed and its engine told. Nothing waits for a leg whose peer has failed, but for a
moment where the decode server's failure may be the news of the prefill side's.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vertumnus_router.core.events import Failure, Leg
from vertumnus_router.io.answers import AbortScan, Fault, failure_of, fault_in, in_words
from vertumnus_router.io.prompt_logprobs import PromptLogprobs
from vertumnus_router.io.upstream import (
    Body,
    Broken,
    Call,
    End,
    Front,
    Head,
    Headers,
    Message,
    Post,
)

#: How much of an error, or of an answer that nobody gets to see, is kept.
_KEPT_BYTES = 64 * 1024
#: What both legs together may have answered and not passed on, where one is merged into the other.
_MERGED_BYTES = 256 * 1024 * 1024
#: How long the prefill leg may take to end after the decode leg has: it should have long before.
_DRAIN_S = 5.0
#: How long the prefill leg may take to say that it has failed, after the decode leg has. A prefill
#: side that fails a room tells the decode server, whose answer may come before its own.
_LAST_WORD_S = 0.3


@dataclass(frozen=True, slots=True)
class Arrived:
    """The decode server has the KV."""

    call: "Pair"


@dataclass(frozen=True, slots=True)
class LegFailed:
    """The attempt is over. ``status`` and ``body`` are the engine's own, if it gave any."""

    call: "Pair"
    leg: Leg
    failure: Failure
    cause: str
    status: int = 0
    body: bytes = b""


class _Half:
    """One leg: its call and what it has answered so far."""

    def __init__(self, leg: Leg, tell: Callable[[], None]) -> None:
        self.leg = leg
        self.call: Call | None = None
        self.status = 0
        self.headers: Headers = []
        self.body = bytearray()
        #: complete, broken or dropped
        self.over = False
        self._tell = tell
        self._searched = 0

    @property
    def is_events(self) -> bool:
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )

    def has_event(self) -> bool:
        """Whether an event is complete in ``body``. What has been searched is not searched again,
        so until then ``body`` must only grow."""
        found = self.body.find(b"\n\n", self._searched) >= 0
        if not found:
            self._searched = max(0, len(self.body) - 1)  # the other half of the end may follow
        return found

    def take(self, *, events: bool = False) -> bytes:
        """What is in ``body``, which then is empty; of ``events`` those that are complete."""
        end = len(self.body)
        if events:
            last = self.body.rfind(b"\n\n", self._searched)
            end = last + 2 if last >= 0 else 0
        with memoryview(self.body) as view:
            data = bytes(view[:end])
        del self.body[:end]
        self._searched = max(0, len(self.body) - 1)
        return data

    def drop(self) -> None:
        """Close the connection, and tell the engine in case that is not enough."""
        if not self.over:
            self.over = True
            if self.call is not None:
                self.call.abandon()
            self._tell()


class Pair:
    """``start`` it once. What happens is delivered as ``Head``, ``Body`` and ``End`` of the
    decode leg, ``Arrived``, or ``LegFailed``, the last of all.

    ``tell_prefill`` and ``tell_decode`` abort the attempt at the leg's engine and return at once.
    ``merges``: put the prompt's log-probabilities into the answer.
    """

    def __init__(
        self,
        *,
        deliver: Callable[[Message | Arrived | LegFailed], None],
        tell_prefill: Callable[[], None],
        tell_decode: Callable[[], None],
        merges: bool,
    ) -> None:
        self._deliver: Callable[[Message | Arrived | LegFailed], None] | None = deliver
        self._prefill = _Half(Leg.PREFILL, tell_prefill)
        self._decode = _Half(Leg.DECODE, tell_decode)
        self._scan = AbortScan()
        self._merges = merges
        self._logprobs: PromptLogprobs | None = None
        #: bytes of the prefill leg's answer that are kept, as they came or as ``_logprobs``
        self._kept = 0
        #: whether the decode leg's first event, or all of its answer, is there and no failure
        self._sound = False
        self._answering = False
        self._answered = False
        self._arrived = False
        #: the decode leg's failure, while the prefill leg may still say that it was its own
        self._withheld: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, prefill: Front, prefill_post: Post, decode: Front, decode_post: Post) -> None:
        self._prefill.call = prefill.send(prefill_post, self._on_prefill)
        self._decode.call = decode.send(decode_post, self._on_decode)

    def abandon(self) -> None:
        """Close what is open, tell both engines, and be silent from now on."""
        self._deliver = None
        self._stop()

    def consumed(self, size: int) -> None:
        # What was held back has been consumed before: the reading must not stop while the first
        # event is not complete. Counting it again lets only as much more be buffered.
        if self._decode.call is not None:
            self._decode.call.consumed(size)

    # -- the prefill leg -------------------------------------------------------------------------

    def _on_prefill(self, message: Message) -> None:
        half = self._prefill
        match message:
            case Head():
                half.status, half.headers = message.status, message.headers
            case Body():
                message.call.consumed(len(message.data))
                self._scan.feed(message.data)
                if not self._merges or half.status >= 400:
                    half.body += message.data[: max(0, _KEPT_BYTES - len(half.body))]
                    return
                half.body += message.data
                self._kept += len(message.data)
                self._limit_the_size(Leg.PREFILL)
            case End():
                half.over = True
                self._stop_waiting()
                self._prefill_ended()
            case Broken():
                half.over = True
                self._stop_waiting()
                self._prefill_failed(_broken(message), message.cause)

    def _prefill_ended(self) -> None:
        half = self._prefill
        if half.status >= 400:
            body = half.take()
            cause = in_words(half.status, body)
            self._prefill_failed(failure_of(half.status), cause, half.status, body)
            return
        answer = half.take()
        fault = fault_in(answer)
        if fault is None and self._scan.found:
            fault = Fault(500, "aborted by the engine")
        if fault is not None:
            self._prefill_failed(failure_of(fault.status), f"the engine {fault.message}")
            return
        if self._merges:
            try:
                self._logprobs = PromptLogprobs(answer, events=half.is_events)
            except ValueError as exc:
                cause = f"the log-probabilities of the prompt cannot be read: {exc}"
                self._fail(Leg.PREFILL, Failure.SERVER_ERROR, cause)
                return
        self._kv_arrived()
        self._proceed()

    def _prefill_failed(
        self, failure: Failure, cause: str, status: int = 0, body: bytes = b""
    ) -> None:
        """That does not matter any more where tokens have come from the decode server, unless
        the answer wants something of this one."""
        if self._merges or not self._answering:
            self._fail(Leg.PREFILL, failure, cause, status, body)

    # -- the decode leg --------------------------------------------------------------------------

    def _on_decode(self, message: Message) -> None:
        half = self._decode
        match message:
            case Head():
                half.status, half.headers = message.status, message.headers
            case Body() if self._withheld is not None:
                message.call.consumed(len(message.data))
            case Body() if self._answering and not self._merges:
                self._send(Body(self, message.data))
            case Body():
                message.call.consumed(len(message.data))
                if half.status >= 400:
                    half.body += message.data[: max(0, _KEPT_BYTES - len(half.body))]
                    return
                half.body += message.data
                self._proceed()
                if self._merges:
                    self._limit_the_size(Leg.DECODE)
            case End():
                half.over = True
                self._proceed()
            case Broken():
                half.over = True
                self._fail(Leg.DECODE, _broken(message), message.cause)

    def _proceed(self) -> None:
        """Pass on what may be passed on of what the decode leg has answered.

        Of a stream the first event must be there, of any other answer all: it may be a failure.
        """
        half = self._decode
        if self._deliver is None or self._answered or not half.status:
            return
        if self._withheld is not None:
            if self._prefill.over:
                self._withheld()
            return
        if half.status >= 400:
            if half.over:
                body = half.take()
                cause = in_words(half.status, body)
                self._decode_failed(half.status, cause, half.status, body)
            return
        if not self._sound:
            if not (half.over or (half.is_events and half.has_event())):
                return
            fault = fault_in(bytes(half.body))
            if fault is not None:
                self._decode_failed(fault.status, f"the engine {fault.message}")
                return
            self._sound = True
        if self._merges and self._logprobs is None:
            if half.over:
                self._limit_the_wait()
            return
        try:
            self._pass_on()
        except ValueError as exc:
            cause = f"the log-probabilities of the prompt do not fit in: {exc}"
            self._fail(Leg.DECODE, Failure.SERVER_ERROR, cause)

    def _decode_failed(self, says: int, cause: str, status: int = 0, body: bytes = b"") -> None:
        """The decode leg's answer ``says`` with a status that it is none. A fault of the server's
        is withheld for a moment if the prefill leg is open: if that fails, too, it was the cause.
        """
        fail = partial(self._fail, Leg.DECODE, failure_of(says), cause, status, body)
        if says < 500 or self._prefill.over:
            fail()
            return
        self._withheld = fail
        self._timer = asyncio.get_running_loop().call_later(_LAST_WORD_S, fail)

    def _pass_on(self) -> None:
        half = self._decode
        if self._logprobs is None:
            data = half.take()
        elif half.is_events:
            whole = half.take(events=True)
            events = whole[:-2].split(b"\n\n") if whole else []
            data = b"".join(self._logprobs.into_event(event) + b"\n\n" for event in events)
            if half.over:
                data += half.take()
        else:
            data = self._logprobs.into_answer(half.take())
        if not self._answering:
            self._answering = True
            headers = half.headers
            if self._merges:  # the length is another one now
                headers = [pair for pair in headers if pair[0] != b"content-length"]
            self._kv_arrived()
            self._send(Head(self, half.status, headers))
        if data:
            self._send(Body(self, data))
        if half.over:
            self._answered = True
            if not self._prefill.over:
                self._limit_the_wait()
            self._send(End(self))

    # -- both ------------------------------------------------------------------------------------

    def _kv_arrived(self) -> None:
        if not self._arrived:
            self._arrived = True
            self._send(Arrived(self))

    def _limit_the_size(self, leg: Leg) -> None:
        """Fail the attempt if a merge would take too much memory. Another one would, too."""
        if self._kept + len(self._decode.body) > _MERGED_BYTES:
            cause = (
                f"the answer and the log-probabilities of its prompt exceed the "
                f"{_MERGED_BYTES >> 20} MiB that the router keeps to merge them: ask for fewer, "
                f"with a later logprob_start_len or a smaller top_logprobs_num"
            )
            self._fail(leg, Failure.CLIENT_ERROR, cause)

    def _limit_the_wait(self) -> None:
        """The decode leg has ended, and the prefill leg has not."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_DRAIN_S, self._waited_long_enough)

    def _waited_long_enough(self) -> None:
        if self._answered:
            self._prefill.drop()
        else:
            cause = f"no answer within {_DRAIN_S:g} s after the decode server's"
            self._fail(Leg.PREFILL, Failure.SERVER_ERROR, cause)

    def _fail(
        self, leg: Leg, failure: Failure, cause: str, status: int = 0, body: bytes = b""
    ) -> None:
        if not self._answered:
            self._stop()
            self._send(LegFailed(self, leg, failure, cause, status, body))
            self._deliver = None

    def _stop(self) -> None:
        self._prefill.drop()
        self._decode.drop()
        self._stop_waiting()
        self._withheld = None

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, message: Message | Arrived | LegFailed) -> None:
        if self._deliver is not None:
            self._deliver(message)


def _broken(message: Broken) -> Failure:
    return Failure.DISCONNECTED if message.connected else Failure.UNREACHABLE
