"""What an exchange needs of the engines that it sends attempts to."""

from collections.abc import Callable
from typing import Protocol

from vertumnus_router.core.types import DecodeId, PoolId, TransferId
from vertumnus_router.io.plain import PlainServer
from vertumnus_router.io.upstream import Front


class Engines(Protocol):
    """Where attempts are sent."""

    def front(self, pool: PoolId) -> Front | None:
        """The front of a pool, None if it has left."""

    def plain(self, pool: PoolId) -> PlainServer | None:
        """The server of plain SGLang that the pool is, None for one that is none, or has left."""

    def suspect(self, pool: PoolId) -> None:
        """The front did not answer: look at once whether it is still there."""

    def abort(self, pool: PoolId, rids: list[str]) -> None:
        """Tell the engine to stop these; returns at once."""

    def when_pulled(self, transfer: TransferId, go: Callable[[], None]) -> None:
        """Call ``go`` once when the pull has ended, at its deadline at the latest."""

    def bootstrap_port(self, pool: PoolId) -> int | None:
        """Where decode servers find the ranks of a pool that prefills only, else None."""

    def decode(self, decode: DecodeId) -> Front | None:
        """The connections to a decode server, None if it is not live."""

    def suspect_decode(self, decode: DecodeId) -> None:
        """The decode server did not answer: look at once whether it is still there."""

    def abort_decode(self, decode: DecodeId, rids: list[str]) -> None:
        """Tell the decode server to stop these; returns at once."""
