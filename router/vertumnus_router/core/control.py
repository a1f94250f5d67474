"""The control plane as one state machine: ``on_event(event, now) -> effects``.

It owns four things: the membership (which blocks serve), the prefix index (which rank holds
which KV block), the request table (the queue, the phases and the reservations) and the
prefill-time model. A policy orders the queue and says when a request binds. The same events at
the same times give the same effects, live and in a replay.
"""

from collections.abc import Callable

from vertumnus_router.core import refusals
from vertumnus_router.core.binding import Binding
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.effects import Abort, Decision, Effect
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    Failure,
    IndexReset,
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
from vertumnus_router.core.membership import Change, Membership
from vertumnus_router.core.model import Correction, PrefillModel
from vertumnus_router.core.placement import Placement, too_large
from vertumnus_router.core.policy import make_policy
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.requests import Entry, Phase, RequestTable
from vertumnus_router.core.snapshot import WorkerSnapshot
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import Rank, Request, RequestId, WorkerId
from vertumnus_router.core.workers import Candidate, Worker


class ControlPlane:
    """Feed it events in the order they happened; carry out the effects in the order given."""

    def __init__(self, config: PolicyConfig, profile: Profile) -> None:
        self._config = config
        self._model = PrefillModel(profile, config.correction)
        self._index = PrefixIndex(config.index_nodes)
        self._membership = Membership(self._model.fault, config.expected_manifest)
        self._ledger = Ledger()
        self._table = RequestTable(self._ledger)
        policy = make_policy(config)
        self._binding = Binding(
            policy,
            Placement(config, policy, self._model, self._index, self._membership, self._ledger),
            self._membership,
            self._ledger,
            self._table,
        )
        self._now = float("-inf")

    # -- events -------------------------------------------------------------------------------

    def on_event(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at ``now`` (seconds, monotonic). ``ValueError`` if time went back,
        or if a request arrives under the id of a live one."""
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        self._now = now
        match event:
            case BlocksStored(rank, parent, blocks):
                self._with_slot(rank, lambda slot: self._index.store(slot, parent, blocks))
                return []
            case BlocksRemoved(rank, blocks):
                self._with_slot(rank, lambda slot: self._index.remove(slot, blocks))
                return []
            case IndexReset(rank):
                self._with_slot(rank, self._index.reset)
                return []
        self._binding.observe(now)
        match event:
            case RequestArrived(request):
                return self._arrived(request, now)
            case PrefillStarted():
                return self._prefill_started(event, now)
            case PrefillFinished():
                return self._prefill_finished(event, now)
            case RequestFinished(request_id):
                return self._over(request_id, now)
            case RequestFailed():
                return self._failed(event, now)
            case RequestCancelled(request_id):
                return self._cancelled(request_id, now)
            case RankReported():
                return self._changed(self._membership.report(event), now)
            case RankLost():
                return self._changed(self._membership.lose(event), now)
            case PoolJoined():
                return self._changed(self._membership.join(event), now)
            case PoolLost(pool, cause):
                return self._changed(self._membership.leave(pool, cause), now)
            case Tick():
                return self._expire(now) + self._binding.bind(now)

    def _arrived(self, request: Request, now: float) -> list[Effect]:
        pools = self._membership.pools
        if not pools:
            return [refusals.no_pool(request)]
        if all(too_large(request, pool) is not None for pool in pools):
            return [refusals.too_large(request, pools)]
        entry = self._binding.draft(request, now)
        self._table.admit(entry)
        effects = self._binding.bind(now)
        if entry.phase is Phase.QUEUED:
            if self._table.queued > self._config.queue_limit:
                self._table.end(entry, now)
                return [*effects, refusals.queue_full(request, self._config.queue_limit)]
            self._binding.mark_stranded(entry, now)
        return effects

    def _prefill_started(self, event: PrefillStarted, now: float) -> list[Effect]:
        entry = self._attempt(event.request_id, event.worker)
        if entry is not None and entry.phase is Phase.PREFILL:
            self._table.start_prefill(entry, now)
        return []

    def _prefill_finished(self, event: PrefillFinished, now: float) -> list[Effect]:
        entry = self._attempt(event.request_id, event.worker)
        if entry is None or entry.phase not in (Phase.PREFILL, Phase.DECODE):
            return []
        ended = entry.phase is Phase.PREFILL
        if ended:
            self._table.finish_prefill(entry, now)
        self._learn(entry, event)
        return self._binding.bind(now) if ended else []

    def _learn(self, entry: Entry, event: PrefillFinished) -> None:
        """Correct the model by a prefill whose time and tokens are its own."""
        cached, compute_s = event.cached_tokens, event.compute_s
        if cached is None or compute_s is None or entry.candidate is None:
            return
        if entry.sample and entry.request.exact:
            uncached = entry.request.input_tokens - cached
            self._model.observe(entry.candidate.degree, uncached, cached, compute_s)
        entry.sample = False  # one report, one sample

    def _over(self, request_id: RequestId, now: float) -> list[Effect]:
        entry = self._table.get(request_id)
        if entry is None or entry.phase is Phase.QUEUED:
            return []  # an attempt that nobody waits for any more
        self._table.end(entry, now)
        return self._binding.bind(now)

    def _cancelled(self, request_id: RequestId, now: float) -> list[Effect]:
        entry = self._table.get(request_id)
        if entry is None:
            return []
        aborts: list[Effect] = []
        if entry.candidate is not None and entry.phase is not Phase.ABANDONED:
            aborts.append(_abort(entry, entry.candidate))
        self._table.end(entry, now)
        return aborts + self._binding.bind(now)

    def _failed(self, event: RequestFailed, now: float) -> list[Effect]:
        entry = self._table.get(event.request_id)
        if entry is None or entry.candidate is None:
            return []
        if event.worker is not None and event.worker != entry.candidate.id:
            return []
        entry.failure = event.cause
        if event.failure is Failure.UNREACHABLE:
            entry.unreachable |= {entry.candidate.pool.pool}
        if not self._may_retry(entry, event):
            self._table.end(entry, now)
            return [refusals.failed(entry, event), *self._binding.bind(now)]
        self._table.requeue(entry, now)
        effects = self._binding.bind(now)
        if entry.phase is Phase.QUEUED:
            self._binding.mark_stranded(entry, now)
        return effects

    def _may_retry(self, entry: Entry, event: RequestFailed) -> bool:
        if event.streamed or event.failure is Failure.CLIENT_ERROR:
            return False
        return len(entry.tried) < self._config.attempts and not self._binding.exhausted(entry)

    def _changed(self, change: Change, now: float) -> list[Effect]:
        for slot in change.void:
            self._index.reset(slot)
        effects: list[Effect] = []
        for worker, cause in change.lost:
            for entry in self._table.assigned(worker.id):
                entry.failure = cause
                effects.append(_abort(entry, worker.candidate))
                self._table.abandon(entry, now)
        effects += self._binding.bind(now)
        for entry in self._table.queue():
            self._binding.mark_stranded(entry, now)
        return effects

    def _expire(self, now: float) -> list[Effect]:
        """End the requests that no serving worker could take for too long."""
        effects: list[Effect] = []
        for entry in self._table.queue():
            self._binding.mark_stranded(entry, now)
            since_s = entry.stranded_s
            if since_s is not None and now - since_s >= self._config.queue_timeout_s:
                self._table.end(entry, now)
                effects.append(refusals.no_worker(entry, self._config.queue_timeout_s))
        return effects

    def _attempt(self, request_id: RequestId, worker: WorkerId) -> Entry | None:
        """The request, if its current attempt is the one at ``worker``."""
        entry = self._table.get(request_id)
        if entry is None or entry.candidate is None or entry.candidate.id != worker:
            return None
        return entry

    def _with_slot(self, rank: Rank, act: Callable[[int], None]) -> None:
        slot = self._membership.slot(rank)
        if slot is not None:
            act(slot)

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
            rank_kv_used_tokens=tuple(None if r is None else r.kv_used_tokens for r in reports),
            running_requests=None if leader is None else leader.running_requests,
            waiting_requests=None if leader is None else leader.waiting_requests,
            reason=worker.reason,
        )

    def _blocks_held(self, rank: Rank) -> int:
        slot = self._membership.slot(rank)
        return 0 if slot is None else self._index.blocks_held(slot)

    def is_ready(self) -> bool:
        """Whether a worker serves."""
        return bool(self._membership.serving)

    @property
    def pending_count(self) -> int:
        """Accepted requests that have not ended, queued or assigned."""
        return len(self._table)

    @property
    def queued_count(self) -> int:
        """Requests in the central queue."""
        return self._table.queued

    @property
    def index_nodes(self) -> int:
        """Nodes of the prefix index, at most ``config.index_nodes``."""
        return len(self._index)

    @property
    def index_forgotten(self) -> int:
        """Cached blocks that the prefix index has given up since it was full."""
        return self._index.forgotten

    def corrections(self) -> dict[int, Correction]:
        """By degree: how far reported prefill times are from the profile."""
        return self._model.corrections()

    def violations(self) -> list[str]:
        """Every broken invariant of the state, for tests; empty when all hold."""
        found = []
        live = {worker.id for worker in self._membership.workers if worker.serving}
        for worker, reserved_s in self._ledger.reserved_s().items():
            if worker not in live:
                found.append(f"{worker} does not serve and has {reserved_s} s reserved")
        for entry in self._table.entries():
            if (entry.phase is Phase.PREFILL) != (entry.id in self._ledger):
                found.append(
                    f"{entry.id} is {entry.phase.value}, reserved: {entry.id in self._ledger}"
                )
            if len(set(entry.tried)) != len(entry.tried):
                found.append(f"{entry.id} was sent to one worker twice: {entry.tried}")
        if not len(self._table) and len(self._ledger):
            found.append(f"no request is live and {len(self._ledger)} reservation(s) remain")
        return found


def _abort(entry: Entry, candidate: Candidate) -> Abort:
    return Abort(entry.id, candidate.pool.pool, candidate.id)
