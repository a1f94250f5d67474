"""How often requests used and missed each prefix, counted where their paths end.

A request uses every block from the root to where its hit ends, so one count at that end says the
same as one at every block: what a block has is the sum over the nodes at and below it. Decay is
linear and keeps that true. A scan sums from the leaves up; a dispatch costs the same however long
its prompt is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

#: Counts below this are gone.
NEGLIGIBLE = 1e-3


@dataclass(slots=True, eq=False)
class Tally:
    """What ends at one node, by degree: [accesses, misses], as of a scan's number."""

    as_of: int
    counts: dict[int, list[float]] = field(default_factory=dict)


class Tallied(Protocol):
    """A node that may have a tally."""

    tally: Tally | None


class Tallies:
    """The arithmetic of tallies. Each is decayed when it is touched, by the number of scans
    that ended since, so nothing has to visit them for it."""

    def __init__(self, decay: float = 0.5) -> None:
        self._decay = decay
        #: scans that have ended
        self.scans = 0

    def add(self, node: Tallied, degree: int, accesses: float = 0.0, misses: float = 0.0) -> None:
        tally = node.tally
        if tally is None:
            tally = node.tally = Tally(self.scans)
        else:
            self._settle(tally)
        counts = tally.counts.setdefault(degree, [0.0, 0.0])
        counts[0] += accesses
        counts[1] += misses

    def read(self, node: Tallied) -> Mapping[int, list[float]]:
        """What ends at the node now, by degree; not to be changed. One that has all but
        vanished is taken off the node."""
        tally = node.tally
        if tally is None:
            return {}
        self._settle(tally)
        if all(abs(a) < NEGLIGIBLE and abs(m) < NEGLIGIBLE for a, m in tally.counts.values()):
            node.tally = None
            return {}
        return tally.counts

    def fold(self, node: Tallied, parent: Tallied) -> None:
        """The node goes: what ended there ends at its parent from now on."""
        for degree, (accesses, misses) in self.read(node).items():
            self.add(parent, degree, accesses, misses)
        node.tally = None

    def _settle(self, tally: Tally) -> None:
        if tally.as_of != self.scans:
            factor = self._decay ** (self.scans - tally.as_of)
            for counts in tally.counts.values():
                counts[0] *= factor
                counts[1] *= factor
            tally.as_of = self.scans
