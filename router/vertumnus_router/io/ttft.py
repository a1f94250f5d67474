"""Where the time to the first token goes when it goes to more than a prefill."""

from collections import deque
from dataclasses import dataclass

PARTS = ("queue", "pull", "prefill", "transfer", "first_decode")
_REMEMBERED = 128


@dataclass(slots=True)
class Marks:
    """When things happened to an attempt, seconds of one clock; None while they have not, or
    nobody told."""

    dispatched_s: float
    pulled_s: float | None = None
    started_s: float | None = None
    prefilled_s: float | None = None
    arrived_s: float | None = None

    @property
    def pull_s(self) -> float:
        """How long the attempt was held back for the copy that went before it."""
        return 0.0 if self.pulled_s is None else self.pulled_s - self.dispatched_s

    def split(self, begin_s: float, end_s: float, *, handed_over: bool = True) -> tuple[float, ...]:
        """The time from ``begin_s`` to ``end_s`` in ``PARTS``, none of them negative: until the
        prefill started, of which the pull is a part of its own; until it finished; until the KV
        was at the decode server, if it is ``handed_over`` to one; the rest. What nobody told, or
        told late, lengthens the part that ends with it, at most to the next mark.
        """
        started_s = self.dispatched_s + self.pull_s if self.started_s is None else self.started_s
        arrived_s = end_s if self.arrived_s is None else self.arrived_s
        prefilled_s = arrived_s if self.prefilled_s is None else self.prefilled_s
        if not handed_over:
            arrived_s = prefilled_s
        parts = []
        at_s = begin_s
        for mark_s in (started_s, prefilled_s, arrived_s):
            until_s = min(max(mark_s, at_s), end_s)
            parts.append(until_s - at_s)
            at_s = until_s
        waited_s, *others = parts
        pull_s = min(self.pull_s, waited_s)
        return (waited_s - pull_s, pull_s, *others, end_s - at_s)


class RecentSplits:
    """The splits of the last requests."""

    def __init__(self) -> None:
        self._splits: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)

    def add(self, split: tuple[float, ...]) -> None:
        self._splits.append(split)

    def content(self) -> dict[str, object]:
        """How many there are, and the mean of each part, as JSON."""
        count = len(self._splits)
        sums = [sum(column) for column in zip(*self._splits, strict=True)] or [0.0] * len(PARTS)
        means = (total / count if count else None for total in sums)
        return {"requests": count, "mean_s": dict(zip(PARTS, means, strict=True))}
