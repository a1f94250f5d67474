"""One request from arrival to end. One task owns it, and it ends exactly once.

The task waits in one place, its mailbox: for what the control plane decides, for what the
front answers, and for the client to leave. Nothing is sent to the client before the first
byte of an answer, so until then an attempt can fail and another one follow.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vertumnus_router.clock import Clock
from vertumnus_router.core.effects import Abort, Copy, Dispatch, Effect, Pairing, Reject
from vertumnus_router.core.events import (
    Failure,
    HandedOver,
    Leg,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from vertumnus_router.core.types import Request, RequestId
from vertumnus_router.io.admission import retry_after
from vertumnus_router.io.answers import failure_of, in_words, retry_after_s
from vertumnus_router.io.api_errors import ApiError, in_openai_shape
from vertumnus_router.io.asgi import Headers, Receive, Send, respond, respond_error
from vertumnus_router.io.config import Limits
from vertumnus_router.io.control_loop import ControlLoop
from vertumnus_router.io.direct import Direct
from vertumnus_router.io.engines import Engines
from vertumnus_router.io.forwarding import (
    addressed,
    engine_rid,
    engine_rids,
    paired_bodies,
    routing,
    to_client,
)
from vertumnus_router.io.mailbox import Mailbox
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.observe.observer import Observer
from vertumnus_router.io.observe.trail import Trail
from vertumnus_router.io.pair import Arrived, LegFailed, Pair
from vertumnus_router.io.ttft import Marks
from vertumnus_router.io.upstream import Body, Broken, Call, End, Front, Head, Message
from vertumnus_router.protocol import PrefillDone

log = logging.getLogger(__name__)

#: An error body of the engine that is longer than this is cut.
_ERROR_BYTES = 64 * 1024
#: So much of an answer that is no stream is held back until it is complete: it may still break,
#: and then another attempt or a clear error follows.
_HELD_BYTES = 256 * 1024
_RETRY_AFTER_S = 1.0
_JSON = b"application/json"
_EVENTS = b"text/event-stream"


class Gone:
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What ``dispatch`` pulls is there, or is not waited for any longer."""

    dispatch: Dispatch


@dataclass(frozen=True, slots=True)
class Opaque:
    """A request that goes on as it came, to one server, since nobody here knows what it means.
    Unless it is ``repeatable`` it is tried once."""

    method: bytes
    repeatable: bool


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has come of ``call`` for so long."""

    call: Call | Pair
    seconds: float


Told = Effect | Message | Arrived | LegFailed | Pulled | Gone | Stalled


class Exchange:
    """Owns one accepted request: ``run`` answers the client and returns when it is over."""

    def __init__(
        self,
        *,
        request: Request,
        engine_items: int | None,
        merges_logprobs: bool,
        streams: bool,
        opaque: Opaque | None = None,
        arrived_s: float,
        target: bytes,
        body: bytes,
        headers: Headers,
        client_id: bytes,
        on_begun: Callable[[], None],
        control: ControlLoop,
        engines: Engines,
        metrics: RouterMetrics,
        observer: Observer,
        trail: Trail,
        clock: Clock,
        receive: Receive,
        send: Send,
        direct: Direct | None,
    ) -> None:
        self.request = request
        self.dispatch: Dispatch | None = None
        self.mailbox: Mailbox[Told] = Mailbox()
        self._engine_items = engine_items
        self._merges_logprobs = merges_logprobs
        self._streams = streams
        self._opaque = opaque
        self._presumed: asyncio.TimerHandle | None = None
        self._arrived_s = arrived_s
        self._target = target
        self._body = body
        self._headers = headers
        self._client_id = client_id
        self._on_begun = on_begun
        self._control = control
        self._engines = engines
        self._metrics = metrics
        self._observer = observer
        self._trail = trail
        self._clock = clock
        self._receive = receive
        self._send = send
        self._direct = direct
        self._call: Call | Pair | None = None
        #: what the current attempt waits for before it is sent
        self._pull: Copy | None = None
        self._marks = Marks(arrived_s)
        self._status = 0
        self._answer_headers: Headers = []
        self._error_body = b""
        self._held = b""
        #: when the worker was last heard of; None while it is the client that is waited for
        self._heard_s: float | None = None
        self._streamed = False
        self._is_event_stream = False
        self._prefilled: set[str] = set()
        self._over = False
        self._started = False
        #: a piece of the body is on its way to the client
        self._sending = False

    @property
    def id(self) -> RequestId:
        return self.request.id

    async def run(self) -> None:
        """Serve the request. A cancelled task (the router stops) leaves nothing behind."""
        self._control.own(self.id, self.mailbox.put)
        watch = self._watch()
        try:
            self._control.feed(RequestArrived(self.request))
            while not self._over:
                box = self.mailbox
                await self._take(await box.get() if box.empty else box.take())
        except Exception:
            log.exception("request %s failed inside the router", self.id)
            await self._give_up()
        finally:
            watch()
            if self._presumed is not None:
                self._presumed.cancel()
            if not self._over:
                self._cancel("stopped")
            self._control.disown(self.id)

    def _watch(self) -> Callable[[], None]:
        """Have it told when the client leaves, until the returned function is called."""
        if self._direct is not None:
            self._direct.when_gone(partial(self.mailbox.put, Gone()))
            return self._direct.forget
        task = asyncio.create_task(self._see_off())

        def stop() -> None:
            task.cancel()

        return stop

    async def _see_off(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.mailbox.put(Gone())

    def give_up_if_stalled(self, now: float, limits: Limits) -> None:
        """Called about once a second."""
        limit_s = limits.stream_idle_s if self._streamed else limits.answer_s
        if self._call is not None and self._heard_s is not None and now - self._heard_s > limit_s:
            self.mailbox.put(Stalled(self._call, limit_s))

    # -- what the pool's reports say ----------------------------------------------------------

    def prefill_started(self) -> None:
        dispatch = self.dispatch
        if dispatch is not None:
            if self._marks.started_s is None:
                self._marks.started_s = self._clock.now()
            self._control.feed(PrefillStarted(self.id, dispatch.worker, dispatch.attempt))

    def prefill_done(self, done: PrefillDone) -> None:
        """The engine's count for the request, or for one prompt of its batch: only a request
        of one prompt says anything about the prediction. The first count of each is the one: a
        request that a merge has retracted is prefilled again, with its own output."""
        dispatch = self.dispatch
        if dispatch is None or done.rid in self._prefilled:
            return
        self._prefilled.add(done.rid)
        if len(self._prefilled) == (self._engine_items or 1):
            self._marks.prefilled_s = self._clock.now()
        if self._engine_items is not None:
            if len(self._prefilled) == self._engine_items:
                self._feed_prefilled(dispatch)
            return
        self._trail.prefill = done
        chosen = dispatch.decision.chosen
        if self.request.exact and done.input_tokens != self.request.input_tokens:
            self._metrics.token_count_mismatch()
        self._metrics.prefill(
            chosen,
            cached_tokens=done.cached_tokens,
            input_tokens=done.input_tokens,
            compute_s=done.compute_s,
        )
        self._feed_prefilled(dispatch, done)

    def _feed_prefilled(self, dispatch: Dispatch, done: PrefillDone | None = None) -> None:
        cached = None if done is None else done.cached_tokens
        compute_s = None if done is None else done.compute_s
        self._on_begun()
        self._control.feed(
            PrefillFinished(self.id, dispatch.worker, cached, compute_s, dispatch.attempt)
        )

    # -- everything that can happen ------------------------------------------------------------

    async def _take(self, message: Told) -> None:
        match message:
            case Dispatch():
                self._attempt(message)
            case Head() | Body() | End() | Broken() | Arrived() | LegFailed() | Stalled():
                if message.call is self._call:  # else of an attempt that is no longer wanted
                    await self._heard(message)
            case Abort(worker=worker, attempt=attempt, leg=leg):
                now = self.dispatch
                if now is not None and (now.worker, now.attempt) == (worker, attempt):
                    self._aborted(leg)
            case Pulled(dispatch=dispatch):
                if self._pull is not None and dispatch is self.dispatch:
                    self._pull = None
                    self._marks.pulled_s = self._clock.now()
                    self._metrics.pull_waited(self._marks.pull_s)
                    self._forward(dispatch)
            case Reject():
                await self._rejected(message)
            case Gone():
                self._cancel("cancelled")

    async def _heard(self, message: Message | Arrived | LegFailed | Stalled) -> None:
        """What the current call says."""
        match message:
            case Head():
                self._begun(message)
            case Body():
                await self._received(message)
            case End():
                await self._ended()
            case Broken():
                self._call = None
                if self.dispatch is not None:
                    self._engines.suspect(self.dispatch.pool)
                failure = Failure.DISCONNECTED if message.connected else Failure.UNREACHABLE
                self._failed(failure, message.cause)
            case Arrived():
                self._kv_arrived()
            case LegFailed():
                self._leg_failed(message)
            case Stalled(seconds=seconds):
                self._stalled(seconds)

    def _attempt(self, dispatch: Dispatch) -> None:
        self._drop_call()
        if self._presumed is not None:
            self._presumed.cancel()
            self._presumed = None
        self.dispatch = dispatch
        self._status, self._answer_headers, self._error_body = 0, [], b""
        self._held = b""
        self._prefilled = set()
        self._marks = Marks(self._clock.now())
        self._observer.attempted(self._trail, dispatch, self._marks)
        log.debug("dispatch %s", dispatch)
        waited_s = self._clock.now() - self._arrived_s
        self._metrics.dispatched(dispatch.decision.chosen, dispatch.attempt, waited_s)
        self._pull = dispatch.pull
        if self._pull is not None:
            ready = partial(self.mailbox.put, Pulled(dispatch))
            self._engines.when_pulled(self._pull.transfer, ready)
            return
        self._forward(dispatch)

    def _forward(self, dispatch: Dispatch) -> None:
        """Send the attempt, whatever has become of its pull."""
        self._heard_s = self._clock.now()
        front = self._engines.front(dispatch.pool)
        if front is None:
            self._failed(Failure.WORKER_LOST, f"pool {dispatch.pool} has left")
            return
        rid = engine_rid(self.id, dispatch.attempt)
        traced = self._observer.traced(self._trail, self._headers)
        headers = self._to_worker(dispatch, rid, traced)
        if self._opaque is not None:
            post = front.post(self._target, headers, self._body, self._opaque.method)
            self._call = front.send(post, self.mailbox.put)
            return
        if dispatch.pair is not None:
            self._attempt_pair(dispatch, dispatch.pair, front, traced, rid)
            return
        plain, body = self._engines.plain(dispatch.pool), self._body
        if plain is not None:
            body = addressed(body, rid=rid, dp_rank=plain.dp_rank(dispatch.home.index))
            if not self._streams:
                self._presume_prefilled(dispatch)
        self._call = front.send(front.post(self._target, headers, body), self.mailbox.put)

    def _presume_prefilled(self, dispatch: Dispatch) -> None:
        """Nobody will say when the prefill ends, and the first byte comes with the last: take the
        prediction for it, or the request would count among those that wait for as long as it
        decodes. The control plane is told facts only: a prediction is no success of the worker."""
        chosen = dispatch.decision.chosen
        due_s = chosen.queue_s + chosen.service_s
        loop = asyncio.get_running_loop()
        self._presumed = loop.call_later(due_s, self._on_begun)

    def _to_worker(self, dispatch: Dispatch, rid: str, headers: Headers) -> Headers:
        """``headers`` and what the attempt's worker needs besides; a plain server reads that from
        the body."""
        if self._engines.plain(dispatch.pool) is not None:
            return [*headers, (b"x-request-id", self._client_id)]
        return [*headers, *routing(dispatch.home.index, rid, self._client_id)]

    def _attempt_pair(
        self, dispatch: Dispatch, pair: Pairing, front: Front, headers: Headers, rid: str
    ) -> None:
        """Send both legs; ``headers`` are what of the client's goes to each."""
        decode = self._engines.decode(pair.decode)
        port = self._engines.bootstrap_port(dispatch.pool)
        if decode is None or port is None:
            cause = f"decode server {pair.decode} has left"
            self._failed(Failure.WORKER_LOST, cause, Leg.DECODE)
            return
        plain = self._engines.plain(dispatch.pool)
        home = dispatch.home.index
        prefill_body, decode_body = paired_bodies(
            self._body,
            host=front.host,
            port=port,
            room=pair.room,
            dp_rank=home if plain is None else plain.dp_rank(home) or 0,
            rid=rid,
            plain=plain is not None,
        )
        prefill_headers = self._to_worker(dispatch, rid, headers)
        decode_headers = [*headers, (b"x-request-id", self._client_id)]
        rids = engine_rids(rid, self._engine_items)
        self._call = Pair(
            deliver=self.mailbox.put,
            tell_prefill=lambda: self._engines.abort(dispatch.pool, rids),
            tell_decode=lambda: self._engines.abort_decode(pair.decode, rids),
            merges=self._merges_logprobs,
        )
        self._call.start(
            front,
            front.post(self._target, prefill_headers, prefill_body),
            decode,
            decode.post(self._target, decode_headers, decode_body),
        )

    def _kv_arrived(self) -> None:
        dispatch = self.dispatch
        assert dispatch is not None
        self._marks.arrived_s = self._clock.now()
        self._control.feed(HandedOver(self.id, dispatch.worker, dispatch.attempt))

    def _leg_failed(self, failed: LegFailed) -> None:
        self._call = None
        self._status, self._error_body = failed.status, failed.body
        dispatch = self.dispatch
        assert dispatch is not None and dispatch.pair is not None
        self._metrics.leg_failed(failed.leg.value, failed.failure.value)
        if failed.failure in (Failure.UNREACHABLE, Failure.DISCONNECTED):
            if failed.leg is Leg.DECODE:
                self._engines.suspect_decode(dispatch.pair.decode)
            else:
                self._engines.suspect(dispatch.pool)
        self._failed(failed.failure, f"{failed.leg.value}: {failed.cause}", failed.leg)

    def _begun(self, head: Head) -> None:
        self._status, self._answer_headers = head.status, head.headers
        self._is_event_stream = any(
            name == b"content-type" and value.startswith(_EVENTS) for name, value in head.headers
        )
        self._heard_s = self._clock.now()

    async def _received(self, body: Body) -> None:
        if self._status >= 400:
            room = _ERROR_BYTES - len(self._error_body)
            self._error_body += body.data[:room]
            body.call.consumed(len(body.data))
            return
        data = body.data
        if not (self._streamed or self._is_event_stream or self._opaque):
            self._held = data = self._held + data if self._held else data
            if len(data) <= _HELD_BYTES:
                body.call.consumed(len(body.data))
                return
            self._held = b""
        self._heard_s = None
        if not self._streamed:
            await self._start_answer()
            if isinstance(body.call, Call):
                body.call.sink = self._pass_on
        self._sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False
        body.call.consumed(len(body.data))
        self._heard_s = self._clock.now()

    def _pass_on(self, data: bytes) -> bool:
        """Send a piece of the body without the detour by the mailbox, unless the client is slow
        or something is before it."""
        if self._direct is None or self._sending or not self.mailbox.empty:
            return False
        self._heard_s = self._clock.now()
        return self._direct.write(data)

    async def _start_answer(self) -> None:
        """The first byte is here: from now on there is no second attempt, and no need for the
        body that one would have sent."""
        self._streamed = True
        self._on_begun()
        self._body, self._headers = b"", []
        dispatch = self.dispatch
        assert dispatch is not None
        headers = to_client(self._answer_headers)
        self._observer.first_byte(self._trail, streams=self._is_event_stream)
        if self._is_event_stream:
            # With a length there would be no room for the error that may have to follow.
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            now = self._clock.now()
            self._metrics.first_byte(dispatch.decision.chosen, now - self._arrived_s)
            paired = dispatch.pair is not None and self._opaque is None
            if paired or dispatch.pull is not None:
                split = self._marks.split(self._arrived_s, now, handed_over=paired)
                self._metrics.ttft_split(split)
        if not self._prefilled:
            self._feed_prefilled(dispatch)
        self._started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": self._status,
                "headers": [*headers, *self._answer_marks()],
            }
        )

    async def _ended(self) -> None:
        self._call = None
        if self._status < 400:
            if not self._streamed:
                await self._start_answer()
            self._finish("ok", self._status)
            self._control.feed(RequestFinished(self.id))
            await self._send({"type": "http.response.body", "body": self._held})
            return
        self._failed(failure_of(self._status), in_words(self._status, self._error_body))

    def _failed(self, failure: Failure, cause: str, leg: Leg = Leg.PREFILL) -> None:
        """The attempt is over; the control plane answers with another one or a ``Reject``."""
        self._metrics.attempt_failed(failure.value)
        self._observer.failed(self._trail, failure)
        now = self.dispatch
        worker, attempt = (None, None) if now is None else (now.worker, now.attempt)
        once = self._opaque is not None and not self._opaque.repeatable
        final = self._streamed or (once and failure is not Failure.UNREACHABLE)
        retry_s = retry_after_s(self._answer_headers)
        self._control.feed(
            RequestFailed(self.id, failure, cause, final, worker, attempt, leg, retry_s)
        )

    def _stalled(self, seconds: float) -> None:
        paired = isinstance(self._call, Pair)
        self._drop_call()
        prefilled = self._marks.prefilled_s is not None or self._marks.arrived_s is not None
        leg = Leg.DECODE if paired and prefilled else Leg.PREFILL
        if paired:
            self._metrics.leg_failed(leg.value, Failure.STALLED.value)
        self._failed(Failure.STALLED, f"nothing came from the engine for {seconds:g} s", leg)

    def _aborted(self, leg: Leg) -> None:
        """The worker or the decode server is lost: what they still might say is not wanted."""
        if isinstance(self._call, Pair):
            self._metrics.leg_failed(leg.value, Failure.WORKER_LOST.value)
        self._drop_call()
        who = "worker" if leg is Leg.PREFILL else "decode server"
        self._failed(Failure.WORKER_LOST, f"the {who} was lost while it had the request", leg)

    async def _rejected(self, reject: Reject) -> None:
        engine_said = 400 <= self._status < 500 and self._status != 429
        self._drop_call()
        if engine_said:
            self._finish("client_error", self._status)
        else:
            self._finish(reject.code, reject.status)
        headers: Headers = []
        if reject.status in (429, 503):
            asked_s = retry_after_s(self._answer_headers) or reject.retry_s or _RETRY_AFTER_S
            headers = [retry_after(asked_s)]
        error = ApiError(reject.status, reject.code, reject.message, headers=headers)
        if self._streamed:
            await self._break_off(error)
            return
        self._started = True
        if engine_said:
            body = in_openai_shape(self._status, self._error_body)
            await respond(self._send, self._status, body, self._answer_marks(), _JSON)
        else:
            await respond_error(self._send, error, self._answer_marks())

    async def _break_off(self, error: ApiError) -> None:
        """The answer is cut: a stream of events can say so; any other is left incomplete, upon
        which the server closes the connection."""
        if not self._is_event_stream:
            return
        event = b"\n\ndata: " + error.body() + b"\n\n"
        await self._send({"type": "http.response.body", "body": event})

    def _cancel(self, outcome: str) -> None:
        self._drop_call()
        self._finish(outcome, None)
        self._control.feed(RequestCancelled(self.id))

    def _drop_call(self) -> None:
        """Close the connection of the attempt, and tell the engine in case that is not enough:
        it looks for closed connections only every few seconds."""
        call, self._call, self._pull = self._call, None, None
        if call is None or self.dispatch is None:
            return
        call.abandon()
        if isinstance(call, Pair):
            return  # it tells both engines itself
        if self._opaque is not None:
            return  # the engine was not told an id
        rid = engine_rid(self.id, self.dispatch.attempt)
        self._engines.abort(self.dispatch.pool, engine_rids(rid, self._engine_items))

    async def _give_up(self) -> None:
        """A fault of the router itself: the client still gets an answer, or a closed stream."""
        if not self._over:
            self._cancel("error")
        if not self._started:
            error = ApiError(500, "internal_error", "the router failed; see its log")
            await respond_error(self._send, error, self._answer_marks())

    def _finish(self, outcome: str, status: int | None) -> None:
        self._over = True
        chosen = None if self.dispatch is None else self.dispatch.decision.chosen
        self._metrics.ended(chosen, outcome)
        self._observer.ended(self._trail, outcome, self._status if self._streamed else status)

    def _answer_marks(self) -> Headers:
        marks: Headers = [(b"x-request-id", self._client_id)]
        if self.dispatch is not None:
            chosen = self.dispatch.decision.chosen
            marks += [
                (b"x-vertumnus-worker", chosen.worker.encode()),
                (b"x-vertumnus-cp-degree", str(chosen.degree).encode()),
                (b"x-vertumnus-attempts", str(self.dispatch.attempt).encode()),
            ]
        return marks
