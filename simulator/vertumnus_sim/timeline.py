"""What happens when: discrete events in one total order."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Carries out acts in the order of their times, and of their being planned where those are
    equal, so a run depends on nothing else. ``now`` is seconds from the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        """How many acts are planned."""
        return len(self._planned)

    def at(self, when_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Plan an act. Raises ``ValueError`` for a time that has passed."""
        if when_s < self.now:
            raise ValueError(f"it is {self.now} s, {when_s} s has passed")
        heappush(self._planned, (when_s, self._count, act, arguments))
        self._count += 1

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Plan an act ``delay_s`` from now."""
        heappush(self._planned, (self.now + delay_s, self._count, act, arguments))
        self._count += 1

    def run(self) -> None:
        """Until nothing is planned any more."""
        planned = self._planned
        while planned:
            self.now, _, act, arguments = heappop(planned)
            act(*arguments)
