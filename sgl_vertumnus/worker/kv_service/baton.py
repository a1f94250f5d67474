"""Who may touch a rank's tree and its allocator of KV: one thread at a time.

They belong to the scheduler's thread, which gives them away while it computes or waits, and at
the start of a step if somebody asks. Whoever else takes them must be quick.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class BatonTimeout(TimeoutError):
    """The scheduler's thread did not let anybody in."""


class Baton:
    """Handed over in the order in which it was asked for.

    ``begin``, ``away`` and ``pass_on`` are the scheduler's; all others use ``held``.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_free = False
        self._has_begun = False
        self._waiting: deque[threading.Event] = deque()

    def begin(self) -> None:
        """Until its first step nobody but the scheduler's thread gets in."""
        self._has_begun = True

    def pass_on(self) -> None:
        """Let in who waits now; costs nothing when nobody does."""
        if self._waiting:
            with self.away():
                pass

    @contextmanager
    def away(self) -> Iterator[None]:
        """The scheduler's thread does not touch the tree meanwhile."""
        if not self._has_begun:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take(None)

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Touch the tree; raises ``BatonTimeout``."""
        if not self._take(timeout_s):
            raise BatonTimeout(f"the rank's scheduler was busy for {timeout_s:.1f} s")
        try:
            yield
        finally:
            self._give()

    def _take(self, timeout_s: float | None) -> bool:
        with self._mutex:
            if self._is_free:
                self._is_free = False
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(timeout_s):
            return True
        with self._mutex:
            if turn.is_set():
                return True
            self._waiting.remove(turn)
            return False

    def _give(self) -> None:
        # Straight to the next: a freed lock would go to whoever runs, which is the giver.
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_free = True
