"""The control plane as one state machine: ``on_event(event, now) -> effects``.

It owns seven things: the membership (which blocks serve), the decode servers (for pools that
prefill only), the circuit breakers (which workers rest), the prefix index (which rank holds which
KV block), the prefixes (what is copied and deleted), the request table (the queue, the phases, the
reservations and the rooms) and the prefill-time model. A policy orders the queue and says when a
request binds; a controller says when a pool splits or merges. The same events at the same times
give the same effects, live and in a replay.
"""

from collections.abc import Callable
from typing import Any

from vertumnus_router.core import refusals
from vertumnus_router.core.audit import stray_probes, violations
from vertumnus_router.core.binding import Binding
from vertumnus_router.core.breakers import Breakers
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.controller import Controller
from vertumnus_router.core.decodes import Decodes
from vertumnus_router.core.effects import (
    Abort,
    BreakerChanged,
    Decision,
    DecodeTerms,
    Effect,
    Reject,
)
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    CopyEnded,
    DecodeJoined,
    DecodeLeaving,
    DecodeLost,
    Event,
    Failure,
    HandedOver,
    IndexReset,
    Leg,
    PoolComposed,
    PoolJoined,
    PoolLeaving,
    PoolLost,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    RankReported,
    ReclaimEnded,
    ReclaimRequested,
    ReconfigureRequested,
    RegroupEnded,
    ReplicateRequested,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.fluid import FluidLanes
from vertumnus_router.core.lanes import LaneSource, WorkerLanes
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Change, Lost, Membership
from vertumnus_router.core.model import Correction, PrefillModel
from vertumnus_router.core.moves import Move, PricedMove
from vertumnus_router.core.placement import Placement, too_large
from vertumnus_router.core.policy import FluidPolicy, make_policy
from vertumnus_router.core.prefixes import Prefixes
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.regroups import Regroups
from vertumnus_router.core.requests import Entry, Phase, RequestTable
from vertumnus_router.core.snapshot import PrefixesSnapshot, WorkerSnapshot
from vertumnus_router.core.tally import Tallies
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import (
    DecodeId,
    PlanId,
    PoolId,
    Rank,
    Request,
    RequestId,
    WorkerId,
)
from vertumnus_router.core.workers import Candidate, Worker
from vertumnus_router.lattice import Block

#: So many requests may be in another attempt at a time, however few there are.
_FEW_REPEATED = 10
#: What a further attempt adds no load for: no engine has worked on this one, or it is gone.
_FREE_TO_REPEAT = (Failure.UNREACHABLE, Failure.WORKER_LOST)


class ControlPlane:
    """Feed it events in the order they happened; carry out the effects in the order given."""

    def __init__(self, config: PolicyConfig, profile: Profile) -> None:
        self._config = config
        self._model = PrefillModel(profile, config.correction)
        self._index = PrefixIndex(int(config.index_mib * 2**20), Tallies(config.prefix.decay))
        self._membership = Membership(self._model.fault, config.expected_manifest)
        self._ledger = Ledger()
        self._decodes = Decodes()
        self._breakers = Breakers(config.breaker, config.backoff, config.seed)
        self._table = RequestTable(self._ledger, self._decodes, self._breakers)
        self._prefixes = Prefixes(
            config.prefix, self._model, self._index, self._membership, self._ledger, self._table
        )
        policy = make_policy(config)
        self._placement = Placement(
            config,
            policy,
            self._model,
            self._index,
            self._membership,
            self._ledger,
            self._decodes,
            self._breakers,
            self._prefixes.transfers,
            self._prefixes.pulls,
        )
        self._regroups = Regroups(
            self._model, self._index, self._membership, self._ledger, self._table
        )
        lanes: LaneSource = WorkerLanes(policy, self._membership, self._ledger)
        if isinstance(policy, FluidPolicy):
            lanes = FluidLanes(config.fluid, policy, self._membership, self._ledger, self._regroups)
        self._binding = Binding(
            policy,
            lanes,
            self._placement,
            self._membership,
            self._table,
            self._decodes,
            self._prefixes.pulls,
            self._prefixes.statistics,
        )
        #: None when it is switched off
        self.controller: Controller | None = None
        if config.controller.mode != "off":
            self.controller = Controller(config.controller, self._model.compared_s, profile.kappa)
        # What comes several times for every request, in tables: to tell it apart one by one would
        # take as long as to take it in.
        self._index_events: dict[type, Callable[[Any], None]] = {
            BlocksStored: self._stored,
            BlocksRemoved: self._removed,
            IndexReset: self._reset,
        }
        self._request_events: dict[type, Callable[[Any, float], list[Effect]]] = {
            RequestArrived: self._arrived,
            PrefillStarted: self._prefill_started,
            PrefillFinished: self._prefill_finished,
            HandedOver: self._handed_over,
            RequestFinished: self._over,
        }
        self._now = float("-inf")
        #: how often a request went on in another worker because its home did
        self.requests_moved = 0
        #: how many failed requests got no further attempt because too many others had one
        self.retries_refused = 0

    # -- events -------------------------------------------------------------------------------

    def on_event(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at ``now`` (seconds, monotonic). ``ValueError`` if time went back,
        or if a request arrives under the id of a live one."""
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        self._now = now
        kind = type(event)
        if kind in self._index_events:
            self._index_events[kind](event)
            return []
        self._binding.observe(now)
        if kind in self._request_events:
            return self._request_events[kind](event, now)
        match event:
            case RequestFailed():
                return self._failed(event, now)
            case RequestCancelled(request_id):
                return self._cancelled(request_id, now)
            case RankReported():
                return self._changed(self._membership.report(event), now)
            case RankLost():
                return self._changed(self._membership.lose(event), now)
            case DecodeJoined():
                return self._decode_joined(event, now)
            case DecodeLost(decode, cause):
                return self._settle(self._lose_decode(decode, cause, now), now)
            case PoolJoined():
                return self._changed(self._membership.join(event), now)
            case PoolLeaving(pool, why):
                return self._changed(self._membership.retire(pool, why), now)
            case DecodeLeaving(decode, why):
                self._decodes.retire(decode, why is not None)
                return self._settle([], now)
            case PoolLost(pool, cause):
                return self._changed(self._membership.leave(pool, cause), now)
            case PoolComposed():
                self._regroups.composed(event)
                return []
            case ReconfigureRequested():
                return self._settle(self._regroups.request(event, now), now)
            case RegroupEnded():
                return self._settle(self._regroups.ended(event, now), now)
            case CopyEnded() | ReclaimEnded():
                self._prefixes.ended(event, now)
                return []
            case ReplicateRequested() | ReclaimRequested():
                return self._prefixes.asked(event, now)
            case Tick():
                effects: list[Effect] = [*self._breakers.advance(now)]
                effects += self._regroups.advance(now) + self._recompose(now)
                effects += self._expire(now) + self._binding.bind(now)
                return effects + self._prefixes.tick(now)
            case _:
                raise TypeError(f"{event!r} is no event of the control plane")

    def _stored(self, event: BlocksStored) -> None:
        slot = self._membership.slot(event.rank)
        if slot is not None:
            self._index.store(slot, event.parent, event.blocks)

    def _removed(self, event: BlocksRemoved) -> None:
        slot = self._membership.slot(event.rank)
        if slot is not None:
            self._index.remove(slot, event.blocks)

    def _reset(self, event: IndexReset) -> None:
        slot = self._membership.slot(event.rank)
        if slot is not None:
            self._index.reset(1 << slot)

    def _arrived(self, event: RequestArrived, now: float) -> list[Effect]:
        request = event.request
        pools = self._membership.pools
        if not pools:
            return [refusals.no_pool(request)]
        if all(too_large(request, pool) is not None for pool in pools):
            return [refusals.too_large(request, pools)]
        entry = self._binding.draft(request, now)
        self._table.admit(entry)
        if self.controller is not None:
            work = self._placement.least_work(entry)
            self.controller.arrived(self._membership.ladder, request.input_tokens, *work, now)
        effects = self._binding.bind(now, drafted=entry)
        if entry.phase is Phase.QUEUED:
            if self._table.queued > self._config.queue_limit:
                surplus = self._table.surplus(entry)
                self._table.end(surplus, now)
                wait_s = self._placement.least_queue_s(now)
                effects.append(
                    refusals.queue_full(surplus.request, self._config.queue_limit, wait_s)
                )
                if surplus is entry:
                    return effects
            self._binding.mark_stranded(entry, now)
        return effects

    def _recompose(self, now: float) -> list[Effect]:
        """Let the controller judge, and command what it may."""
        if self.controller is None:
            return []
        verdict = self.controller.tick(
            now,
            lambda: [
                self._regroups.view(pool, now)
                for pool in self._membership.pools
                if not self._membership.is_leaving(pool.pool)
            ],
        )
        if verdict is None:
            return []
        if verdict.command is None:
            return [verdict]
        plan, move = PlanId(f"controller-{verdict.window}"), verdict.command
        order = ReconfigureRequested(plan, move.pool, move.move.after)
        return [verdict, *self._regroups.request(order, now)]

    def _prefill_started(self, event: PrefillStarted, now: float) -> list[Effect]:
        entry = self._attempt(event.request_id, event.worker, event.attempt)
        if entry is not None and entry.phase is Phase.PREFILL:
            self._table.start_prefill(entry, now)
        return []

    def _prefill_finished(self, event: PrefillFinished, now: float) -> list[Effect]:
        entry = self._attempt(event.request_id, event.worker, event.attempt)
        if entry is None or entry.phase in (Phase.QUEUED, Phase.ABANDONED):
            return []
        ended = entry.phase is Phase.PREFILL
        news = self._answered(entry)
        if ended:
            self._table.finish_prefill(entry, now)
        self._learn(entry, event)
        return [*news, *self._binding.bind(now)] if ended else []

    def _handed_over(self, event: HandedOver, now: float) -> list[Effect]:
        entry = self._attempt(event.request_id, event.worker, event.attempt)
        if entry is None or entry.phase not in (Phase.PREFILL, Phase.DECODE):
            return []
        news = self._answered(entry)
        self._table.hand_over(entry, now)
        return [*news, *self._binding.bind(now)]

    def _answered(self, entry: Entry) -> list[BreakerChanged]:
        """The end of a prefill speaks for its worker."""
        if entry.phase is not Phase.PREFILL or entry.candidate is None:
            return []
        return self._breakers.succeeded(entry.candidate, entry.id)

    def _learn(self, entry: Entry, event: PrefillFinished) -> None:
        """Correct the model by a prefill whose time and tokens are its own."""
        cached, compute_s = event.cached_tokens, event.compute_s
        if cached is None or compute_s is None or entry.candidate is None:
            return
        if entry.sample and entry.request.exact:
            uncached = entry.request.input_tokens - cached
            self._model.observe(entry.candidate.degree, uncached, cached, compute_s)
        entry.sample = False  # one report, one sample

    def _over(self, event: RequestFinished, now: float) -> list[Effect]:
        entry = self._table.get(event.request_id)
        if entry is None or entry.phase is Phase.QUEUED:
            return []  # an attempt that nobody waits for any more
        news = self._answered(entry)
        self._table.end(entry, now)
        return [*news, *self._binding.bind(now)]

    def _cancelled(self, request_id: RequestId, now: float) -> list[Effect]:
        entry = self._table.get(request_id)
        if entry is None:
            return []
        aborts: list[Effect] = []
        if entry.candidate is not None and entry.phase is not Phase.ABANDONED:
            aborts.append(_abort(entry, entry.candidate.pool.pool))
        self._table.end(entry, now)
        return aborts + self._binding.bind(now)

    def _failed(self, event: RequestFailed, now: float) -> list[Effect]:
        entry = self._table.get(event.request_id)
        if entry is None or entry.candidate is None:
            return []
        if event.worker is not None and event.worker != entry.attempt:
            return []
        if event.attempt is not None and event.attempt != len(entry.tried):
            return []
        entry.failure = event.cause
        news: list[Effect] = []
        if event.leg is Leg.DECODE:
            self._blame_decode(entry, event.failure)
        else:
            news += self._blame_worker(entry, entry.candidate, event, now)
        if not self._may_retry(entry, event):
            self._table.end(entry, now)
            return [*news, refusals.failed(entry, event), *self._binding.bind(now)]
        if not self._within_budget(entry, event.failure):
            self.retries_refused += 1
            self._table.end(entry, now)
            reject = refusals.failed(entry, event, over_budget=True)
            return [*news, reject, *self._binding.bind(now)]
        self._table.requeue(entry, now)
        effects = self._binding.bind(now)
        if entry.phase is Phase.QUEUED:
            self._binding.mark_stranded(entry, now)
        return news + effects

    def _blame_worker(
        self, entry: Entry, candidate: Candidate, event: RequestFailed, now: float
    ) -> list[BreakerChanged]:
        """Not here again with this request; and with others only if this was an exception."""
        entry.failed_at |= {candidate.id, entry.tried[-1]}
        match event.failure:
            case Failure.OVERLOADED:
                self._breakers.pressed(candidate, event.retry_after_s, now)
            case Failure.CLIENT_ERROR | Failure.WORKER_LOST:
                pass  # no fault of the worker's, or one that is known already
            case _:
                if event.failure is Failure.UNREACHABLE:
                    entry.unreachable |= {candidate.pool.pool}
                answered = entry.phase in (Phase.DECODE, Phase.HANDED_OVER)
                return self._breakers.failed(
                    candidate, entry.id, event.cause, now, answered=answered
                )
        return []

    def _blame_decode(self, entry: Entry, failure: Failure) -> None:
        """Prefer another decode server next time. One whose connections break is most likely
        gone: nobody is sent there until that is known."""
        if entry.decode is None:
            return  # lost, and blamed when that was told
        entry.failed_decodes |= {entry.decode}
        if failure in (Failure.UNREACHABLE, Failure.DISCONNECTED):
            self._decodes.doubt(entry.decode)

    def _may_retry(self, entry: Entry, event: RequestFailed) -> bool:
        if event.streamed or event.failure is Failure.CLIENT_ERROR:
            return False
        return len(entry.tried) < self._config.attempts and not self._binding.exhausted(entry)

    def _within_budget(self, entry: Entry, failure: Failure) -> bool:
        """Whether few enough requests are in another attempt. When everything fails, repeating
        everything would be as much load again."""
        if failure in _FREE_TO_REPEAT:
            return True
        others = self._table.repeated - (len(entry.tried) > 1)
        return others < max(_FEW_REPEATED, self._config.retry_budget * len(self._table))

    def _decode_joined(self, event: DecodeJoined, now: float) -> list[Effect]:
        effects: list[Effect] = []
        life = self._decodes.life(event.decode)
        if life is not None and life != event.life:
            effects = self._lose_decode(event.decode, "it was started again", now)
        self._decodes.join(event)
        return self._settle(effects, now)

    def _lose_decode(self, decode: DecodeId, cause: str, now: float) -> list[Effect]:
        """Give up every attempt that has rooms there."""
        effects: list[Effect] = []
        for entry in [e for e in self._table.entries() if e.decode == decode]:
            entry.failure = cause
            entry.failed_decodes |= {decode}
            assert entry.candidate is not None
            self._table.abandon(entry, now)
            effects.append(_abort(entry, entry.candidate.pool.pool, Leg.DECODE))
        self._decodes.remove(decode)
        return effects

    def _changed(self, change: Change, now: float) -> list[Effect]:
        if change.void:
            self._index.reset(sum(1 << slot for slot in change.void))
        self._prefixes.follow()
        effects: list[Effect] = []
        if change.pool is not None:
            for entry in self._table.attached(change.pool):
                effects += self._follow(entry, change.left, now)
            if change.left is not None:
                self._breakers.forget(change.pool)
                effects += self._regroups.leave(change.pool, change.left, now)
        return self._settle(effects + self._regroups.advance(now), now)

    def _settle(self, effects: list[Effect], now: float) -> list[Effect]:
        """Let the queue follow a change of what serves."""
        effects += self._binding.bind(now)
        for entry in self._table.queue():
            self._binding.mark_stranded(entry, now)
        return effects

    def _follow(self, entry: Entry, left: str | None, now: float) -> list[Effect]:
        """Keep the request with its home, or give the attempt up if that is lost."""
        home, candidate = entry.home, entry.candidate
        assert home is not None and candidate is not None
        fate = Lost(left) if left is not None else self._membership.fate(home, candidate)
        match fate:
            case Lost(cause):
                entry.failure = cause
                self._table.abandon(entry, now)
                return [_abort(entry, home.pool)]
            case Worker() if fate.id != candidate.id:
                self._table.follow(entry, fate.candidate, self._rescaled(entry, fate), now)
                self.requests_moved += 1
        return []

    def _rescaled(self, entry: Entry, worker: Worker) -> float:
        """How much longer the request's prefill takes at ``worker`` than where it was."""
        reservation = self._ledger.get(entry.id)
        if reservation is None or entry.candidate is None:
            return 1.0
        uncached = reservation.uncached_tokens
        cached = max(0, entry.request.input_tokens - uncached)
        before_s = self._model.service_s(entry.candidate.degree, uncached, cached)
        return self._model.service_s(worker.candidate.degree, uncached, cached) / before_s

    def _expire(self, now: float) -> list[Effect]:
        """End the requests that no serving worker could take for too long."""
        effects: list[Effect] = []
        for entry in self._table.queue():
            self._binding.mark_stranded(entry, now)
            since_s = entry.stranded_s
            if since_s is not None and now - since_s >= self._config.queue_timeout_s:
                self._table.end(entry, now)
                effects.append(self._stranded(entry))
        return effects

    def _stranded(self, entry: Entry) -> Reject:
        wait_s = self._config.queue_timeout_s
        serving = self._membership.serving
        if serving and not self._decodes.usable and all(c.pool.prefill_only for c in serving):
            return refusals.no_decode(entry, wait_s)
        return refusals.no_worker(entry, wait_s)

    def _attempt(
        self, request_id: RequestId, worker: WorkerId, attempt: int | None
    ) -> Entry | None:
        """The request, if its current attempt is the one dispatched to ``worker``."""
        entry = self._table.get(request_id)
        if entry is None or entry.attempt != worker:
            return None
        return entry if attempt in (None, len(entry.tried)) else None

    # -- queries, which never change anything ----------------------------------------------------

    def explain(self, request: Request, now: float) -> Decision:
        """What placement would do with ``request`` at ``now``, behind the queue as it stands."""
        return self._binding.explain(request, now)

    def workers(self, now: float) -> tuple[WorkerSnapshot, ...]:
        """Every worker and would-be worker, by pool and rank."""
        return tuple(self._snapshot(worker, now) for worker in self._membership.workers)

    def _snapshot(self, worker: Worker, now: float) -> WorkerSnapshot:
        pool, block = worker.candidate.pool.pool, worker.candidate.block
        ranks = tuple(Rank(pool, index) for index in block.ranks)
        reports = map(self._membership.last_report, ranks)
        leader = self._membership.last_report(Rank(pool, block.leader))
        return WorkerSnapshot(
            id=worker.id,
            pool=pool,
            degree=block.degree,
            ranks=ranks,
            epoch=worker.epoch,
            state=worker.state,
            queue_s=self._ledger.queue_s(worker.id, now),
            requests=tuple(entry.id for entry in self._table.assigned(worker.id)),
            rank_blocks=tuple(map(self._blocks_held, ranks)),
            cached_blocks=self._index.usable_blocks(worker.candidate.ranks),
            partial_blocks=self._index.partial_blocks(worker.candidate.ranks),
            rank_kv_used_tokens=tuple(None if r is None else r.kv_used_tokens for r in reports),
            running_requests=None if leader is None else leader.running_requests,
            waiting_requests=None if leader is None else leader.waiting_requests,
            reason=worker.reason,
            prefill_only=worker.candidate.pool.prefill_only,
            breaker=self._breakers.state(worker.candidate),
            resting=self._breakers.refusal(worker.candidate),
        )

    def _blocks_held(self, rank: Rank) -> int:
        slot = self._membership.slot(rank)
        return 0 if slot is None else self._index.blocks_held(slot)

    def is_ready(self) -> bool:
        """Whether a worker serves, or will after the move that a pool is in the middle of."""
        return bool(self._membership.serving) or any(
            self._regroups.moving(pool.pool) is not None for pool in self._membership.pools
        )

    @property
    def lacks_decode(self) -> bool:
        """Whether there are pools that prefill only, and no decode server for them that stays."""
        stay = any(not terms.leaving for terms in self._decodes.terms())
        return not stay and any(p.prefill_only for p in self._membership.pools)

    def requests_at(self, pool: PoolId) -> int:
        """How many requests the workers of a pool have."""
        return len(self._table.attached(pool))

    def rooms_at(self, decode: DecodeId) -> int:
        """How many prompts a decode server has."""
        return sum(terms.rooms for terms in self._decodes.terms() if terms.decode == decode)

    def decodes(self) -> tuple[DecodeTerms, ...]:
        """Every live decode server."""
        return self._decodes.terms()

    @property
    def pools(self) -> tuple[PoolJoined, ...]:
        """The pools that have joined."""
        return self._membership.pools

    def epoch(self, pool: PoolId) -> int:
        """The latest epoch that a living rank of the pool reports. The pool must have joined."""
        return self._membership.epoch(pool)

    def moving(self, pool: PoolId) -> Move | None:
        """The move that this router has commanded and whose end is yet to show."""
        return self._regroups.moving(pool)

    def composition(self, pool: PoolId) -> tuple[Block, ...] | None:
        """The blocks of a pool, failed ones included; None while they are not known."""
        joined = self._membership.pool(pool)
        return None if joined is None else self._regroups.composition(joined)

    def plan(self, pool: PoolId, target: tuple[Block, ...], now: float) -> tuple[PricedMove, ...]:
        """The moves that a ``ReconfigureRequested`` would make. Raises ``RegroupRefused``."""
        return self._regroups.plan(pool, target, now)

    @property
    def pending_count(self) -> int:
        """Accepted requests that have not ended, queued or assigned."""
        return len(self._table)

    @property
    def queued_count(self) -> int:
        """Requests in the central queue."""
        return self._table.queued

    @property
    def breakers_opened(self) -> int:
        """How often a circuit breaker opened."""
        return self._breakers.opened

    @property
    def breakers_overridden(self) -> int:
        """How often a request went to a worker whose breaker was open, for want of another."""
        return self._breakers.overridden

    @property
    def index_nodes(self) -> int:
        """Nodes of the prefix index, within ``config.index_mib``."""
        return len(self._index)

    @property
    def scanning(self) -> bool:
        """A scan of the index is in progress, which goes on with each ``Tick``: have one about
        every 10 ms."""
        return self._prefixes.scanning

    def prefixes(self, now: float) -> PrefixesSnapshot:
        """What the prefix manager knows, has decided and has in flight."""
        return self._prefixes.snapshot(now)

    @property
    def index_forgotten(self) -> int:
        """Cached blocks that the prefix index has given up since it was full."""
        return self._index.forgotten

    def corrections(self) -> dict[int, Correction]:
        """By degree: how far reported prefill times are from the profile."""
        return self._model.corrections()

    def violations(self) -> list[str]:
        """Every broken invariant of the state, for tests; empty when all hold."""
        found = violations(self._table, self._ledger, self._membership, self._decodes)
        found += stray_probes(self._table, self._breakers)
        return found + self._prefixes.violations()


def _abort(entry: Entry, pool: PoolId, leg: Leg = Leg.PREFILL) -> Abort:
    assert entry.attempt is not None
    return Abort(entry.id, pool, entry.attempt, len(entry.tried), leg)
