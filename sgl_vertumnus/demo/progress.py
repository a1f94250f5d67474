"""Progress of long steps on a terminal or in a log."""

import contextlib
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
        self._write(f"{self._stamp()} {message}\n")
        self._open_line = False

    def update(self, message: str) -> None:
        if self._rewrites:
            self._write(f"{self._stamp()} {message}")
            self._open_line = True
        elif self._clock.now() - self._last_update >= LOG_EVERY_S:
            self._write(f"{self._stamp()} {message}\n")
            self._last_update = self._clock.now()

    def _stamp(self) -> str:
        return f"[{self._clock.now() - self._started:6.1f} s]"

    def _write(self, text: str) -> None:
        # A closed terminal must not end what is being reported, least of all a shutdown.
        with contextlib.suppress(OSError):
            self._stream.write(("\r\x1b[K" if self._open_line else "") + text)
            self._stream.flush()
