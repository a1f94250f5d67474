"""The inference endpoints as plain ASGI: read, check, tokenise, hand over to an exchange."""

import json
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from vertumnus_router.clock import Clock
from vertumnus_router.core.types import Request, RequestId
from vertumnus_router.io.access import ANONYMOUS, ASKER, Asker
from vertumnus_router.io.admission import Door, Ticket
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond_error,
)
from vertumnus_router.io.client_request import (
    ClientRequest,
    Endpoint,
    check_pairable,
    parse,
    wants_prompt_logprobs,
)
from vertumnus_router.io.control_loop import ControlLoop
from vertumnus_router.io.direct import find
from vertumnus_router.io.engines import Engines
from vertumnus_router.io.exchange import Exchange, Opaque
from vertumnus_router.io.forwarding import Credentials, lowered, request_key, to_front
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.observe.observer import Observer
from vertumnus_router.io.observe.trail import Trail
from vertumnus_router.io.prompt import BYTES_PER_TOKEN
from vertumnus_router.io.served_model import ServedModel
from vertumnus_router.io.tokenize import TokenizeService

log = logging.getLogger(__name__)

_METHODS = {
    Endpoint.CHAT: ("POST",),
    Endpoint.COMPLETIONS: ("POST",),
    Endpoint.GENERATE: ("POST", "PUT"),
}
_CLIENT_ID_BYTES = 128
#: For requests that are passed on unread, in metrics, logs and traces.
_OTHER = "other"
#: What a path may contain besides letters, digits and ``_.-~`` (RFC 3986).
_PATH_CHARS = "/:@!$&'()*+,;="


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that was let in, and its connection."""

    request: Request
    trail: Trail
    ticket: Ticket
    scope: Scope
    receive: Receive
    send: Send


class HotPath:
    """Serves ``/v1/chat/completions``, ``/v1/completions`` and ``/generate``."""

    def __init__(
        self,
        *,
        control: ControlLoop,
        engines: Engines,
        tokenizer: TokenizeService,
        model: ServedModel,
        metrics: RouterMetrics,
        door: Door,
        credentials: Credentials,
        observer: Observer,
        clock: Clock,
        body_bytes: int,
        source: random.Random,
    ) -> None:
        self._control = control
        self._engines = engines
        self._tokenizer = tokenizer
        self._model = model
        self._metrics = metrics
        self._door = door
        self._credentials = credentials
        self._observer = observer
        self._clock = clock
        self._body_bytes = body_bytes
        self._source = source
        self._live: dict[str, Exchange] = {}
        self.stopping = False

    def find(self, rid: str) -> Exchange | None:
        """The live exchange that an engine's request id belongs to."""
        return self._live.get(request_key(rid))

    @property
    def live(self) -> Iterable[Exchange]:
        return self._live.values()

    def new_id(self) -> RequestId:
        """32 hex digits, of which a few fewer name the request in all its attempts."""
        return RequestId(f"{self._source.getrandbits(128):032x}")

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = self._clock.now()
        request_id = self.new_id()
        client_id = _client_id(scope, request_id)
        asker: Asker = scope.get(ASKER, ANONYMOUS)
        trail = Trail(request_id, client_id, scope["method"], endpoint.value, arrived_s)
        self._observer.arrived(trail, scope["headers"])
        try:
            if scope["method"] not in _METHODS[endpoint]:
                raise _method_not_allowed(endpoint)
            if self.stopping:
                raise ApiError(503, "stopping", "this router is stopping; try another one")
            body = await read_body(scope, receive, self._body_bytes)
            self._door.expect(asker)
            asked = parse(endpoint, body)
            self._model.check(asked.model)
            if self._model.prefill_only:
                check_pairable(asked)
            request = await self.describe(asked, request_id)
            request, ticket = self._door.enter(asker, request, scope, arrived_s)
            if asker.max_priority is not None:
                body = lowered(body, asked.fields, asker.max_priority)
            trail.request, trail.described_s = request, self._clock.now()
        except ClientGone:
            self._observer.ended(trail, "cancelled", None)
            return
        except Exception as exc:
            error = exc if isinstance(exc, ApiError) else _internal(exc)
            self._metrics.ended(None, error.code)
            self._observer.ended(trail, error.code, error.status)
            await respond_error(send, error, [(b"x-request-id", client_id)])
            return
        exchange = self._exchange(
            _Call(request, trail, ticket, scope, receive, send),
            engine_items=asked.engine_items,
            merges_logprobs=wants_prompt_logprobs(asked),
            streams=bool(asked.fields.get("stream")),
            target=_target(endpoint.value, scope),
            body=body,
        )
        del body, asked  # the exchange drops the body once it cannot be needed again
        await self._run(exchange, ticket)

    async def pass_on(
        self, path: str, *, repeatable: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a request that the router does not understand, see ``Opaque``. ``ApiError``."""
        arrived_s = self._clock.now()
        request_id = self.new_id()
        client_id = _client_id(scope, request_id)
        if self.stopping:
            raise ApiError(503, "stopping", "this router is stopping; try another one")
        try:
            body = await read_body(scope, receive, self._body_bytes)
        except ClientGone:
            return
        tokens = max(1, len(body) // BYTES_PER_TOKEN)
        request = Request(
            id=request_id,
            input_tokens=tokens,
            output_tokens=0,
            exact=False,
            streams=False,
            reported=False,
        )
        asker: Asker = scope.get(ASKER, ANONYMOUS)
        if asker.max_priority is not None:
            _check_priority(body, asker.max_priority)
        request, ticket = self._door.enter(asker, request, scope, arrived_s)
        # What the client calls the path would be a label without bounds.
        trail = Trail(request_id, client_id, scope["method"], _OTHER, arrived_s, request)
        self._observer.arrived(trail, scope["headers"])
        exchange = self._exchange(
            _Call(request, trail, ticket, scope, receive, send),
            engine_items=None,
            merges_logprobs=False,
            streams=True,
            opaque=Opaque(scope["method"].encode(), repeatable),
            target=_target(quote(path, safe=_PATH_CHARS), scope),
            body=body,
        )
        del body
        await self._run(exchange, ticket)

    def _exchange(self, call: _Call, **own: Any) -> Exchange:
        """``own`` is what the two kinds of requests do not share."""
        return Exchange(
            request=call.request,
            arrived_s=call.trail.arrived_s,
            headers=to_front(call.scope["headers"], self._credentials),
            client_id=call.trail.client_id,
            on_begun=call.ticket.began,
            control=self._control,
            engines=self._engines,
            metrics=self._metrics,
            observer=self._observer,
            trail=call.trail,
            clock=self._clock,
            receive=call.receive,
            send=call.send,
            direct=find(call.scope),
            **own,
        )

    async def _run(self, exchange: Exchange, ticket: Ticket) -> None:
        key = request_key(exchange.id)
        self._live[key] = exchange
        try:
            await exchange.run()
        finally:
            ticket.began()
            del self._live[key]

    async def describe(self, asked: ClientRequest, request_id: RequestId) -> Request:
        """The request as the control plane sees it."""
        began_s = self._clock.now()
        prompt = await self._tokenizer.prompt(asked)
        self._metrics.prompt(prompt.exact, prompt.reason, self._clock.now() - began_s)
        return Request(
            id=request_id,
            input_tokens=prompt.input_tokens,
            output_tokens=self._model.output_tokens(asked, prompt.input_tokens),
            blocks=prompt.blocks,
            exact=prompt.exact,
            priority=asked.priority,
            prompts=asked.engine_items or 1,
            streams=bool(asked.fields.get("stream")),
        )


def _method_not_allowed(endpoint: Endpoint) -> ApiError:
    taken = ", ".join(_METHODS[endpoint])
    allow = (b"allow", taken.encode())
    return ApiError(405, "method_not_allowed", f"{endpoint.value} takes {taken}", headers=[allow])


def _internal(exc: Exception) -> ApiError:
    log.error("a request failed inside the router", exc_info=exc)
    return ApiError(500, "internal_error", "the router failed; see its log")


def _check_priority(body: bytes, most: int) -> None:
    """``ApiError`` 400 if a body that goes on as it came asks for a priority above ``most``. Read
    as engines read it, which take more for JSON than others do."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    if lowered(body, fields, most) is not body:
        message = f"this key may not ask for a priority above {most}"
        raise ApiError(400, "priority_too_high", message, param="priority")


def _client_id(scope: Scope, request_id: str) -> bytes:
    given = header(scope, b"x-request-id")
    return given if given and len(given) <= _CLIENT_ID_BYTES else request_id.encode()


def _target(path: str, scope: Scope) -> bytes:
    query: bytes = scope.get("query_string", b"")
    target = path.encode()
    return target + b"?" + query if query else target
