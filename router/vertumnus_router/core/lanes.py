"""The timelines of the candidates while the queue is planned onto them."""

from dataclasses import dataclass
from typing import Protocol

from vertumnus_router.core.effects import Effect
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.policy import Policy
from vertumnus_router.core.types import WorkerId
from vertumnus_router.core.workers import Candidates


@dataclass(slots=True)
class Lanes:
    """One timeline per candidate, in columns: a pass over the queue reads them all many times.

    ``queue_s`` seconds until the candidate is free; ``loads`` the uncached tokens of its
    unfinished prefills, and of those without the last bound. Made anew from the ledger for each
    pass, so that planning touches nothing.
    """

    candidates: Candidates
    queue_s: list[float]
    loads: list[tuple[int, int]]

    @property
    def idle_gpu_s(self) -> list[float] | None:
        """GPU-seconds that the ranks of each candidate stand still before it is free; None where
        they do not."""
        return None

    def serves(self, at: int) -> bool:
        """Whether the candidate serves, and nobody who went first waits for one of its ranks."""
        return True

    def forms(self, at: int) -> bool:
        """Whether the candidate does not serve, and could be made to now."""
        return False

    def sharing(self, worker: WorkerId) -> tuple[int, ...]:
        """The lanes that have a rank of a worker."""
        at = self.candidates.at_worker.get(worker)
        return () if at is None else (at,)

    def plan(self, at: int, service_s: float, uncached_tokens: int, binds: bool) -> None:
        """The next request waits behind lane ``at``; one that binds also takes up room."""
        self.queue_s[at] += service_s
        if binds:
            tokens, _ = self.loads[at]
            self.loads[at] = tokens + uncached_tokens, tokens


class LaneSource(Protocol):
    """Where lanes come from."""

    def now(self, now: float) -> Lanes:
        """Those of every candidate."""

    def form(self, lanes: Lanes, at: int, now: float) -> list[Effect]:
        """Have the candidate of a lane that ``forms`` made of what serves on its ranks."""


class WorkerLanes:
    """Persistent workers: those that serve are the candidates."""

    def __init__(self, policy: Policy, membership: Membership, ledger: Ledger) -> None:
        self._policy = policy
        self._membership = membership
        self._ledger = ledger

    def now(self, now: float) -> Lanes:
        candidates = self._policy.candidates(self._membership)
        ids = candidates.ids
        return Lanes(candidates, self._ledger.queues_s(ids, now), self._ledger.loads(ids))

    def form(self, lanes: Lanes, at: int, now: float) -> list[Effect]:
        raise ValueError(f"{lanes.candidates.ids[at]} serves already")
