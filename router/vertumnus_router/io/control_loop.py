"""Drive the control plane: events in, effects out to whom they concern."""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.core.effects import (
    Abort,
    BreakerChanged,
    Copy,
    Dispatch,
    Effect,
    PlanEnded,
    Reclaim,
    Regroup,
    Reject,
    TransferRefused,
)
from vertumnus_router.core.events import Event, Tick
from vertumnus_router.core.types import DecodeId, PoolId, RequestId
from vertumnus_router.core.verdict import Verdict
from vertumnus_router.io.verdicts import log_verdict

log = logging.getLogger(__name__)

#: While requests wait, and while none does.
_BUSY_TICK_S = 0.1
_IDLE_TICK_S = 1.0
#: Between two slices of a scan of the prefix index.
_SCAN_TICK_S = 0.01


class Core(Protocol):
    """What the loop needs of ``core.control.ControlPlane``."""

    @property
    def queued_count(self) -> int: ...

    @property
    def scanning(self) -> bool:
        """Whether a scan of the prefix index is in progress: each ``Tick`` does a slice of it."""

    def on_event(self, event: Event, now: float) -> list[Effect]: ...

    def requests_at(self, pool: PoolId) -> int: ...

    def rooms_at(self, decode: DecodeId) -> int: ...


#: What is carried out for nobody's request.
Order = Regroup | PlanEnded | Copy | Reclaim | TransferRefused


class ControlLoop:
    """The only caller of ``on_event``. All on one event loop, so events are in order.

    ``command`` and ``pull`` carry out what concerns pools and their caches, and return at once. A
    pull is begun here, not by the request that waits for it: its end has to be told, whatever
    becomes of the request.
    """

    def __init__(
        self,
        core: Core,
        clock: Clock,
        *,
        command: Callable[[Order], None],
        pull: Callable[[Copy], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._command = command
        self._pull = pull
        self._owners: dict[RequestId, Callable[[Effect], None]] = {}
        self._busy = asyncio.Event()

    def own(self, request: RequestId, deliver: Callable[[Effect], None]) -> None:
        """Effects that concern ``request`` go to ``deliver`` until it is disowned."""
        self._owners[request] = deliver

    def disown(self, request: RequestId) -> None:
        self._owners.pop(request, None)

    def requests_at(self, pool: PoolId) -> int:
        """How many requests the workers of a pool have."""
        return self._core.requests_at(pool)

    def rooms_at(self, decode: DecodeId) -> int:
        """How many prompts a decode server has."""
        return self._core.rooms_at(decode)

    def feed(self, event: Event) -> None:
        """Take in one event and hand out what follows from it."""
        for effect in self._core.on_event(event, self._clock.now()):
            match effect:
                case Dispatch() | Reject() | Abort():
                    if isinstance(effect, Dispatch) and effect.pull is not None:
                        self._pull(effect.pull)
                    deliver = self._owners.get(effect.request_id)
                    if deliver is not None:
                        deliver(effect)
                case Regroup() | PlanEnded() | Copy() | Reclaim() | TransferRefused():
                    self._command(effect)
                case Verdict():
                    log_verdict(effect)
                case BreakerChanged(worker, state, reason):
                    log.warning("worker %s: circuit breaker %s: %s", worker, state.value, reason)
        if self._core.queued_count:
            self._busy.set()

    def feed_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.feed(event)

    async def tick(self) -> None:
        """Tell the core that time passes, faster while requests wait or a scan is in progress.
        Never returns."""
        try:
            while True:
                await self._pause()
                self.feed(Tick())
                # What a scan makes, it keeps to its end and leaves no garbage. To look for some in
                # hundreds of thousands of objects would stop the event loop for 100 ms.
                (gc.disable if self._core.scanning else gc.enable)()
        finally:
            gc.enable()

    async def _pause(self) -> None:
        if self._core.scanning:
            await self._clock.sleep(_SCAN_TICK_S)
            return
        if not self._core.queued_count:
            self._busy.clear()
            try:
                async with asyncio.timeout(_IDLE_TICK_S):
                    await self._busy.wait()
            except TimeoutError:
                return
        await self._clock.sleep(_BUSY_TICK_S)
