"""One request from arrival to end. One task owns it, and it ends exactly once.

The task waits in one place, its mailbox: for what the control plane decides, for what the
front answers, and for the client to leave. Nothing is sent to the client before the first
byte of an answer, so until then an attempt can fail and another one follow.
"""

import asyncio
import logging
from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.core.effects import Abort, Dispatch, Effect, Reject
from vertumnus_router.core.events import (
    Failure,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from vertumnus_router.core.types import PoolId, Request, RequestId
from vertumnus_router.io.api_errors import ApiError, in_openai_shape
from vertumnus_router.io.asgi import Headers, Receive, Send, respond, respond_error
from vertumnus_router.io.control_loop import ControlLoop
from vertumnus_router.io.forwarding import engine_rid, engine_rids, routing, to_client
from vertumnus_router.io.mailbox import Mailbox
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.upstream import Body, Broken, Call, End, Front, Head, Message
from vertumnus_router.protocol import PrefillDone

log = logging.getLogger(__name__)

#: An error body of the engine that is longer than this is cut.
_ERROR_BYTES = 64 * 1024
_RETRY_AFTER = (b"retry-after", b"1")
_JSON = b"application/json"
_EVENTS = b"text/event-stream"


class Gone:
    """The client closed its connection."""


class Fronts(Protocol):
    """Where attempts are sent."""

    def front(self, pool: PoolId) -> Front | None:
        """The front of a pool, None if it has left."""

    def suspect(self, pool: PoolId) -> None:
        """The front did not answer: look at once whether it is still there."""

    def abort(self, pool: PoolId, rids: list[str]) -> None:
        """Tell the engine to stop these; returns at once."""


class Exchange:
    """Owns one accepted request: ``run`` answers the client and returns when it is over."""

    def __init__(
        self,
        *,
        request: Request,
        engine_items: int | None,
        arrived_s: float,
        target: bytes,
        body: bytes,
        headers: Headers,
        client_id: bytes,
        control: ControlLoop,
        fronts: Fronts,
        metrics: RouterMetrics,
        clock: Clock,
        receive: Receive,
        send: Send,
    ) -> None:
        self.request = request
        self.dispatch: Dispatch | None = None
        self.mailbox: Mailbox[Effect | Message | Gone] = Mailbox()
        self._engine_items = engine_items
        self._arrived_s = arrived_s
        self._target = target
        self._body = body
        self._headers = headers
        self._client_id = client_id
        self._control = control
        self._fronts = fronts
        self._metrics = metrics
        self._clock = clock
        self._receive = receive
        self._send = send
        self._call: Call | None = None
        self._status = 0
        self._answer_headers: Headers = []
        self._error_body = b""
        self._streamed = False
        self._is_event_stream = False
        self._prefilled = 0
        self._over = False
        self._started = False

    @property
    def id(self) -> RequestId:
        return self.request.id

    async def run(self) -> None:
        """Serve the request. A cancelled task (the router stops) leaves nothing behind."""
        self._control.own(self.id, self.mailbox.put)
        watch = asyncio.create_task(self._watch())
        try:
            self._control.feed(RequestArrived(self.request))
            while not self._over:
                await self._take(await self.mailbox.get())
        except Exception:
            log.exception("request %s failed inside the router", self.id)
            await self._give_up()
        finally:
            watch.cancel()
            if not self._over:
                self._cancel("stopped")
            self._control.disown(self.id)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.mailbox.put(Gone())

    # -- what the pool's reports say ----------------------------------------------------------

    def prefill_started(self) -> None:
        if self.dispatch is not None:
            self._control.feed(PrefillStarted(self.id, self.dispatch.worker))

    def prefill_done(self, done: PrefillDone) -> None:
        """The engine's count for the request, or for one prompt of its batch: only a request
        of one prompt says anything about the prediction."""
        dispatch = self.dispatch
        if dispatch is None:
            return
        self._prefilled += 1
        if self._engine_items is not None:
            if self._prefilled == self._engine_items:
                self._control.feed(PrefillFinished(self.id, dispatch.worker))
            return
        chosen = dispatch.decision.chosen
        if self.request.exact and done.input_tokens != self.request.input_tokens:
            self._metrics.token_count_mismatch()
        self._metrics.prefill(
            chosen,
            cached_tokens=done.cached_tokens,
            input_tokens=done.input_tokens,
            compute_s=done.compute_s,
        )
        self._control.feed(
            PrefillFinished(self.id, dispatch.worker, done.cached_tokens, done.compute_s)
        )

    # -- everything that can happen ------------------------------------------------------------

    async def _take(self, message: Effect | Message | Gone) -> None:
        match message:
            case Dispatch():
                self._attempt(message)
            case Abort(worker=worker):
                if self.dispatch is not None and self.dispatch.worker == worker:
                    self._aborted()
            case Reject():
                await self._rejected(message)
            case Gone():
                self._cancel("cancelled")
            case Head() | Body() | End() | Broken() if message.call is not self._call:
                pass  # of an attempt that is no longer wanted
            case Head():
                self._begun(message)
            case Body():
                await self._received(message)
            case End():
                await self._ended()
            case Broken():
                self._call = None
                if self.dispatch is not None:
                    self._fronts.suspect(self.dispatch.pool)
                failure = Failure.DISCONNECTED if message.connected else Failure.UNREACHABLE
                self._failed(failure, message.cause)

    def _attempt(self, dispatch: Dispatch) -> None:
        self._drop_call()
        self.dispatch = dispatch
        self._status, self._answer_headers, self._error_body = 0, [], b""
        self._prefilled = 0
        log.debug("dispatch %s", dispatch)
        waited_s = self._clock.now() - self._arrived_s
        self._metrics.dispatched(dispatch.decision.chosen, dispatch.attempt, waited_s)
        front = self._fronts.front(dispatch.pool)
        if front is None:
            self._failed(Failure.WORKER_LOST, f"pool {dispatch.pool} has left")
            return
        rid = engine_rid(self.id, dispatch.attempt)
        headers = [*self._headers, *routing(dispatch.leader.index, rid, self._client_id)]
        self._call = front.send(front.post(self._target, headers, self._body), self.mailbox.put)

    def _begun(self, head: Head) -> None:
        self._status, self._answer_headers = head.status, head.headers

    async def _received(self, body: Body) -> None:
        if self._status >= 400:
            room = _ERROR_BYTES - len(self._error_body)
            self._error_body += body.data[:room]
            body.call.consumed(len(body.data))
            return
        if not self._streamed:
            await self._start_answer()
        await self._send({"type": "http.response.body", "body": body.data, "more_body": True})
        body.call.consumed(len(body.data))

    async def _start_answer(self) -> None:
        """The first byte is here: from now on there is no second attempt, and no need for the
        body that one would have sent."""
        self._streamed = True
        self._body, self._headers = b"", []
        dispatch = self.dispatch
        assert dispatch is not None
        headers = to_client(self._answer_headers)
        self._is_event_stream = any(
            name == b"content-type" and value.startswith(_EVENTS) for name, value in headers
        )
        if self._is_event_stream:
            self._metrics.first_byte(dispatch.decision.chosen, self._clock.now() - self._arrived_s)
        if not self._prefilled:
            self._control.feed(PrefillFinished(self.id, dispatch.worker))
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
            self._finish("ok")
            self._control.feed(RequestFinished(self.id))
            await self._send({"type": "http.response.body", "body": b""})
            return
        reason = self._error_body.decode("utf-8", "replace").strip()
        cause = f"the engine answered {self._status}: {reason[:500]}"
        if self._status in (429, 503):
            self._failed(Failure.OVERLOADED, cause)
        elif self._status >= 500:
            self._failed(Failure.SERVER_ERROR, cause)
        else:
            self._failed(Failure.CLIENT_ERROR, cause)

    def _failed(self, failure: Failure, cause: str) -> None:
        """The attempt is over; the control plane answers with another one or a ``Reject``."""
        self._metrics.attempt_failed(failure.value)
        worker = None if self.dispatch is None else self.dispatch.worker
        self._control.feed(RequestFailed(self.id, failure, cause, self._streamed, worker))

    def _aborted(self) -> None:
        """The worker is lost: what it still might say is not wanted."""
        self._drop_call()
        self._failed(Failure.WORKER_LOST, "the worker was lost while it had the request")

    async def _rejected(self, reject: Reject) -> None:
        engine_said = 400 <= self._status < 500 and self._status != 429 and self._error_body
        self._drop_call()
        self._finish("client_error" if engine_said else reject.code)
        headers = [_RETRY_AFTER] if reject.status in (429, 503) else []
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
        self._finish(outcome)
        self._control.feed(RequestCancelled(self.id))

    def _drop_call(self) -> None:
        """Close the connection of the attempt, and tell the engine in case that is not enough:
        it looks for closed connections only every few seconds."""
        call, self._call = self._call, None
        if call is None or self.dispatch is None:
            return
        call.abandon()
        rid = engine_rid(self.id, self.dispatch.attempt)
        self._fronts.abort(self.dispatch.pool, engine_rids(rid, self._engine_items))

    async def _give_up(self) -> None:
        """A fault of the router itself: the client still gets an answer, or a closed stream."""
        if not self._over:
            self._cancel("error")
        if not self._started:
            error = ApiError(500, "internal_error", "the router failed; see its log")
            await respond_error(self._send, error, self._answer_marks())

    def _finish(self, outcome: str) -> None:
        self._over = True
        chosen = None if self.dispatch is None else self.dispatch.decision.chosen
        self._metrics.ended(chosen, outcome)

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
