"""The decode servers of pools that prefill only, and the rooms that requests take at them.

A room is one prompt under way between a rank and a decode server, from the dispatch to the end of
the answer. ``RequestTable`` is the only caller of ``take`` and ``give``.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from vertumnus_router.core.effects import DecodeTerms
from vertumnus_router.core.events import DecodeJoined
from vertumnus_router.core.types import DecodeId, RequestId

#: SGLang keeps rooms in signed 64-bit integers, and 0 means that none was written.
_ROOMS = 2**62


def room(request: RequestId, attempt: int, home: int, pool_size: int) -> int:
    """The room of an attempt, see ``Pairing``: a hash, so that no two routers agree on one."""
    digest = hashlib.blake2b(f"{request}/{attempt}".encode(), digest_size=8).digest()
    base = 1 + int.from_bytes(digest) % (_ROOMS // pool_size - 1)
    return base * pool_size + home


@dataclass(slots=True)
class _Server:
    life: str
    limit: int
    rooms: int = 0
    doubted: bool = False
    leaving: bool = False

    @property
    def usable(self) -> bool:
        return not (self.doubted or self.leaving)

    def fits(self, rooms: int) -> bool:
        """An idle server also takes the batch that is too large for it: nobody else can, and it
        queues what it cannot run."""
        return self.usable and (self.rooms + rooms <= self.limit or not self.rooms)


class Decodes:
    """The live decode servers by id."""

    def __init__(self) -> None:
        self._servers: dict[DecodeId, _Server] = {}

    @property
    def usable(self) -> bool:
        """Whether there is a server that takes requests, now or when it has a free room."""
        return any(server.usable for server in self._servers.values())

    @property
    def has_room(self) -> bool:
        """Whether one prompt more could go anywhere."""
        # Not a generator: this is asked several times for every request.
        for server in self._servers.values():  # noqa: SIM110
            if server.fits(1):
                return True
        return False

    def terms(self) -> tuple[DecodeTerms, ...]:
        """Every live server."""
        return tuple(
            DecodeTerms(decode, server.rooms, server.limit, server.doubted, server.leaving)
            for decode, server in self._servers.items()
        )

    def life(self, decode: DecodeId) -> str | None:
        """The life that is known of a server, None if none is."""
        server = self._servers.get(decode)
        return None if server is None else server.life

    def join(self, joined: DecodeJoined) -> None:
        """A new server, or a known one that is doubted no longer. One that was started again must
        be removed first."""
        server = self._servers.get(joined.decode)
        if server is None:
            self._servers[joined.decode] = _Server(joined.life, joined.max_requests)
        else:
            server.doubted = False

    def doubt(self, decode: DecodeId) -> None:
        """It did not answer: no new requests until it joins again, which its watcher sees to."""
        self._servers[decode].doubted = True

    def retire(self, decode: DecodeId, leaving: bool) -> None:
        """It takes no new requests while it is leaving."""
        if decode in self._servers:
            self._servers[decode].leaving = leaving

    def remove(self, decode: DecodeId) -> None:
        """It is gone. Nobody has a room there any more."""
        self._servers.pop(decode, None)

    def choose(self, rooms: int, avoid: Collection[DecodeId]) -> DecodeId | None:
        """The least loaded server with that many free rooms, one of ``avoid`` only for want of
        another; None if no server has them."""
        fitting = [
            (decode in avoid, server.rooms / server.limit, decode)
            for decode, server in self._servers.items()
            if server.fits(rooms)
        ]
        return min(fitting)[-1] if fitting else None

    def take(self, decode: DecodeId, rooms: int) -> None:
        self._servers[decode].rooms += rooms

    def give(self, decode: DecodeId, rooms: int) -> None:
        self._servers[decode].rooms -= rooms
