"""The few pieces of ASGI that the hot paths need, without a framework."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vertumnus_router.io.api_errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. ``ApiError`` 413 as soon as it is known to be too large; ``ClientGone``."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(
    send: Send, status: int, body: bytes, headers: Headers, content_type: bytes
) -> None:
    """A complete answer."""
    length = str(len(body)).encode()
    start: Headers = [(b"content-type", content_type), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def respond_error(send: Send, error: ApiError, headers: Headers) -> None:
    await respond(send, error.status, error.body(), [*error.headers, *headers], b"application/json")


def _too_large(limit_bytes: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413,
        "body_too_large",
        f"the body is larger than this router accepts ({limit_bytes} bytes)",
        headers=[(b"connection", b"close")],
    )
