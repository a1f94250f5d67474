"""Every request from acceptance to its end: the central queue, the phases, the reservations.

A request holds a reservation exactly while it is in ``Phase.PREFILL``, may only then be the probe
of a circuit breaker, and has rooms at its decode
server, if it has one, from its dispatch until the attempt ends or is abandoned. ``_enter`` is the
only place where phases change, so it is the only place where any of this is released.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from vertumnus_router.core.breakers import Breakers
from vertumnus_router.core.decodes import Decodes
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.shares import Shares
from vertumnus_router.core.trie import PrefixMatch
from vertumnus_router.core.types import (
    BlockHash,
    DecodeId,
    PoolId,
    Rank,
    Request,
    RequestId,
    WorkerId,
)
from vertumnus_router.core.workers import Candidate


class Phase(Enum):
    QUEUED = "queued"  # in the central queue, bound to no worker
    PREFILL = "prefill"  # dispatched, no first token yet
    DECODE = "decode"  # past its prefill
    HANDED_OVER = "handed over"  # its decode server has the KV, no worker has it
    ABANDONED = (
        "abandoned"  # its worker or decode server is lost; the end of the attempt is yet to be told
    )
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Entry:
    """One live request.

    ``candidate`` is the worker that has it, which changes when a regroup puts its ``home`` into
    another block. ``tried`` are the workers that it was dispatched to, the current attempt's
    included, ``failed_at`` those that it failed at, where it began and where it was then,
    ``unreachable`` the pools whose front did not answer; ``stranded_s`` since when no serving
    worker could take it. ``decode`` is where it holds rooms, ``failed_decodes`` where it failed.
    """

    request: Request
    arrived_s: float
    sequence: int
    urgency: float
    phase: Phase = Phase.QUEUED
    candidate: Candidate | None = None
    home: Rank | None = None
    decode: DecodeId | None = None
    tried: tuple[WorkerId, ...] = ()
    failed_at: frozenset[WorkerId] = frozenset()
    unreachable: frozenset[PoolId] = frozenset()
    failed_decodes: frozenset[DecodeId] = frozenset()
    failure: str | None = None
    stranded_s: float | None = None
    #: its prefill had the worker to itself: the reported time corrects the model
    sample: bool = False
    #: the match in the index and the version of the index that it is good for
    match: PrefixMatch | None = None
    match_version: int = -1
    #: by worker, how many of its blocks unfinished prefills leave, and the ledger's version
    computing: Mapping[WorkerId, int] | None = None
    computing_version: int = -1

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def attempt(self) -> WorkerId | None:
        """What names the current attempt in events and effects; None while there is none."""
        return None if self.candidate is None else self.tried[-1]

    @property
    def key(self) -> tuple[int, float, int]:
        """Place in the queue: priority first, then the policy's urgency, then arrival."""
        return -self.request.priority, self.urgency, self.sequence

    def is_told(self, candidate: Candidate) -> bool:
        """Whether anybody would tell when its prefill ends at the candidate, before its answer
        does."""
        request, pool = self.request, candidate.pool
        return request.streams or pool.prefill_only or (request.reported and not pool.plain)

    def rules_out(self, candidate: Candidate) -> str | None:
        """Why an earlier attempt speaks against the candidate, or None."""
        if candidate.id in self.failed_at:
            return "tried before"
        if candidate.pool.pool in self.unreachable:
            return "the front of its pool could not be reached"
        return None


class RequestTable:
    """The live requests. Each method is one transition; asking for a wrong one is a bug."""

    def __init__(self, ledger: Ledger, decodes: Decodes, breakers: Breakers) -> None:
        self._ledger = ledger
        self._decodes = decodes
        self._breakers = breakers
        self._entries: dict[RequestId, Entry] = {}
        self._queue: list[Entry] = []
        self._assigned: dict[WorkerId, dict[RequestId, Entry]] = {}
        self._homed: Counter[Rank] = Counter()
        self._repeated: set[RequestId] = set()
        self._accepted = 0
        self._shares = Shares()

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

    def turns(self) -> Iterator[Entry]:
        """The queue as it is served: in its order, but the clients take turns."""
        return self._shares.turns(self._queue.copy())

    def waiting(self) -> dict[str, int]:
        """How many requests of each client are queued, as counted for their turns."""
        return self._shares.waiting()

    def ahead_of(self, entry: Entry) -> list[Entry]:
        """The queued requests that go before ``entry``, which is not queued itself."""
        place = bisect_left(self._queue, entry.key, key=_key)
        self._shares.enter(entry.request.client)
        try:
            turns = self._shares.turns([*self._queue[:place], entry, *self._queue[place:]])
            return list(takewhile(lambda other: other is not entry, turns))
        finally:
            self._shares.leave(entry.request.client)

    def surplus(self, entry: Entry) -> Entry:
        """Which queued request is one too many when ``entry`` is the last to have come: that one,
        unless another client has more of them waiting; then the last of those."""
        crowder = self._shares.crowder(entry.request.client)
        if crowder == entry.request.client:
            return entry
        theirs = (e for e in reversed(self._queue) if e.request.client == crowder and not e.tried)
        return next(theirs, entry)

    def assigned(self, worker: WorkerId) -> list[Entry]:
        """The requests that ``worker`` has, in prefill or past it."""
        return list(self._assigned.get(worker, {}).values())

    def attached(self, pool: PoolId) -> list[Entry]:
        """The requests that the workers of ``pool`` have, those whose worker is gone and whose
        home is on its way to another block included."""
        return [
            entry
            for mine in self._assigned.values()
            for entry in mine.values()
            if entry.home is not None and entry.home.pool == pool
        ]

    def homed(self, rank: Rank) -> int:
        """How many requests, in prefill or past it, have their home at ``rank``."""
        return self._homed[rank]

    @property
    def repeated(self) -> int:
        """How many requests are in a further attempt, or wait for one, before their first token."""
        return len(self._repeated)

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
        self._shares.enter(entry.request.client)

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
        home: Rank,
        service_s: float,
        uncached_tokens: int,
        blocks: tuple[BlockHash, ...],
        decode: DecodeId | None,
        now: float,
    ) -> None:
        """Out of the queue, onto the candidate, with a reservation of ``service_s`` that will
        leave ``blocks`` there, and rooms at ``decode``. ``home`` is a rank of the candidate."""
        self._enter(entry, Phase.PREFILL, now)
        entry.candidate, entry.home = candidate, home
        entry.stranded_s = None  # one could take it: another attempt has all its time again
        entry.tried += (candidate.id,)
        self._assign(entry, candidate)
        self._breakers.sent(candidate, entry.id)
        told = entry.is_told(candidate)
        self._ledger.reserve(entry.id, candidate.id, service_s, uncached_tokens, blocks, told)
        self._shares.charge(entry.request.client, uncached_tokens)
        if candidate.pool.plain or not told:
            # Nobody reports when it begins, and what has not begun does not age: let the worker
            # work through its reservations at the speed that was predicted.
            self._ledger.start(entry.id, now)
        if decode is not None:
            self._decodes.take(decode, entry.request.prompts)
            entry.decode = decode

    def start_prefill(self, entry: Entry, now: float) -> None:
        self._ledger.start(entry.id, now)

    def follow(self, entry: Entry, candidate: Candidate, scale: float, now: float) -> None:
        """The home of the request serves in ``candidate`` now, which needs ``scale`` times as
        long for what is left of the prefill."""
        self._unassign(entry)
        entry.candidate = candidate
        entry.sample = False
        self._assign(entry, candidate)
        self._ledger.move(entry.id, candidate.id, scale, now)

    def finish_prefill(self, entry: Entry, now: float) -> None:
        self._enter(entry, Phase.DECODE, now)

    def hand_over(self, entry: Entry, now: float) -> None:
        """Off its worker; its decode server goes on alone."""
        self._enter(entry, Phase.HANDED_OVER, now)

    def abandon(self, entry: Entry, now: float) -> None:
        """The worker or the decode server is lost; the request waits to hear how its attempt
        ended."""
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
            self._shares.leave(entry.request.client)
        elif entry.phase is Phase.PREFILL:
            self._breakers.left(entry.tried[-1], entry.id)
            released = self._ledger.release(entry.id, now)
            entry.sample = released is not None and released.started and not released.shared
        if phase is not Phase.DECODE:
            self._unassign(entry)
        if phase not in (Phase.DECODE, Phase.HANDED_OVER) and entry.decode is not None:
            self._decodes.give(entry.decode, entry.request.prompts)
            entry.decode = None
        if phase is Phase.QUEUED:
            entry.candidate = entry.home = None
            entry.sample = False
            insort(self._queue, entry, key=_key)
            self._shares.enter(entry.request.client)
            self._repeated.add(entry.id)
        elif phase not in (Phase.PREFILL, Phase.ABANDONED):
            self._repeated.discard(entry.id)
        entry.phase = phase

    def _unqueue(self, entry: Entry) -> None:
        at = bisect_left(self._queue, entry.key, key=_key)
        if at == len(self._queue) or self._queue[at] is not entry:
            raise ValueError(f"request {entry.id} is not queued")
        del self._queue[at]

    def _assign(self, entry: Entry, candidate: Candidate) -> None:
        self._assigned.setdefault(candidate.id, {})[entry.id] = entry
        if entry.home is not None:
            self._homed[entry.home] += 1

    def _unassign(self, entry: Entry) -> None:
        """Off its worker; no news for a request that is at none."""
        if entry.candidate is None or entry.home is None:
            return
        mine = self._assigned.get(entry.candidate.id, {})
        if mine.pop(entry.id, None) is None:
            return
        if not mine:
            del self._assigned[entry.candidate.id]
        self._homed[entry.home] -= 1
        if not self._homed[entry.home]:
            del self._homed[entry.home]


def _key(entry: Entry) -> tuple[int, float, int]:
    return entry.key
