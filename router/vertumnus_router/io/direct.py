"""A way around ASGI's coroutines for what happens most: a piece of a stream, and a client that
stays.

ASGI passes each piece through a task, and needs a task of its own to notice that a client leaves.
The server offers this as an extension of the scope, by ASGI's rules: an application that does not
know it, or finds it missing, goes the usual way.
"""

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from vertumnus_router.io.asgi import Scope
from vertumnus_router.io.strict import StrictProtocol

_EXTENSION = "vertumnus.direct"


class Direct:
    """The connection that one request came on."""

    __slots__ = ("_cycle", "_on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_gone: Callable[[], None] | None = None

    def write(self, data: bytes) -> bool:
        """Send a piece of an answer that has begun, and is not of a declared length, at once.
        False if that cannot be done without waiting, and then nothing has been sent."""
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        if data:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def when_gone(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when the client closes the connection before the answer is complete; at
        once if it has."""
        if self._cycle.disconnected:
            tell()
            return
        self._on_gone = tell
        # uvicorn stops reading behind a large piece of a body until it is asked for more. Nobody
        # asks any more, and of a connection that is not read nobody sees the end.
        self._cycle.flow.resume_reading()

    def forget(self) -> None:
        """Nobody is to be told any more."""
        self._on_gone = None

    def gone(self) -> None:
        cycle = self._cycle
        if not cycle.response_complete:
            # uvicorn says so to the last request that came only, not to one that others follow.
            cycle.disconnected = True
            cycle.message_event.set()
        tell, self._on_gone = self._on_gone, None
        if tell is not None:
            tell()


class DirectProtocol(StrictProtocol):
    """uvicorn's connection, with the extension."""

    #: of the request that is being answered, behind which others may wait
    _serving: Direct | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._serving = Direct(cycle)
        extensions: dict[str, Any] = {_EXTENSION: self._serving}
        cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._serving is not None:
            self._serving.gone()


def find(scope: Scope | Any) -> Direct | None:
    """The extension in ``scope``."""
    found: Direct | None = scope.get("extensions", {}).get(_EXTENSION)
    return found
