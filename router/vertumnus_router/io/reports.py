"""What the ranks of one pool say of themselves, and what their silence says."""

import asyncio
import logging
from typing import Protocol

from vertumnus_router import protocol
from vertumnus_router.clock import Clock
from vertumnus_router.io.sockets import Context, Frames, SocketReader, subscribe, tcp_url
from vertumnus_router.protocol import (
    HEARTBEAT_S,
    REPORT_TOPIC,
    SILENCE_S,
    PoolDescription,
    PrefillFinished,
    PrefillStarted,
    ProtocolError,
    RankLost,
    RankState,
)

log = logging.getLogger(__name__)

#: ``check`` comes every heartbeat; this late, the router itself was not running.
_STOOD_STILL_S = 2.5 * HEARTBEAT_S

PrefillReport = PrefillStarted | PrefillFinished


class Listener(Protocol):
    """Told what the reports say, each rank's in order."""

    def rank_began(self, state: RankState, previous: str | None) -> None:
        """The first report of a life; ``previous`` is the incarnation before, if one was heard.
        ``rank_reported`` follows for the same report."""

    def rank_reported(self, state: RankState) -> None: ...

    def rank_lost(self, rank: int, incarnation: str | None, cause: str) -> None: ...

    def prefill(self, report: PrefillReport) -> None: ...


class ReportReader:
    """One subscription to all ranks of a pool and to its supervisor."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        description: PoolDescription,
        host: str,
        clock: Clock,
        listener: Listener,
    ) -> None:
        self._description = description
        self._clock = clock
        self._listener = listener
        self._lives: dict[int, str] = {}
        self._dead: dict[int, str] = {}
        self._heard_s: dict[int, float] = {}
        self._silent: set[int] = set()
        self._checked_s = clock.now()
        self._all_silent = False
        self._warned: set[str] = set()
        base = description.reports.port_base
        ports = range(base, base + description.pool_size + 1)
        urls = [tcp_url(host, port) for port in ports]
        self._reader = SocketReader(loop, subscribe(context, REPORT_TOPIC, *urls), self._on_report)

    def close(self) -> None:
        self._reader.close()

    def heard_lately(self) -> bool:
        """Whether any rank has reported within two heartbeats."""
        now = self._clock.now()
        return any(now - heard <= 2 * HEARTBEAT_S for heard in self._heard_s.values())

    def stale_s(self) -> float | None:
        """For how long no rank has reported, None unless that is too long."""
        if not self._heard_s:
            return None
        silence_s = self._clock.now() - max(self._heard_s.values())
        return silence_s if silence_s > SILENCE_S else None

    def check(self) -> None:
        """Called about once a second: a rank that was silent for too long is lost.

        Nobody is lost while no rank at all is heard: then it is more likely that reports do not
        get here, and the pool goes on as it was last seen, unless its front does not answer either,
        which ``PoolLink`` sees to. After that, and when this router itself stood still, all get a
        new chance to be heard.
        """
        now = self._clock.now()
        stood_still = now - self._checked_s > _STOOD_STILL_S
        self._checked_s = now
        were_silent, self._all_silent = self._all_silent, not self.heard_lately()
        if self._all_silent:
            if not were_silent and self._heard_s:
                log.warning("pool %s: no rank is heard", self._description.pool_id)
            return
        if stood_still or were_silent:
            self._heard_s = dict.fromkeys(self._heard_s, now)
            return
        for rank, heard in self._heard_s.items():
            if now - heard > SILENCE_S and rank not in self._silent:
                self._silent.add(rank)
                self._listener.rank_lost(rank, None, f"silent for {SILENCE_S:g} s")

    def _on_report(self, frames: Frames) -> None:
        try:
            report = protocol.decode_report(frames)
        except ProtocolError as exc:
            self._warn(str(exc))
            return
        if not 0 <= report.rank < self._description.pool_size:
            self._warn(f"a report of rank {report.rank}, which the pool does not have")
            return
        match report:
            case RankState():
                self._on_state(report)
            case RankLost():
                self._on_lost(report)
            case _:
                if report.incarnation == self._lives.get(report.rank):
                    self._listener.prefill(report)

    def _on_state(self, state: RankState) -> None:
        if state.pool_id != self._description.pool_id:
            self._warn(f"reports of pool {state.pool_id} on the ports of this pool")
            return
        if state.incarnation == self._dead.get(state.rank):
            return  # what a process said before it died
        self._heard_s[state.rank] = self._clock.now()
        self._silent.discard(state.rank)
        previous = self._lives.get(state.rank)
        if state.incarnation != previous:
            self._lives[state.rank] = state.incarnation
            self._listener.rank_began(state, previous)
        self._listener.rank_reported(state)

    def _on_lost(self, report: RankLost) -> None:
        current = self._lives.get(report.rank)
        life = report.incarnation or current
        if life is not None:
            self._dead[report.rank] = life
        if life == current:
            self._heard_s.pop(report.rank, None)  # the dead are not also silent
        self._listener.rank_lost(report.rank, life, report.cause)

    def _warn(self, message: str) -> None:
        """Once for each message: a stranger would repeat it every second."""
        if message not in self._warned and len(self._warned) < 100:
            self._warned.add(message)
            log.warning("pool %s: %s", self._description.pool_id, message)
