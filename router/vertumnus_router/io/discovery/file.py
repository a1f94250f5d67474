"""Servers named in a file: one URL a line, or JSON.

Lines and a JSON list name workers. A JSON object ``{"workers": [], "prefill": [], "decode": []}``
names each kind. In lines, what follows a ``#`` is a comment.
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from vertumnus_router.clock import Clock
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.config import check_urls
from vertumnus_router.io.discovery.following import GRACE_S, Following, Joins
from vertumnus_router.io.fleet import Role

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class FileError(ValueError):
    """The file cannot be read, or names no servers in a way that is understood."""


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[str] = []
    prefill: list[str] = []
    decode: list[str] = []


Servers = dict[Role, frozenset[str]]


def parse(content: bytes) -> Servers:
    """What a file says: the URLs of each role, without a slash at their end. Raises
    ``FileError``."""
    try:
        if content.lstrip()[:1] in (b"[", b"{"):
            either = msgspec.json.decode(content, type=_Named | list[str])
            named = _Named(either) if isinstance(either, list) else either
        else:
            lines = (line.partition("#")[0].strip() for line in content.decode().splitlines())
            named = _Named([line for line in lines if line])
        check_urls("servers", (*named.workers, *named.prefill, *named.decode), "server")
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as exc:
        raise FileError(str(exc)) from exc
    roles = (
        (Role.WORKER, named.workers),
        (Role.PREFILL, named.prefill),
        (Role.DECODE, named.decode),
    )
    return {role: frozenset(url.rstrip("/") for url in urls) for role, urls in roles}


class FileSource:
    """Follows a file. While it is broken, what it named last stays."""

    def __init__(self, path: Path, fleet: Joins, clock: Clock, *, grace_s: float = GRACE_S) -> None:
        self.name = f"file {path}"
        #: why the file is of no use now, None if it is
        self.trouble: str | None = "not read yet"
        self._path = path
        self._clock = clock
        self.following = [
            Following(fleet, role, clock, what=self.name, grace_s=grace_s)
            for role in (Role.WORKER, Role.PREFILL, Role.DECODE)
        ]
        self._read: bytes | None = None

    async def run(self) -> None:
        """Look at the file every second. Never returns."""
        while True:
            await self.look()
            await self._clock.sleep(_LOOK_S)

    async def look(self) -> None:
        """Read the file. A new content counts once it was read twice: the first time it may be
        half written. The very first counts at once, as there is nothing to lose yet."""
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            servers = parse(content)
        except (OSError, FileError) as exc:
            self._read = None
            if self.trouble != str(exc):
                log.error("%s: %s; what it named before stays", self.name, exc)
                self.trouble = str(exc)
            return
        fresh, self._read = content != self._read, content
        if fresh and any(one.urls for one in self.following):
            return
        self.trouble = None
        for one in self.following:
            one.replace(servers[one.role])
