"""The mechanics that all baselines share: a router that the simulator drives like a control plane.

It binds early, as the routers do that it stands for: a request goes to the worker that its rule
picks as soon as one can take it, and waits for nothing but a worker, or a room at a decode server.
It never changes the composition, and copies and deletes no prefixes.
"""

from collections.abc import Callable

from vertumnus_router.core import refusals
from vertumnus_router.core.audit import violations
from vertumnus_router.core.breakers import Breakers
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.decodes import Decodes
from vertumnus_router.core.effects import (
    Abort,
    Effect,
)
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    DecodeJoined,
    DecodeLost,
    Event,
    Failure,
    HandedOver,
    IndexReset,
    Leg,
    PoolJoined,
    PoolLost,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    RankReported,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Change, Lost, Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.placement import too_large
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.requests import Entry, Phase, RequestTable
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import DecodeId, Rank, Request, RequestId, WorkerId

from vertumnus_sim.baselines.binding import EarlyBinding
from vertumnus_sim.baselines.rule import Rule

#: What does not depend on the policy is as the control plane has it.
_SHARED = PolicyConfig()


class BaselineRouter:
    """``on_event(event, now) -> effects`` with a ``Rule``: events and effects mean what they mean
    to ``ControlPlane``. What asks for a change of the composition or of caches is ignored.

    A ``Decision`` has the one candidate that was picked, with what the core's model and ledger
    predict for it: the rule may have gone by something else.
    """

    def __init__(self, rule: Rule, profile: Profile) -> None:
        self.rule = rule
        self._model = PrefillModel(profile, _SHARED.correction)
        self._index = PrefixIndex(int(_SHARED.index_mib * 2**20))
        self._membership = Membership(self._model.fault)
        self._ledger = Ledger()
        self._decodes = Decodes()
        breakers = Breakers(_SHARED.breaker, _SHARED.backoff, _SHARED.seed)
        self._table = RequestTable(self._ledger, self._decodes, breakers)
        self._binding = EarlyBinding(
            rule,
            self._model,
            self._index,
            self._membership,
            self._ledger,
            self._decodes,
            self._table,
        )
        self._lives: dict[WorkerId, tuple[str, ...]] = {}
        self._now = float("-inf")

    def on_event(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at ``now`` (seconds, monotonic). ``ValueError`` if time went back,
        or if a request arrives under the id of a live one."""
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        self._now = now
        match event:
            case BlocksStored(rank, parent, blocks):
                self._with_slot(rank, lambda slot: self._index.store(slot, parent, blocks))
            case BlocksRemoved(rank, blocks):
                self._with_slot(rank, lambda slot: self._index.remove(slot, blocks))
            case IndexReset(rank):
                self._with_slot(rank, lambda slot: self._index.reset(1 << slot))
            case RequestArrived(request):
                return self._arrived(request, now)
            case PrefillStarted():
                entry = self._attempt(event.request_id, event.worker, event.attempt)
                if entry is not None and entry.phase is Phase.PREFILL:
                    self._table.start_prefill(entry, now)
            case PrefillFinished():
                self._prefill_finished(event, now)
            case HandedOver():
                entry = self._attempt(event.request_id, event.worker, event.attempt)
                if entry is not None and entry.phase in (Phase.PREFILL, Phase.DECODE):
                    self._table.hand_over(entry, now)
                    self.rule.freed(entry.id)
            case RequestFinished(request_id):
                entry = self._table.get(request_id)
                if entry is not None and entry.phase is not Phase.QUEUED:
                    return self._end(entry, now)
            case RequestFailed():
                return self._failed(event, now)
            case RequestCancelled(request_id):
                return self._cancelled(request_id, now)
            case PoolJoined():
                return self._changed(self._membership.join(event), now)
            case PoolLost(pool, cause):
                return self._changed(self._membership.leave(pool, cause), now)
            case RankReported():
                return self._changed(self._membership.report(event), now)
            case RankLost():
                return self._changed(self._membership.lose(event), now)
            case DecodeJoined():
                return self._decode_joined(event, now)
            case DecodeLost(decode, cause):
                return self._lose_decode(decode, cause, now) + self._binding.bind(now)
            case Tick():
                return self._expire(now)
        return []

    # -- requests -------------------------------------------------------------------------------

    def _arrived(self, request: Request, now: float) -> list[Effect]:
        pools = self._membership.pools
        if pools and all(too_large(request, pool) is not None for pool in pools):
            return [refusals.too_large(request, pools)]
        self._table.admit(self._table.draft(request, now, now))
        return self._binding.bind(now)

    def _expire(self, now: float) -> list[Effect]:
        """End the requests that no serving worker could take for too long."""
        effects: list[Effect] = []
        for entry in self._table.queue():
            if self._binding.takers(entry):
                entry.stranded_s = None
            elif entry.stranded_s is None:
                entry.stranded_s = now
            elif now - entry.stranded_s >= _SHARED.queue_timeout_s:
                effects.append(refusals.no_worker(entry, _SHARED.queue_timeout_s))
                effects += self._end(entry, now)
        return effects

    def _prefill_finished(self, event: PrefillFinished, now: float) -> None:
        entry = self._attempt(event.request_id, event.worker, event.attempt)
        if entry is None or entry.phase in (Phase.QUEUED, Phase.ABANDONED):
            return
        if entry.phase is Phase.PREFILL:
            self._table.finish_prefill(entry, now)
        cached, compute_s = event.cached_tokens, event.compute_s
        if cached is None or compute_s is None or entry.candidate is None:
            return
        if entry.sample and entry.request.exact:
            uncached = entry.request.input_tokens - cached
            self._model.observe(entry.candidate.degree, uncached, cached, compute_s)
        entry.sample = False  # one report, one sample

    def _failed(self, event: RequestFailed, now: float) -> list[Effect]:
        entry = self._table.get(event.request_id)
        if entry is None or entry.candidate is None:
            return []
        if event.worker is not None and event.worker != entry.attempt:
            return []
        if event.attempt is not None and event.attempt != len(entry.tried):
            return []
        entry.failure = event.cause
        if event.leg is Leg.DECODE:
            if entry.decode is not None:
                entry.failed_decodes |= {entry.decode}
        else:
            entry.failed_at |= {entry.candidate.id}
        retry = not event.streamed and event.failure is not Failure.CLIENT_ERROR
        if not retry or len(entry.tried) >= _SHARED.attempts or not self._binding.takers(entry):
            return [refusals.failed(entry, event), *self._end(entry, now)]
        self._table.requeue(entry, now)
        self.rule.freed(entry.id)
        return self._binding.bind(now)

    def _cancelled(self, request_id: RequestId, now: float) -> list[Effect]:
        entry = self._table.get(request_id)
        if entry is None:
            return []
        stop: list[Effect] = []
        if entry.candidate is not None and entry.phase is not Phase.ABANDONED:
            stop.append(_abort(entry))
        return stop + self._end(entry, now)

    def _end(self, entry: Entry, now: float) -> list[Effect]:
        self._table.end(entry, now)
        self.rule.freed(entry.id)
        return self._binding.bind(now)

    def _abandon(self, entry: Entry, cause: str, now: float, leg: Leg) -> Effect:
        """Give up an attempt that is lost; its ``RequestFailed`` is to follow."""
        entry.failure = cause
        self._table.abandon(entry, now)
        self.rule.freed(entry.id)
        return _abort(entry, leg)

    def _attempt(
        self, request_id: RequestId, worker: WorkerId, attempt: int | None
    ) -> Entry | None:
        """The request, if its current attempt is the one dispatched to ``worker``."""
        entry = self._table.get(request_id)
        if entry is None or entry.attempt != worker:
            return None
        return entry if attempt in (None, len(entry.tried)) else None

    # -- workers and decode servers -------------------------------------------------------------

    def _changed(self, change: Change, now: float) -> list[Effect]:
        if change.void:
            self._index.reset(sum(1 << slot for slot in change.void))
        if change.pool is None:
            return self._binding.bind(now)
        self._tell_who_left()
        effects: list[Effect] = []
        for entry in self._table.attached(change.pool):
            assert entry.home is not None and entry.candidate is not None
            # Nobody commands a regroup, so a home that lives is where it was.
            fate = (
                self._membership.fate(entry.home, entry.candidate)
                if change.left is None
                else Lost(change.left)
            )
            if isinstance(fate, Lost):
                effects.append(self._abandon(entry, fate.cause, now, Leg.PREFILL))
        return effects + self._binding.bind(now)

    def _tell_who_left(self) -> None:
        lives = {candidate.id: candidate.lives for candidate in self._membership.serving}
        for worker, life in self._lives.items():
            if lives.get(worker) != life:
                self.rule.left(worker)
        self._lives = lives

    def _decode_joined(self, event: DecodeJoined, now: float) -> list[Effect]:
        effects: list[Effect] = []
        life = self._decodes.life(event.decode)
        if life is not None and life != event.life:
            effects = self._lose_decode(event.decode, "it was started again", now)
        self._decodes.join(event)
        return effects + self._binding.bind(now)

    def _lose_decode(self, decode: DecodeId, cause: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for entry in [e for e in self._table.entries() if e.decode == decode]:
            entry.failed_decodes |= {decode}
            effects.append(self._abandon(entry, cause, now, Leg.DECODE))
        self._decodes.remove(decode)
        return effects

    def _with_slot(self, rank: Rank, act: Callable[[int], None]) -> None:
        slot = self._membership.slot(rank)
        if slot is not None:
            act(slot)

    # -- queries, which never change anything ---------------------------------------------------

    @property
    def pending_count(self) -> int:
        """Accepted requests that have not ended, queued or assigned."""
        return len(self._table)

    @property
    def queued_count(self) -> int:
        """Requests that wait for a worker, or for a room at a decode server."""
        return self._table.queued

    @property
    def reserved_count(self) -> int:
        """Reservations of prefills that have not ended."""
        return len(self._ledger)

    @property
    def scanning(self) -> bool:
        """It never scans."""
        return False

    def violations(self) -> list[str]:
        """Every broken invariant of the state, for tests; empty when all hold."""
        return violations(self._table, self._ledger, self._membership, self._decodes)


def _abort(entry: Entry, leg: Leg = Leg.PREFILL) -> Abort:
    assert entry.attempt is not None and entry.candidate is not None
    pool = entry.candidate.pool.pool
    return Abort(entry.id, pool, entry.attempt, len(entry.tried), leg)
