"""Progress of long steps on a terminal or in a log."""

import sys
from typing import Protocol, TextIO

from vertumnus_router.clock import Clock, WallClock

#: In a log, where lines cannot be rewritten, a running step reports this often.
LOG_EVERY_S = 5.0


class Progress(Protocol):
    """What a long step reports to."""

    def step(self, message: str) -> None:
        """Something happened: a line of its own."""

    def update(self, message: str) -> None:
        """How far the running step is: replaces the previous update."""


class Quiet:
    """Reports nothing."""

    def step(self, message: str) -> None:
        del message

    def update(self, message: str) -> None:
        del message


class Console:
    """Lines with the seconds since the start; updates rewrite themselves on a terminal."""

    def __init__(self, stream: TextIO | None = None, clock: Clock | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock if clock is not None else WallClock()
        self._started = self._clock.now()
        self._last_update = self._started
        self._rewrites = self._stream.isatty()
        self._open_line = False

    def step(self, message: str) -> None:
        if self._open_line:
            self._stream.write("\r\x1b[K")
            self._open_line = False
        self._stream.write(f"[{self._elapsed():6.1f} s] {message}\n")
        self._stream.flush()

    def update(self, message: str) -> None:
        now = self._clock.now()
        if self._rewrites:
            self._stream.write(f"\r\x1b[K[{self._elapsed():6.1f} s] {message}")
            self._open_line = True
        elif now - self._last_update >= LOG_EVERY_S:
            self._stream.write(f"[{self._elapsed():6.1f} s] {message}\n")
        else:
            return
        self._last_update = now
        self._stream.flush()

    def _elapsed(self) -> float:
        return self._clock.now() - self._started
