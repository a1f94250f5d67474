"""Every request from acceptance to its end: the central queue, the phases, the reservations.

A request holds a reservation exactly while it is in ``Phase.PREFILL``. ``_enter`` is the only
place where phases change, so it is the only place where a reservation is released.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.trie import PrefixMatch
from vertumnus_router.core.types import BlockHash, PoolId, Request, RequestId, WorkerId
from vertumnus_router.core.workers import Candidate


class Phase(Enum):
    QUEUED = "queued"  # in the central queue, bound to no worker
    PREFILL = "prefill"  # dispatched, no first token yet
    DECODE = "decode"  # past its prefill
    ABANDONED = "abandoned"  # its worker is lost; the end of the attempt is yet to be told
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Entry:
    """One live request. ``tried`` are the workers that it was dispatched to, the current one
    included, ``unreachable`` the pools whose front did not answer; ``stranded_s`` since when no
    serving worker could take it."""

    request: Request
    arrived_s: float
    sequence: int
    urgency: float
    phase: Phase = Phase.QUEUED
    candidate: Candidate | None = None
    tried: tuple[WorkerId, ...] = ()
    unreachable: frozenset[PoolId] = frozenset()
    failure: str | None = None
    stranded_s: float | None = None
    #: its prefill had the worker to itself: the reported time corrects the model
    sample: bool = False
    #: the match in the index and the version of the index that it is good for
    match: PrefixMatch | None = None
    match_version: int = -1

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def key(self) -> tuple[int, float, int]:
        """Place in the queue: priority first, then the policy's urgency, then arrival."""
        return -self.request.priority, self.urgency, self.sequence

    def rules_out(self, candidate: Candidate) -> str | None:
        """Why an earlier attempt speaks against the candidate, or None."""
        if candidate.id in self.tried:
            return "tried before"
        if candidate.pool.pool in self.unreachable:
            return "the front of its pool could not be reached"
        return None


class RequestTable:
    """The live requests. Each method is one transition; asking for a wrong one is a bug."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._entries: dict[RequestId, Entry] = {}
        self._queue: list[Entry] = []
        self._assigned: dict[WorkerId, dict[RequestId, Entry]] = {}
        self._accepted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request: RequestId) -> Entry | None:
        return self._entries.get(request)

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def queue(self) -> list[Entry]:
        """The queue in its order, a copy."""
        return self._queue.copy()

    def ahead_of(self, entry: Entry) -> list[Entry]:
        """The queued requests that go before ``entry``, which need not be queued itself."""
        return self._queue[: bisect_left(self._queue, entry.key, key=_key)]

    def assigned(self, worker: WorkerId) -> list[Entry]:
        """The requests that ``worker`` has, in prefill or past it."""
        return list(self._assigned.get(worker, {}).values())

    def draft(self, request: Request, urgency: float, now: float) -> Entry:
        """The entry that ``admit`` would take in."""
        return Entry(request, now, self._accepted, urgency)

    def admit(self, entry: Entry) -> None:
        """Accept a draft. ``ValueError`` if a live request has its id."""
        if entry.id in self._entries:
            raise ValueError(f"request id {entry.id} is in flight already")
        self._accepted += 1
        self._entries[entry.id] = entry
        insort(self._queue, entry, key=_key)

    def reorder(self, entry: Entry, urgency: float) -> None:
        """Move a queued request to its new place."""
        if urgency != entry.urgency:
            self._unqueue(entry)
            entry.urgency = urgency
            insort(self._queue, entry, key=_key)

    def bind(
        self,
        entry: Entry,
        candidate: Candidate,
        service_s: float,
        uncached_tokens: int,
        blocks: tuple[BlockHash, ...],
        now: float,
    ) -> None:
        """Out of the queue, onto the candidate, with a reservation of ``service_s`` that will
        leave ``blocks`` there."""
        self._enter(entry, Phase.PREFILL, now)
        entry.candidate = candidate
        entry.tried += (candidate.id,)
        self._assigned.setdefault(candidate.id, {})[entry.id] = entry
        self._ledger.reserve(entry.id, candidate.id, service_s, uncached_tokens, blocks)

    def start_prefill(self, entry: Entry, now: float) -> None:
        self._ledger.start(entry.id, now)

    def finish_prefill(self, entry: Entry, now: float) -> None:
        self._enter(entry, Phase.DECODE, now)

    def abandon(self, entry: Entry, now: float) -> None:
        """The worker is lost; the request waits to hear how its attempt ended."""
        self._enter(entry, Phase.ABANDONED, now)

    def requeue(self, entry: Entry, now: float) -> None:
        """Back to its old place in the queue."""
        self._enter(entry, Phase.QUEUED, now)

    def end(self, entry: Entry, now: float) -> None:
        self._enter(entry, Phase.ENDED, now)
        del self._entries[entry.id]

    def _enter(self, entry: Entry, phase: Phase, now: float) -> None:
        if entry.phase is Phase.QUEUED:
            self._unqueue(entry)
        elif entry.phase is Phase.PREFILL:
            released = self._ledger.release(entry.id, now)
            entry.sample = released is not None and released.started and not released.shared
        if phase is not Phase.DECODE and entry.candidate is not None:
            self._unassign(entry, entry.candidate.id)
        if phase is Phase.QUEUED:
            entry.candidate = None
            entry.sample = False
            insort(self._queue, entry, key=_key)
        entry.phase = phase

    def _unqueue(self, entry: Entry) -> None:
        at = bisect_left(self._queue, entry.key, key=_key)
        if at == len(self._queue) or self._queue[at] is not entry:
            raise ValueError(f"request {entry.id} is not queued")
        del self._queue[at]

    def _unassign(self, entry: Entry, worker: WorkerId) -> None:
        mine = self._assigned.get(worker)
        if mine is not None and mine.pop(entry.id, None) is not None and not mine:
            del self._assigned[worker]


def _key(entry: Entry) -> tuple[int, float, int]:
    return entry.key
