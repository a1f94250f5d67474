"""Drive the control plane: events in, effects out to the requests that they concern."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.core.effects import Effect
from vertumnus_router.core.events import Event, Tick
from vertumnus_router.core.types import RequestId

#: While requests wait, and while none does.
_BUSY_TICK_S = 0.1
_IDLE_TICK_S = 1.0


class Core(Protocol):
    """What the loop needs of ``core.control.ControlPlane``."""

    @property
    def queued_count(self) -> int: ...

    def on_event(self, event: Event, now: float) -> list[Effect]: ...


class ControlLoop:
    """The only caller of ``on_event``. All on one event loop, so events are in order."""

    def __init__(self, core: Core, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._owners: dict[RequestId, Callable[[Effect], None]] = {}
        self._busy = asyncio.Event()

    def own(self, request: RequestId, deliver: Callable[[Effect], None]) -> None:
        """Effects that concern ``request`` go to ``deliver`` until it is disowned."""
        self._owners[request] = deliver

    def disown(self, request: RequestId) -> None:
        self._owners.pop(request, None)

    def feed(self, event: Event) -> None:
        """Take in one event and hand out what follows from it."""
        for effect in self._core.on_event(event, self._clock.now()):
            deliver = self._owners.get(effect.request_id)
            if deliver is not None:
                deliver(effect)
        if self._core.queued_count:
            self._busy.set()

    def feed_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.feed(event)

    async def tick(self) -> None:
        """Tell the core that time passes, faster while requests wait. Never returns."""
        while True:
            if self._core.queued_count:
                await self._clock.sleep(_BUSY_TICK_S)
            else:
                self._busy.clear()
                try:
                    async with asyncio.timeout(_IDLE_TICK_S):
                        await self._busy.wait()
                    continue
                except TimeoutError:
                    pass
            self.feed(Tick())
