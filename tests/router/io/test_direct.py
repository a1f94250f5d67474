"""Pieces of a stream that go around the task of their request."""

import asyncio
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from uvicorn.server import ServerState
from vertumnus_router.io import hot_path
from vertumnus_router.io.asgi import Receive, Scope, Send, read_body
from vertumnus_router.io.direct import DirectProtocol, find

from tests.router.io.fake_pool import SSE, FakePool, Seen, pools, sse_chunks
from tests.router.io.harness import run, running, until

#: More than sockets hold.
_PIECES = 800
_PIECE = b"x" * 32_000


async def flood(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A stream that is far too large for the sockets on its way, every piece another one."""
    response = web.StreamResponse(headers=SSE)
    await response.prepare(request)
    for number in range(_PIECES):
        await response.write(b"data: %06d%b\n\n" % (number, _PIECE))
        await asyncio.sleep(0)
    await response.write_eof()
    return response


class Moody:
    """Refuses every third piece, and takes the others also when the client is slow: what is behind
    a piece that the task has must not come here."""

    def __init__(self, direct: Any) -> None:
        self._direct = direct
        self._pieces = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._direct, name)

    def write(self, data: bytes) -> bool:
        self._pieces += 1
        if self._pieces % 3 == 0:
            return False
        self._direct._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


@pytest.mark.parametrize("extension", [None, "moody", "missing"])
def test_a_slow_client_gets_every_piece_in_order(
    extension: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads now and then, so that pieces go both ways, around the task and through it."""
    found = hot_path.find
    if extension == "missing":
        monkeypatch.setattr(hot_path, "find", lambda _: None)
    if extension == "moody":
        monkeypatch.setattr(hot_path, "find", lambda scope: Moody(found(scope)))

    async def scenario() -> None:
        pool = FakePool()
        async with pools(pool), running(pool.url) as router:
            await router.ready()
            pool.answer = flood
            async with await router.chat(stream=True) as response:
                live = router.router.hot.live
                await until(lambda: any(one._sending for one in live), "the router waits")
                body = bytearray()
                while piece := await response.content.read(300_000):
                    body += piece
                    if len(body) % 7 == 0:
                        await asyncio.sleep(0.01)
            events = bytes(body).split(b"\n\n")[:-1]
            assert [int(event[6:12]) for event in events] == list(range(_PIECES))
            assert all(event[12:] == _PIECE for event in events)
            await until(router.settled, "settled")

    run(scenario())


def test_a_stream_goes_around_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    class Spy:
        def __init__(self, direct: Any) -> None:
            self._direct = direct

        def __getattr__(self, name: str) -> Any:
            return getattr(self._direct, name)

        def write(self, data: bytes) -> bool:
            sent.append(data)
            return bool(self._direct.write(data))

    found = hot_path.find
    monkeypatch.setattr(hot_path, "find", lambda scope: Spy(found(scope)))
    turns: list[asyncio.Event] = [asyncio.Event() for _ in range(4)]

    async def in_turns(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for turn, chunk in zip(turns, sse_chunks(3), strict=True):
            await response.write(chunk)
            await turn.wait()
        await response.write_eof()
        return response

    async def scenario() -> None:
        pool = FakePool()
        async with pools(pool), running(pool.url) as router:
            await router.ready()
            pool.answer = in_turns
            async with await router.chat(stream=True) as response:
                for turn, chunk in zip(turns, sse_chunks(3), strict=True):
                    assert await response.content.readexactly(len(chunk)) == chunk
                    turn.set()
            # The first one begins the answer, which is for the task to do.
            assert sent == sse_chunks(3)[1:]

    run(scenario())


def test_an_answer_of_a_declared_length_is_whole() -> None:
    async def scenario() -> None:
        pool = FakePool()
        text = "y" * 3_000_000

        async def long(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
            return web.Response(text=text)

        async with pools(pool), running(pool.url) as router:
            await router.ready()
            pool.answer = long
            async with await router.chat() as response:
                assert response.headers["content-length"] == str(len(text))
                assert await response.text() == text

    run(scenario())


class Wire:
    """The transport of a connection, as far as a protocol asks for one."""

    def __init__(self) -> None:
        self.reads, self.closing, self.sent = True, False, b""

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def connection(app: Any) -> tuple[DirectProtocol, Wire]:
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, proxy_headers=False
    )
    config.load()
    protocol, wire = DirectProtocol(config, ServerState(), {}), Wire()
    protocol.connection_made(wire)  # type: ignore[arg-type]
    return protocol, wire


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_with_a_large_body_is_seen_to_leave(at_once: bool) -> None:
    """Behind a piece of more than 64 KiB uvicorn stops reading, and so would not see the end."""
    body, gone = b"x" * 100_000, asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await read_body(scope, receive, 1 << 20) == body
        direct = find(scope)
        assert direct is not None
        direct.when_gone(gone.set)
        await gone.wait()

    async def scenario() -> None:
        protocol, wire = connection(app)
        head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
        if at_once:
            protocol.data_received(head + body)
        else:
            protocol.data_received(head)
            await asyncio.sleep(0.01)
            protocol.data_received(body)
        await asyncio.sleep(0.01)
        assert wire.reads, "or the end of the connection is not seen"
        protocol.connection_lost(None)
        assert gone.is_set()

    run(scenario())


def test_a_client_that_leaves_with_a_request_behind_another_is_seen_to_leave() -> None:
    gone = asyncio.Event()
    wrote = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(scope, receive, 1 << 20)
        direct = find(scope)
        assert direct is not None
        direct.when_gone(gone.set)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        wrote.append(direct.write(b"a"))
        await gone.wait()
        wrote.append(direct.write(b"b"))

    async def scenario() -> None:
        protocol, wire = connection(app)
        ask = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
        protocol.data_received(ask + ask)
        await asyncio.sleep(0.01)
        protocol.connection_lost(None)
        assert gone.is_set()
        await asyncio.sleep(0)
        assert wrote == [True, False], "writing to what is closed would raise"
        assert wire.sent.endswith(b"1\r\na\r\n")

    run(scenario())
