"""uvicorn's HTTP/1.1 protocol, strict about what a proxy in front might read in another way.

llhttp below it refuses two lengths, a length beside chunks, bare line feeds, folded headers and
the like by itself. This adds what is left: no codings but chunked, one host, no target but a path
of this router, no HTTP/0.9, no upgrades, nothing out of trailers, limits on the size of a head and
on the time that a request takes to arrive, and no answer into the middle of another one. What is
refused ends the connection: nobody can say where the next request begins.
"""

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from vertumnus_router.io.api_errors import ApiError

log = logging.getLogger(__name__)

#: Of names, values and the target.
MOST_HEAD_BYTES = 64 * 1024
MOST_HEADERS = 100


class _Refused(Exception):
    """Raised in a callback of the parser, which stops it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.error = ApiError(status, code, message)


class StrictProtocol(HttpToolsProtocol):
    """One connection of a client."""

    #: How long a head may take, and how long a body may pause.
    patience_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True  # also before the first one
        self._in_body = False
        self._deaf = False
        self._piece_bytes = 0
        #: since the parser has last told of something
        self._unparsed_bytes = 0
        self._fault: ApiError | None = None
        self._before: RequestResponseCycle | None = None
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since_s = self.loop.time()
        self._timer = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._in_body:
            self._since_s = self.loop.time()
        self._piece_bytes = len(data)
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MOST_HEAD_BYTES and not self._deaf:
            # A header, a trailer or the extension of a chunk that does not end.
            self._fault = _too_large().error
            self.send_400_response("")

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._unparsed_bytes = 0
        self._since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        refused = _fault_of(self.parser.get_http_version(), self.url, self.headers)
        if max(self._piece_bytes, self._unparsed_bytes) > MOST_HEAD_BYTES:
            size = sum(len(name) + len(value) for name, value in self.headers)
            if size + len(self.url) > MOST_HEAD_BYTES:
                refused = _too_large()
        upgrades = self.parser.should_upgrade()
        if upgrades and refused is None and _has_body(self.headers):
            # The parser would take the body for another protocol.
            message = (
                "there is nothing to upgrade to: send plain HTTP/1.1 without an upgrade header"
            )
            refused = _Refused(400, "no_upgrade", message)
        if refused is not None:
            raise self._refusal(refused)
        self._before = self.cycle
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._unparsed_bytes = 0
        # Where trailers go. Nobody looks at those with the eyes that headers are looked at.
        self.headers = []
        if upgrades:
            self.cycle.keep_alive = False  # the parser stops behind the head

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False

    # Refusing

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be read, and close."""
        error = self._fault or ApiError(
            400, "invalid_http", "the request is not valid HTTP/1.1, or can be read in two ways"
        )
        self._deaf = True
        cycle: RequestResponseCycle | None = self.cycle
        if self.pipeline and self._in_body:
            # It waits for its turn, which it will not get. The one before is the last.
            self.pipeline.popleft()
            cycle, self._in_body = self._before, False
        if cycle is not None and not cycle.response_complete:
            if not self._in_body:
                cycle.keep_alive = False  # an earlier request: it gets its answer first
                return
            if cycle.response_started:
                self.transport.close()
                return
        body = error.body()
        head = (
            STATUS_LINE[error.status],
            b"content-type: application/json\r\ncontent-length: ",
            str(len(body)).encode(),
            b"\r\nconnection: close\r\n\r\n",
        )
        self.transport.write(b"".join((*head, body)))
        self.transport.close()

    def _refusal(self, refused: _Refused) -> _Refused:
        self._fault = refused.error
        return refused

    def _unsupported_upgrade_warning(self) -> None:
        """Clients that try HTTP/2 first are no news."""

    def _look(self) -> None:
        """End the connection if a request does not arrive on it. Between requests it is for
        uvicorn's keep-alive to end it."""
        # What comes behind a request may wait for the end of its answer.
        answers = self.cycle is not None and not self.cycle.response_complete
        waits = self._in_body or (self._in_head and not answers)
        waits = waits and not self.flow.read_paused
        if waits and self.loop.time() - self._since_s >= self.patience_s:
            log.info("a request from %s did not arrive within its time", self.client)
            self.transport.close()
            return
        self._timer = self.loop.call_later(self.patience_s, self._look)


def _too_large() -> _Refused:
    return _Refused(
        431,
        "headers_too_large",
        f"the headers are larger than this router accepts ({MOST_HEAD_BYTES} bytes, "
        f"{MOST_HEADERS} headers)",
    )


def _fault_of(version: str, target: bytes, headers: list[tuple[bytes, bytes]]) -> _Refused | None:
    """What speaks against a head that the parser has taken."""
    if version not in ("1.0", "1.1"):
        return _Refused(400, "invalid_http", f"HTTP/{version} is not spoken here")
    hosts, codings = [], []
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    if len(headers) > MOST_HEADERS:
        return _too_large()
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return _Refused(400, "invalid_host", "a request has exactly one host header")
    if codings and (version == "1.0" or codings[0].lower() != b"chunked"):
        return _Refused(400, "invalid_coding", "chunked is the only transfer-encoding, of HTTP/1.1")
    if target.startswith(b"/") or target == b"*":
        return None if b"#" not in target else _Refused(400, "invalid_target", "no # in a target")
    if not _is_mine(target, hosts):
        return _Refused(400, "invalid_target", "this router is no proxy for other hosts")
    return None


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and int(value) > 0)
        for name, value in headers
    )


def _is_mine(target: bytes, hosts: list[bytes]) -> bool:
    """Whether an absolute target names the host that the host header does."""
    try:
        parts = urlsplit(target)
    except ValueError:
        return False
    named = parts.netloc.lower()
    return parts.scheme in (b"http", b"https") and bool(named) and named == hosts[0].lower()
