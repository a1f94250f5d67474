"""Answers that no HTTP library would give, written to the connection as they are.

For a ``FakePool`` or a ``FakeDecode``: whatever the request was, these bytes come back, and then
the connection is closed, reset, closed in one direction, or left as it is.
"""

import asyncio
import socket
import struct
from typing import Any, Literal

from aiohttp import web

from tests.router.io.fake_pool import Answer, Seen

Then = Literal["close", "reset", "half-close", "stay"]

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"choices":[{"delta":{"content":"t"}}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(*lines: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 " + b"\r\n".join((status, *lines)) + b"\r\n\r\n"


def wire(*pieces: bytes, then: Then = "close", forever: bytes = b"", gap_s: float = 0.0) -> Answer:
    """Write ``pieces`` one by one, then ``forever`` again and again with ``gap_s`` in between. The
    router, on the same event loop, has read each piece before the next one is written."""

    async def answer(pool: Any, request: web.Request, seen: Seen) -> web.StreamResponse:
        transport: Any = request.transport
        for piece in pieces:
            transport.write(piece)
            await asyncio.sleep(0.005)
        while forever and not transport.is_closing():
            transport.write(forever)
            await asyncio.sleep(gap_s)
        match then:
            case "close":
                transport.close()
            case "reset":
                reset(transport)
            case "half-close":
                transport.write_eof()
        await asyncio.sleep(60)
        raise AssertionError("the handler should have been cancelled")

    return answer


def reset(transport: Any) -> None:
    """Close with RST instead of FIN."""
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()
