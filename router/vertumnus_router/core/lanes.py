"""The timelines that requests are planned onto in one pass over the queue."""

from dataclasses import dataclass, field
from typing import Protocol

from vertumnus_router.core.effects import Effect
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.types import WorkerId
from vertumnus_router.core.workers import Candidate


@dataclass(slots=True, eq=False)
class Lane:
    """One candidate's timeline while requests are planned onto it, uncached tokens and seconds.

    Made anew from the ledger for each pass over the queue, so that planning touches nothing.
    ``switch_s`` of ``queue_s`` are for making the candidate out of what serves now; 0 where it
    serves. ``open``: it serves, and no earlier request of this pass waits for one of its ranks.
    ``forms``: it could be made now. ``workers`` are those that have its ranks, ``rivals`` the
    lanes that share a rank with it.
    """

    candidate: Candidate
    queue_s: float
    tokens: int
    tokens_before_last: int
    workers: tuple[WorkerId, ...]
    switch_s: float = 0.0
    open: bool = True
    forms: bool = False
    rivals: "list[Lane]" = field(default_factory=list)

    def plan(self, service_s: float, uncached_tokens: int, binds: bool) -> None:
        """The next request waits behind this one, on every lane that shares a rank; one that
        binds also takes up room."""
        self.queue_s += service_s
        self.switch_s = 0.0  # paid by the first
        if binds:
            self.tokens_before_last = self.tokens
            self.tokens += uncached_tokens
        for rival in self.rivals:
            rival.queue_s = max(rival.queue_s, self.queue_s + rival.switch_s)
            # Its ranks are promised: whoever went there first would keep this one waiting.
            rival.open = rival.forms = False


class Lanes(Protocol):
    """Where the candidates of a policy come from."""

    def now(self, now: float) -> list[Lane]:
        """Every candidate's timeline."""

    def form(self, lane: Lane, lanes: list[Lane], now: float) -> list[Effect]:
        """Have the candidate of a lane that ``forms`` made out of what serves; nothing else of
        its pool, on any of ``lanes``, is made meanwhile."""


class WorkerLanes:
    """Persistent workers: a lane for each that serves."""

    def __init__(self, membership: Membership, ledger: Ledger) -> None:
        self._membership = membership
        self._ledger = ledger

    def now(self, now: float) -> list[Lane]:
        queue_s, load = self._ledger.queue_s, self._ledger.load
        return [Lane(c, queue_s(c.id, now), *load(c.id), (c.id,)) for c in self._membership.serving]

    def form(self, lane: Lane, lanes: list[Lane], now: float) -> list[Effect]:
        raise ValueError(f"{lane.candidate.id} serves already")
