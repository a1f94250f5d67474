"""The client for fronts, against servers that speak HTTP in every legal and illegal way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from vertumnus_router.io import upstream
from vertumnus_router.io.mailbox import Mailbox
from vertumnus_router.io.upstream import Body, Broken, Call, End, Front, Head, Message

from tests.router.io.harness import run, until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"


class Conversation:
    """A front, a server behind it, and what the server saw."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = 0

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        try:
            await self._serve(reader, writer)
        finally:
            self.closed += 1
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read one request with its body."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        whole = head + await reader.readexactly(length)
        self.requests.append(whole)
        return whole


@contextlib.asynccontextmanager
async def talking(
    answer: Callable[[Conversation, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[Conversation, Front]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer(talk, reader, writer)

    talk = Conversation(serve)
    server = await asyncio.start_server(talk.on_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    front = Front(f"http://127.0.0.1:{port}/base", asyncio.get_running_loop(), connect_s=2.0)
    try:
        yield talk, front
    finally:
        front.close()
        server.close()


def send(front: Front, body: bytes = b"{}") -> tuple[Call, Mailbox[Message]]:
    box: Mailbox[Message] = Mailbox()
    return front.send(front.post(b"/path", [(b"x-a", b"b")], body), box.put), box


async def collect(box: Mailbox[Message]) -> tuple[int, bytes, str]:
    """Status, body, and how it ended."""
    status, body = 0, b""
    while True:
        match await box.get():
            case Head(status=status):
                pass
            case Body(call=call, data=data):
                body += data
                call.consumed(len(data))
            case End():
                return status, body, "end"
            case Broken(cause=cause):
                return status, body, cause


async def plain(
    talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    while True:
        await talk.request(reader)
        writer.write(OK + b"content-length: 5\r\n\r\nhello")


def test_a_request_as_it_goes_over_the_wire() -> None:
    async def scenario() -> None:
        async with talking(plain) as (talk, front):
            assert await collect(send(front, b'{"a":1}')[1]) == (200, b"hello", "end")
            head, _, body = talk.requests[0].partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            assert lines[0] == b"POST /base/path HTTP/1.1"
            assert lines[1] == f"host: 127.0.0.1:{front.port}".encode()
            assert lines[2:] == [b"x-a: b", b"content-length: 7"]
            assert body == b'{"a":1}'

    run(scenario())


def test_connections_are_kept_and_grow_with_the_calls() -> None:
    async def scenario() -> None:
        async with talking(plain) as (talk, front):
            for _ in range(3):
                await collect(send(front)[1])
            assert talk.connections == 1
            boxes = [send(front)[1] for _ in range(120)]
            answers = await asyncio.gather(*map(collect, boxes))
            assert set(answers) == {(200, b"hello", "end")}
            assert talk.connections == 120

    run(scenario())


def test_every_way_to_frame_a_body() -> None:
    framings = {
        b"chunked": OK + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
        b"length": OK + b"Content-Length: 5\r\n\r\nhello",
        b"early hints": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        + OK
        + b"content-length: 5\r\n\r\nhello",
        b"until closed": OK + b"\r\nhello",
    }

    async def scenario() -> None:
        for name, raw in framings.items():

            async def answer(
                talk: Conversation,
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                raw: bytes = raw,
            ) -> None:
                await talk.request(reader)
                for at in range(len(raw)):  # byte by byte
                    writer.write(raw[at : at + 1])
                    await writer.drain()

            async with talking(answer) as (_, front):
                assert await collect(send(front)[1]) == (200, b"hello", "end"), name

    run(scenario())


def test_an_idle_connection_closed_by_the_server_costs_no_attempt() -> None:
    async def answer(
        talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await talk.request(reader)
        writer.write(OK + b"content-length: 5\r\n\r\nhello")
        if talk.connections == 1:
            await talk.request(reader)  # a second request came, and finds the door closed
            return
        await plain(talk, reader, writer)

    async def scenario() -> None:
        async with talking(answer) as (talk, front):
            assert await collect(send(front)[1]) == (200, b"hello", "end")
            assert await collect(send(front)[1]) == (200, b"hello", "end")
            assert talk.connections == 2

    run(scenario())


def test_a_kept_connection_that_breaks_later_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server had time to begin with the request: it is not sent a second time unasked."""
    monkeypatch.setattr(upstream, "_CLOSING_S", 0.0)

    async def answer(
        talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await talk.request(reader)
        writer.write(OK + b"content-length: 5\r\n\r\nhello")
        await talk.request(reader)

    async def scenario() -> None:
        async with talking(answer) as (talk, front):
            assert await collect(send(front)[1]) == (200, b"hello", "end")
            *_, cause = await collect(send(front)[1])
            assert "without an answer" in cause
            assert len(talk.requests) == 2

    run(scenario())


def test_a_fresh_connection_that_is_closed_is_a_failure() -> None:
    async def answer(
        talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await talk.request(reader)

    async def scenario() -> None:
        async with talking(answer) as (talk, front):
            broken = await send(front)[1].get()
            assert isinstance(broken, Broken)
            assert broken.connected
            assert "without an answer" in broken.cause
            assert talk.connections == 1

    run(scenario())


def test_broken_answers_are_named() -> None:
    cases = {
        b"what is this\r\n\r\n": "not HTTP",
        OK + b"content-length: 50\r\n\r\nhello": "in the middle of the answer",
        OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n": "in the middle of the answer",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n": "not HTTP",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n": "not HTTP",
        OK + b"x-a: b\r\n" * 9000: "the headers of the answer exceed 64 KiB",
        b"HTTP/1.1 103 Early Hints\r\nx-a: b\r\n\r\n" * 2000: "the headers of the answer exceed",
    }

    async def scenario() -> None:
        for raw, says in cases.items():

            async def answer(
                talk: Conversation,
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                raw: bytes = raw,
            ) -> None:
                await talk.request(reader)
                writer.write(raw)
                await writer.drain()

            async with talking(answer) as (_, front):
                *_, cause = await collect(send(front)[1])
                assert says in cause, raw
                assert front.url in cause

    run(scenario())


def test_a_refused_connection_is_named() -> None:
    async def scenario() -> None:
        front = Front("http://127.0.0.1:1", asyncio.get_running_loop(), connect_s=1.0)
        broken = await send(front)[1].get()
        assert isinstance(broken, Broken)
        assert not broken.connected
        assert "127.0.0.1:1" in broken.cause
        assert "refused" in broken.cause.lower()

    run(scenario())


def test_an_abandoned_call_closes_its_connection_and_says_nothing_more() -> None:
    async def answer(
        talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await talk.request(reader)
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await reader.read()  # until the client closes

    async def scenario() -> None:
        async with talking(answer) as (talk, front):
            call, box = send(front)
            assert isinstance(await box.get(), Head)
            assert isinstance(await box.get(), Body)
            call.abandon()
            await until(lambda: talk.closed == 1, "closed")
            call, box = send(front)
            call.abandon()  # before it is even connected
            await asyncio.sleep(0.05)
            assert not box._items

    run(scenario())


def test_nothing_that_nobody_asked_for_is_taken_for_an_answer() -> None:
    async def answer(
        talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await talk.request(reader)
        twice = OK + b"content-length: 5\r\n\r\nhello" + OK + b"content-length: 4\r\n\r\nevil"
        writer.write(twice if talk.connections == 1 else OK + b"content-length: 4\r\n\r\ngood")
        await reader.read()

    async def scenario() -> None:
        async with talking(answer) as (talk, front):
            assert await collect(send(front)[1]) == (200, b"hello", "end")
            assert await collect(send(front)[1]) == (200, b"good", "end")
            assert talk.connections == 2

    run(scenario())


@pytest.mark.parametrize(
    "framing", [b"content-length: 22", b"transfer-encoding: chunked", b"content-length: 0"]
)
def test_an_answer_to_head_ends_with_its_headers(framing: bytes) -> None:
    """It declares the length that the body would have had, and none follows."""

    async def answer(
        talk: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await talk.request(reader)
        writer.write(b"HTTP/1.1 404 Not Found\r\n" + framing + b"\r\n\r\n")
        await reader.read()  # it keeps the connection

    async def scenario() -> None:
        async with talking(answer) as (_, front):
            for _ in range(2):
                box: Mailbox[Message] = Mailbox()
                front.send(front.post(b"/path", [], b"", b"HEAD"), box.put)
                async with asyncio.timeout(2.0):
                    assert await collect(box) == (404, b"", "end")

    run(scenario())
