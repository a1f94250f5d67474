"""Make the fleet follow what a source has found, and only that."""

import logging
from collections.abc import Iterable
from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.fleet import AlreadyThere, Role

log = logging.getLogger(__name__)

#: For how long a source that names nobody any more is not believed.
GRACE_S = 60.0


class Joins(Protocol):
    """What is asked of the router, see ``Fleet``."""

    def join(self, url: str, role: Role = Role.WORKER) -> bool: ...

    def leave(self, url: str) -> bool: ...


class Following:
    """The servers of one role that one source has brought. Others are left alone.

    A source that names nobody has more likely failed than lost all its servers at once: what it
    named before stays for ``grace_s``. Servers that are really gone are lost by themselves.
    """

    def __init__(
        self, fleet: Joins, role: Role, clock: Clock, *, what: str, grace_s: float = GRACE_S
    ) -> None:
        self._fleet = fleet
        self.role = role
        self._clock = clock
        self._what = what
        self._grace_s = grace_s
        self._urls: set[str] = set()
        #: said once why they cannot be followed
        self._refused: set[str] = set()
        self._empty_since_s: float | None = None

    @property
    def urls(self) -> frozenset[str]:
        return frozenset(self._urls)

    @property
    def holds(self) -> bool:
        """Whether servers stay although the source names nobody."""
        return self._empty_since_s is not None

    def would_leave(self, urls: Iterable[str]) -> bool:
        """Whether ``replace`` with these would take any away."""
        return not self._urls <= set(urls)

    def add(self, urls: Iterable[str]) -> None:
        """Follow these too."""
        for url in sorted(set(urls) - self._urls):
            try:
                joined = self._fleet.join(url, self.role)
            except (AlreadyThere, ConfigError) as exc:
                if url not in self._refused:
                    log.error("%s: %s", self._what, exc)
                self._refused.add(url)
                continue
            self._refused.discard(url)
            if joined:  # else it was named elsewhere, and is not this source's to take away
                log.info("%s: %s %s is here", self._what, self.role.value, url)
                self._urls.add(url)

    def replace(self, urls: Iterable[str]) -> None:
        """Follow these and no others."""
        wanted = set(urls)
        if self._urls and not wanted:
            if self._empty_since_s is None:
                self._empty_since_s = self._clock.now()
                log.warning(
                    "%s names no %s any more: %d of them stay for %g s",
                    *(self._what, self.role.value, len(self._urls), self._grace_s),
                )
            if self._clock.now() - self._empty_since_s < self._grace_s:
                return
        self._empty_since_s = None
        self.add(wanted)
        for url in sorted(self._urls - wanted):
            log.info("%s: %s %s is gone", self._what, self.role.value, url)
            self._urls.discard(url)
            self._fleet.leave(url)
