"""The one place that reads the machine's clock; everything else is handed a ``Clock``."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and sleeping, so that tests and the simulator can own time."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def unix_s(self, at_s: float) -> float:
        """The Unix time at an instant of this clock, as far as is known now."""


class WallClock:
    """The machine's monotonic clock (``time.monotonic``, seconds)."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def unix_s(self, at_s: float) -> float:
        return time.time() + at_s - time.monotonic()

    def pause(self, seconds: float) -> None:
        """Block the calling thread; never on an event loop."""
        time.sleep(seconds)


class VirtualClock:
    """A clock that moves only when told to; for tests and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        self._now += seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)  # let other tasks run

    def unix_s(self, at_s: float) -> float:
        return at_s
