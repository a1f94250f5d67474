"""Have ranks publish their blocks once more after events of theirs were lost for good."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from vertumnus_router.clock import Clock
from vertumnus_router.io.event_stream import EventStream
from vertumnus_router.io.fronts import Fronts, NoReport, command
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.protocol import SnapshotCommand, SnapshotReport

log = logging.getLogger(__name__)

#: A rank's own deadlines end it sooner.
_TIMEOUT_S = 15.0
_BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)


class Snapshots:
    """Asks for the snapshots of one router's ranks, one at a time for each."""

    def __init__(
        self,
        fronts: Fronts,
        metrics: RouterMetrics,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._fronts = fronts
        self._metrics = metrics
        self._clock = clock
        self._spawn = spawn
        self._asking: set[EventStream] = set()

    def want(self, stream: EventStream, life: Callable[[], str | None]) -> None:
        """The stream is incomplete: ask until its rank agrees. ``life`` is the rank's incarnation,
        None when the rank or its pool is lost, which ends this. Returns at once."""
        if stream not in self._asking:
            self._asking.add(stream)
            self._spawn(self._refill(stream, life))

    async def _refill(self, stream: EventStream, life: Callable[[], str | None]) -> None:
        try:
            attempt = 0
            while stream.is_incomplete and (incarnation := life()) is not None:
                await self._ask(stream, incarnation)
                if not stream.is_incomplete:
                    break
                # It refused, or what it published was lost as well: a moment may help.
                await self._clock.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                attempt += 1
        finally:
            self._asking.discard(stream)

    async def _ask(self, stream: EventStream, incarnation: str) -> None:
        rank, losses, stored_blocks = stream.rank, stream.losses, stream.stored_blocks
        body = SnapshotCommand(rank=rank.index, incarnation=incarnation)
        told = await command(
            self._fronts, rank.pool, "/vertumnus/kv/snapshot", body, SnapshotReport, _TIMEOUT_S
        )
        if isinstance(told, NoReport):
            outcome, reason = "refused" if told.refused else "failed", told.reason
        elif told.outcome in ("done", "refused"):
            outcome, reason = told.outcome, told.reason or f"{told.blocks} block(s)"
        else:
            outcome, reason = "failed", f"{told.outcome!r} is no outcome"
        log.info("%s: snapshot %s: %s", rank, outcome, reason)
        self._metrics.snapshot(outcome)
        if not isinstance(told, NoReport) and outcome == "done":
            stream.refilled(losses, stored_blocks, told.blocks)
