"""The servers that the router follows, by URL. They come and go while it runs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.io.config import check_urls

log = logging.getLogger(__name__)

#: How often a server that leaves is looked at.
_LOOK_S = 0.1
_CAUSE = "it was told to leave"


class Role(Enum):
    """What a server is wanted for."""

    #: a pool, or a server of plain SGLang
    WORKER = "worker"
    #: a pool, and nothing else
    POOL = "pool"
    #: either kind, as long as it leaves the decoding to others
    PREFILL = "prefill"
    DECODE = "decode"


class Link(Protocol):
    """The connection to one server."""

    @property
    def url(self) -> str: ...

    @property
    def visit(self) -> object | None:
        """What the server said of itself when it joined; None while it is not here."""

    @property
    def requests(self) -> int:
        """How many requests it has."""

    async def run(self) -> None:
        """Find the server and follow it. Never returns."""

    def retire(self, cause: str | None) -> None:
        """It takes no new requests; with None it does again."""

    def end(self, cause: str) -> None:
        """It is gone, if it was here. ``run`` must have been cancelled."""


class AlreadyThere(ValueError):
    """The URL is followed in another role, or who is here has no use for that role."""


@dataclass(slots=True)
class _Member:
    role: Role
    link: Link
    following: asyncio.Task[Any]
    leaving: asyncio.Task[Any] | None = None


class Fleet:
    """``make`` builds the link to a server, ``spawn`` runs it, ``forget`` is told when it is gone
    for good."""

    def __init__(
        self,
        *,
        make: Callable[[str, Role, int | None], Link],
        forget: Callable[[Link], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        clock: Clock,
    ) -> None:
        self._make = make
        self._forget = forget
        self._spawn = spawn
        self._clock = clock
        self._members: dict[str, _Member] = {}

    def role(self, url: str) -> Role | None:
        """What the server at ``url`` is followed as, None if it is not."""
        member = self._members.get(url)
        return None if member is None else member.role

    def is_leaving(self, url: str) -> bool:
        member = self._members.get(url)
        return member is not None and member.leaving is not None

    def join(self, url: str, role: Role, bootstrap_port: int | None = None) -> bool:
        """Follow the server at ``url``; False if it is followed already. One that was leaving
        stays. ``bootstrap_port`` is where decode servers find one that prefills, if it does not say
        so itself. ``ConfigError`` if that is no URL, ``AlreadyThere`` if it has another role."""
        check_urls("url", (url,), "server")
        url = url.rstrip("/")
        known = self._members.get(url)
        if known is None:
            link = self._make(url, role, bootstrap_port)
            self._members[url] = _Member(role, link, self._spawn(link.run()))
            return True
        is_pool = known.role is Role.POOL and known.link.visit is not None
        if known.role is not role and not (is_pool and role is Role.WORKER):
            raise AlreadyThere(f"{url} is here as {known.role.value}: let it leave first")
        if known.leaving is None:
            return False
        known.leaving.cancel()
        known.leaving = None
        known.link.retire(None)
        return True

    def leave(self, url: str) -> bool:
        """Give the server at ``url`` no new requests, and let go of it when those that it has have
        ended; False if it is not followed, or leaving already."""
        member = self._members.get(url.rstrip("/"))
        if member is None or member.leaving is not None:
            return False
        log.info("%s leaves", member.link.url)
        visit = member.link.visit  # who comes later has not been told
        member.link.retire(_CAUSE)
        member.leaving = self._spawn(self._let_go(member, visit))
        return True

    async def _let_go(self, member: _Member, visit: object | None) -> None:
        link = member.link
        # One that goes by itself meanwhile is not waited for, nor is its next life.
        while visit is not None and link.visit is visit and link.requests:
            await self._clock.sleep(_LOOK_S)
        del self._members[link.url]
        member.following.cancel()
        await asyncio.gather(member.following, return_exceptions=True)
        link.end(_CAUSE)
        self._forget(link)
