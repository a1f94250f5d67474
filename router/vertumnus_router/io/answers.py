"""What an engine's answer says beyond its status: SGLang also reports failures in a 200.

An answer counts as failed when the finish reason of its first output is an abort, or when its
stream begins with an error event. A later abort is the client's to read: bytes are out by then.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from vertumnus_router.core.events import Failure

#: JSON escapes the quotes inside strings, so this never matches generated text.
_ABORT = re.compile(rb'"(?:type|finish_reason)"\s*:\s*"abort"')
_ERROR_EVENT = re.compile(rb'\Adata:\s*\{\s*"error"\s*:')
#: Long enough for what ``_ABORT`` matches, to find it across two pieces.
_OVERLAP_BYTES = 64
_CAUSE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer that is none. ``status`` is the one that it would have had."""

    status: int
    message: str


def failure_of(status: int) -> Failure:
    """What an error status says about the attempt."""
    if status in (429, 503):
        return Failure.OVERLOADED
    return Failure.SERVER_ERROR if status >= 500 else Failure.CLIENT_ERROR


def retry_after_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """After how many seconds the engine wants to be asked again, a day at most; None if it does
    not say. A date is not read: it would need the engine's clock."""
    for name, value in headers:
        if name == b"retry-after" and value.isdigit():
            return min(float(value), 86_400.0)
    return None


def in_words(status: int, body: bytes) -> str:
    """The cause of a failure, from an error answer."""
    said = body.decode("utf-8", "replace").strip()[:_CAUSE_CHARS]
    return f"the engine answered {status}: {said}"


def fault_in(data: bytes) -> Fault | None:
    """The failure in a complete answer or a stream's first event, None if there is none."""
    if not (_ABORT.search(data) or _ERROR_EVENT.match(data)):
        return None
    first = data.split(b"\n\n", 1)[0].removeprefix(b"data:").strip()
    try:
        content: Any = orjson.loads(first)
    except orjson.JSONDecodeError:
        content = None
    for one in content if isinstance(content, list) else [content]:
        match one:
            case {"error": {"message": str(message), **error}}:
                return Fault(_status(error.get("code")), message)
            case {"meta_info": {"finish_reason": {"type": "abort", **reason}}}:
                message = str(reason.get("message") or "it gave no reason")
                return Fault(_status(reason.get("status_code")), f"aborted: {message}")
    return Fault(500, "aborted by the engine")


class AbortScan:
    """Looks for an abort in an answer of any length that is not kept."""

    def __init__(self) -> None:
        self.found = False
        self._tail = b""

    def feed(self, data: bytes) -> None:
        window = self._tail + data
        self.found = self.found or _ABORT.search(window) is not None
        self._tail = window[-_OVERLAP_BYTES:]


def _status(code: Any) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500
