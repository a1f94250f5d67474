"""Errors that a client sees, always in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

import orjson

Headers = Sequence[tuple[bytes, bytes]]

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer with an error status: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = tuple(headers)

    def body(self) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": error_type(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


class NotDone(ApiError):
    """409: what an operator ordered was not done, or not all of it. ``content`` says what was."""

    def __init__(self, code: str, message: str, content: dict[str, Any]) -> None:
        super().__init__(409, code, message)
        self.content = content

    def body(self) -> bytes:
        return orjson.dumps({**orjson.loads(super().body()), **self.content})


def error_type(status: int) -> str:
    """OpenAI's name for a family of statuses."""
    if status >= 500:
        return "server_error"
    return _TYPE_OF_STATUS.get(status, "invalid_request_error")


def in_openai_shape(status: int, body: bytes) -> bytes:
    """An engine's error body in OpenAI's shape; a body that already has it stays as it is.

    SGLang answers ``{"object": "error", "message", "type", "param", "code"}`` at top level.
    """
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = body.decode("utf-8", "replace").strip() or "the engine gave no reason"
    match content:
        case {"error": {"message": str()}}:
            return body
        case {"error": str(message)} | {"message": str(message)} | {"detail": str(message)}:
            pass
        case str(message):
            pass
        case _:
            message = orjson.dumps(content).decode()
    details = content if isinstance(content, dict) else {}
    return orjson.dumps(
        {
            "error": {
                "message": message,
                "type": error_type(status),
                "param": details.get("param"),
                "code": details.get("code", status),
            }
        }
    )
