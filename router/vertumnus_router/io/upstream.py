"""A small pooled HTTP/1.1 client for one front, made for proxying.

Everything that happens to a call arrives in the mailbox of the request that made it, so the
owner never blocks in here and can leave at any moment. Bodies pass through as bytes: nothing
is parsed, decompressed or re-framed beyond what HTTP itself asks for.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]

#: A kept connection that the server closes this soon after a request was sent on it was being
#: closed already: the server has not seen the request. Later, it has begun to work on it.
_CLOSING_S = 1.0
#: Idle connections are dropped before SGLang's front closes them (5 s).
_IDLE_S = 4.0
_KEPT_IDLE = 256
#: Status line and headers of an answer, those of 1xx included.
_HEAD_BYTES = 64 * 1024
#: Bytes of an answer that may wait for a slow client before the engine is slowed down.
_UNREAD_BYTES = 256 * 1024


class AnyCall(Protocol):
    """What the owner of a call does with it."""

    def abandon(self) -> None:
        """Nobody wants the answer any more."""

    def consumed(self, size: int) -> None:
        """So many bytes of the body were passed on."""


@dataclass(frozen=True, slots=True)
class Head:
    """The status line and headers have arrived."""

    call: AnyCall
    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of the body; the owner says ``call.consumed(len(data))`` when it is passed on."""

    call: AnyCall
    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete."""

    call: AnyCall


@dataclass(frozen=True, slots=True)
class Broken:
    """No (further) answer will come: refused, reset, closed early or not HTTP.

    Without ``connected`` there was no connection to the front in the first place.
    """

    call: AnyCall
    cause: str
    connected: bool


Message = Head | Body | End | Broken
Deliver = Callable[[Message], None]


class Call:
    """One request on its way. ``abandon`` closes its connection and silences it at once."""

    __slots__ = ("_deliver", "connecting", "connection", "post", "sink")

    def __init__(self, post: "Post", deliver: Deliver) -> None:
        #: None once the front has begun to answer: nothing can be sent again then.
        self.post: Post | None = post
        self._deliver: Deliver | None = deliver
        self.connection: _Connection | None = None
        self.connecting: asyncio.Task[None] | None = None
        #: takes pieces of the body before they are delivered; False: deliver it
        self.sink: Callable[[bytes], bool] | None = None

    def abandon(self) -> None:
        self._deliver = self.sink = None
        self.post = None
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()

    def consumed(self, size: int) -> None:
        if self.connection is not None:
            self.connection.consumed(size)

    def deliver(self, message: Message) -> None:
        if self._deliver is not None:
            self._deliver(message)


@dataclass(frozen=True, slots=True)
class Post:
    """A request as it goes over the wire."""

    head: bytes
    body: bytes


class Front:
    """The connections to one front. There is no limit on how many: the control plane decides
    what is sent, and a second limit here would only hide a queue from it."""

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls`` is for an ``https://`` URL; without one the system's authorities vouch."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self._path = parts.path.rstrip("/").encode()
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = tls or ssl.create_default_context()
        self._loop = loop
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    def post(
        self,
        path: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        method: bytes = b"POST",
    ) -> "Post":
        """A request ready to be sent; ``headers`` come without host and content-length."""
        head = [method, b" ", self._path, path, b" HTTP/1.1\r\nhost: ", self._authority]
        for name, value in headers:
            head += (b"\r\n", name, b": ", value)
        head += (b"\r\ncontent-length: ", str(len(body)).encode(), b"\r\n\r\n")
        return Post(b"".join(head), body)

    def send(self, post: "Post", deliver: Deliver) -> Call:
        """Send now on an idle connection, or on a new one as soon as it stands."""
        call = Call(post, deliver)
        connection = self._take_idle()
        if connection is not None:
            connection.start(call, reused=True)
        else:
            self._connect(call)
        return call

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def _take_idle(self) -> "_Connection | None":
        oldest_useful = self._loop.time() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest_useful and not connection.closing:
                return connection
            connection.abort()
        return None

    def _connect(self, call: Call) -> None:
        call.connecting = self._loop.create_task(self._connect_and_start(call))

    async def _connect_and_start(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self), self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            cause = f"{self.url}: no connection within {self._connect_s:g} s"
            call.deliver(Broken(call, cause, connected=False))
            return
        except OSError as exc:
            call.deliver(Broken(call, f"{self.url}: {exc.strerror or exc}", connected=False))
            return
        finally:
            call.connecting = None
        connection.start(call, reused=False)

    # What a connection asks of its front and tells it.

    def now(self) -> float:
        return self._loop.time()

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def closed(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def idle(self, connection: "_Connection") -> None:
        if len(self._idle) < _KEPT_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    def again(self, call: Call) -> None:
        """The connection had been closed before the request reached it: a fresh one."""
        self._connect(call)


class _Connection(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self, front: Front) -> None:
        self.idle_since = 0.0
        self._front = front
        self._transport: Any = None
        self._call: Call | None = None
        self._reused = False
        self._started_s = 0.0
        #: the answer ends with its headers, whatever length they declare: HEAD
        self._headers_only = False
        self._heard = False
        self._unread = 0
        self._paused = False
        self._new_answer()

    def _new_answer(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._head_delivered = False
        self._head_bytes = 0
        self._framed = False
        self._complete = False
        self._keep_alive = True

    # Used by the front and by calls.

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def _closed_early(self) -> bool:
        return self._front.now() - self._started_s < _CLOSING_S

    def start(self, call: Call, *, reused: bool) -> None:
        call.connection = self
        self._call = call
        self._reused = reused
        self._started_s = self._front.now()
        self._heard = False
        if call.post is not None:
            self._headers_only = call.post.head.startswith(b"HEAD ")
            self._transport.writelines((call.post.head, call.post.body))

    def consumed(self, size: int) -> None:
        self._unread -= size
        if self._paused and self._unread < _UNREAD_BYTES // 2:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._front.opened(self)

    def data_received(self, data: bytes) -> None:
        if not self._heard:
            self._heard = True
            if self._call is not None:
                self._call.post = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._complete:
                self._break(f"the answer is not HTTP: {exc}")
                return
            self._keep_alive = False  # more than it declared, of which nothing is believed
        if not self._head_delivered:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._break(f"the headers of the answer exceed {_HEAD_BYTES >> 10} KiB")
                return
        call = self._call
        if call is None:
            if not self._complete:
                self.abort()  # bytes that nobody asked for
            return
        self._flush(call)
        if self._complete:
            self._finish(call)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.closed(self)
        call, self._call = self._call, None
        if call is None:
            return
        call.connection = None
        if self._head_delivered and not self._framed and exc is None:
            call.deliver(End(call))  # a body that lasts until the connection closes
        elif self._reused and not self._heard and self._closed_early:
            self._front.again(call)
        else:
            reason = f": {exc}" if exc is not None else ""
            when = "in the middle of the answer" if self._head_delivered else "without an answer"
            cause = f"{self._front.url}: connection closed {when}{reason}"
            call.deliver(Broken(call, cause, connected=True))

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self._complete:
            self._keep_alive = False  # a second answer to one request
            return
        status = self._parser.get_status_code()
        if status >= 200 and self._call is not None:
            self._head_delivered = True
            self._call.deliver(Head(self._call, status, self._headers))
            if self._headers_only:
                # The parser goes on to wait for a body.
                self._complete, self._keep_alive = True, False

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._head_delivered:
            self._keep_alive = self._keep_alive and self._parser.should_keep_alive()
            self._complete = True
        else:  # 1xx: the real answer follows
            self._headers = []
            self._framed = False

    def _flush(self, call: Call) -> None:
        if not self._parts:
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if call.sink is not None and call.sink(data):
            return
        self._unread += len(data)
        if self._unread > _UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        call.deliver(Body(call, data))

    def _finish(self, call: Call) -> None:
        reusable = self._keep_alive and not self._transport.is_closing()
        self._call = None
        call.connection = None
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._unread = 0
        if reusable:
            self._new_answer()
            self.idle_since = self._front.now()
            self._front.idle(self)
        else:
            self.abort()
        call.deliver(End(call))

    def _break(self, cause: str) -> None:
        call = self._call
        self.abort()
        if call is not None:
            call.connection = None
            call.deliver(Broken(call, f"{self._front.url}: {cause}", connected=True))
