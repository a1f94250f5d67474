"""Which ranks live, which blocks serve: derived from what the ranks last reported.

A block becomes a worker once all its ranks, each in its current life, report the same epoch
and the same block. Nothing is remembered but reports, deaths and the workers of a moment ago,
so the same reports always give the same workers.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from vertumnus_router.core.events import PoolJoined, RankLost, RankReported
from vertumnus_router.core.types import PoolId, Rank, WorkerId, WorkerState, worker_id
from vertumnus_router.lattice import Block

#: Dead lives remembered per rank; a report cannot be late by more restarts than this.
REMEMBERED_DEATHS = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block of ranks that a request could run on. ``ranks`` is its mask of rank slots."""

    id: WorkerId
    block: Block
    ranks: int
    pool: PoolJoined

    @property
    def degree(self) -> int:
        return self.block.degree


@dataclass(frozen=True, slots=True)
class Worker:
    """A block that serves, or would: then ``reason`` says what keeps it from serving.

    ``lives`` are the incarnations of its ranks; another life is another worker of the same id.
    """

    candidate: Candidate
    epoch: int
    lives: tuple[str, ...]
    state: WorkerState
    reason: str | None = None

    @property
    def id(self) -> WorkerId:
        return self.candidate.id

    @property
    def serving(self) -> bool:
        return self.state is WorkerState.SERVING


@dataclass(frozen=True, slots=True)
class Change:
    """What one event did: workers that serve no more, with the cause, and rank slots whose
    index is void."""

    lost: tuple[tuple[Worker, str], ...] = ()
    void: tuple[int, ...] = ()


NO_CHANGE = Change()


@dataclass(slots=True)
class _Rank:
    slot: int
    report: RankReported | None = None  # the last one of the current life
    lost: str | None = None  # why it is out, while it is
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_DEATHS))


@dataclass(slots=True)
class _Pool:
    joined: PoolJoined
    ranks: list[_Rank]
    workers: dict[WorkerId, Worker] = field(default_factory=dict)


class Membership:
    """The pools, their ranks and the workers that these make up.

    ``degree_fault`` says why a degree cannot be priced (None: it can). With
    ``expected_manifest`` every rank must report that one; without it, the ranks of a pool must
    agree, and where they differ the pool's own description decides.
    """

    def __init__(
        self,
        degree_fault: Callable[[int], str | None],
        expected_manifest: str | None = None,
    ) -> None:
        self._degree_fault = degree_fault
        self._expected_manifest = expected_manifest
        self._pools: dict[PoolId, _Pool] = {}
        self._free_slots: list[int] = []
        self._slots = 0
        self._workers: dict[WorkerId, Worker] = {}
        self._serving: tuple[Candidate, ...] = ()
        self._serving_ranks = 0
        self._least_degree: int | None = None

    @property
    def least_degree(self) -> int | None:
        """C_min: the smallest degree that a pool supports and the profile covers.

        It depends on the pools alone, so prices do not jump when the composition changes.
        """
        return self._least_degree

    @property
    def serving_ranks(self) -> int:
        """How many ranks take requests."""
        return self._serving_ranks

    @property
    def serving(self) -> tuple[Candidate, ...]:
        """The committed blocks: every worker that takes requests."""
        return self._serving

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker and would-be worker, by pool and rank."""
        return tuple(self._workers.values())

    @property
    def pools(self) -> tuple[PoolJoined, ...]:
        return tuple(pool.joined for pool in self._pools.values())

    def worker(self, worker: WorkerId) -> Worker | None:
        return self._workers.get(worker)

    def slot(self, rank: Rank) -> int | None:
        """The rank's bit in masks, None for a rank of no known pool."""
        pool = self._pools.get(rank.pool)
        if pool is None or not 0 <= rank.index < len(pool.ranks):
            return None
        return pool.ranks[rank.index].slot

    def join(self, joined: PoolJoined) -> Change:
        """A pool described itself. A description of another shape replaces the pool."""
        known = self._pools.get(joined.pool)
        if known is not None and known.joined == joined:
            return NO_CHANGE
        left = NO_CHANGE if known is None else self.leave(joined.pool, "the pool was relaunched")
        ranks = [_Rank(self._take_slot()) for _ in range(joined.size)]
        self._pools[joined.pool] = _Pool(joined, ranks)
        self._publish()
        return left

    def leave(self, pool: PoolId, cause: str) -> Change:
        gone = self._pools.pop(pool, None)
        if gone is None:
            return NO_CHANGE
        void = tuple(rank.slot for rank in gone.ranks)
        self._free_slots = sorted((*self._free_slots, *void), reverse=True)
        self._publish()
        lost = tuple((w, cause) for w in gone.workers.values() if w.serving)
        return Change(lost, void)

    def report(self, report: RankReported) -> Change:
        """Take in a heartbeat; one of a dead life or an old epoch is ignored."""
        pool, rank = self._find(report.rank)
        if pool is None or rank is None or report.incarnation in rank.dead:
            return NO_CHANGE
        before = rank.report
        void: tuple[int, ...] = ()
        if before is not None:
            if before.incarnation != report.incarnation:
                rank.dead.append(before.incarnation)
                void = (rank.slot,)
            elif report.epoch < before.epoch:
                return NO_CHANGE
        same = before is not None and rank.lost is None and _claim(before) == _claim(report)
        rank.report, rank.lost = report, None
        return NO_CHANGE if same else self._derive(pool, void)

    def lose(self, event: RankLost) -> Change:
        """A rank died (its life is named) or fell silent (it is not)."""
        pool, rank = self._find(event.rank)
        if pool is None or rank is None:
            return NO_CHANGE
        life = rank.report.incarnation if rank.report is not None else None
        if event.incarnation is not None and event.incarnation not in rank.dead:
            rank.dead.append(event.incarnation)
        if life is None or event.incarnation not in (None, life):
            return NO_CHANGE
        rank.lost = event.cause
        return self._derive(pool, () if event.incarnation is None else (rank.slot,))

    def _find(self, rank: Rank) -> tuple[_Pool, _Rank] | tuple[None, None]:
        pool = self._pools.get(rank.pool)
        if pool is None or not 0 <= rank.index < len(pool.ranks):
            return None, None
        return pool, pool.ranks[rank.index]

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._slots += 1
        return self._slots - 1

    def _derive(self, pool: _Pool, void: tuple[int, ...]) -> Change:
        before = pool.workers
        pool.workers = {worker.id: worker for worker in self._workers_of(pool)}
        self._publish()
        lost = []
        for old in before.values():
            if not old.serving:
                continue
            new = pool.workers.get(old.id)
            if new is None:
                lost.append((old, "its ranks moved to another composition"))
            elif not new.serving:
                lost.append((old, new.reason or new.state.value))
            elif new.lives != old.lives:
                lost.append((old, "a rank of it was restarted"))
        return Change(tuple(lost), void)

    def _publish(self) -> None:
        self._workers = {w.id: w for pool in self._pools.values() for w in pool.workers.values()}
        self._serving = tuple(w.candidate for w in self._workers.values() if w.serving)
        self._serving_ranks = sum(candidate.degree for candidate in self._serving)
        self._least_degree = min(
            (d for pool in self.pools for d in pool.degrees if self._degree_fault(d) is None),
            default=None,
        )

    def _workers_of(self, pool: _Pool) -> Iterator[Worker]:
        claims: dict[Block, list[RankReported]] = {}
        for rank in pool.ranks:
            if rank.report is not None:
                claims.setdefault(rank.report.block, []).append(rank.report)
        for block in sorted(claims):
            epoch = max(report.epoch for report in claims[block])
            rivals = [
                rank.report
                for rank in pool.ranks
                if rank.report is not None
                and rank.lost is None
                and rank.report.block != block
                and (rank.report.block.first in block or block.first in rank.report.block)
            ]
            if any(rival.epoch > epoch for rival in rivals):
                continue  # the ranks have begun to move on
            yield self._worker(pool, block, epoch, rivals)

    def _worker(self, pool: _Pool, block: Block, epoch: int, rivals: list[RankReported]) -> Worker:
        name = worker_id(pool.joined.pool, block)
        members = [pool.ranks[index] for index in block.ranks if index < len(pool.ranks)]
        reports = [rank.report for rank in members if rank.report is not None]
        worker = Worker(
            candidate=Candidate(name, block, sum(1 << rank.slot for rank in members), pool.joined),
            epoch=epoch,
            lives=tuple(report.incarnation for report in reports),
            state=WorkerState.SERVING,
        )
        refusal = self._refusal(pool, block, reports)
        if refusal is not None:
            return replace(worker, state=WorkerState.REFUSED, reason=refusal)
        for index, rank in zip(block.ranks, members, strict=True):
            if rank.lost is not None:
                reason = f"rank {index}: {rank.lost}"
                return replace(worker, state=WorkerState.LOST, reason=reason)
        dissent = _dissent(block, epoch, members, rivals)
        if dissent is not None:
            return replace(worker, state=WorkerState.FORMING, reason=dissent)
        epochs = {report.epoch for report in reports}
        if len(epochs) > 1:
            # A new epoch of the pool that leaves this block as it is reaches its ranks one
            # heartbeat apart: a worker outlives that, a new one waits for it.
            old = pool.workers.get(name)
            if old is None or not old.serving or old.lives != worker.lives:
                reason = f"its ranks report epochs {', '.join(map(str, sorted(epochs)))}"
                return replace(worker, state=WorkerState.FORMING, reason=reason)
            return replace(worker, epoch=old.epoch)
        return worker

    def _refusal(self, pool: _Pool, block: Block, reports: list[RankReported]) -> str | None:
        """Why the block can never serve as it is, or None."""
        joined = pool.joined
        if block.first + block.degree > joined.size:
            return f"ranks {block.ranks} reach beyond the pool of {joined.size} rank(s)"
        for report in reports:
            if report.block == block and report.rank.index not in block:
                return f"rank {report.rank.index} claims a block that it is not part of"
        if block.degree not in joined.degrees:
            ladder = ", ".join(map(str, joined.degrees))
            return f"degree {block.degree} is none of the pool's degrees ({ladder})"
        fault = self._degree_fault(block.degree)
        if fault is not None:
            return fault
        for report in reports:
            fault = self._manifest_fault(pool, report)
            if fault is not None:
                return fault
        return None

    def _manifest_fault(self, pool: _Pool, report: RankReported) -> str | None:
        expected, whose = self._expected_manifest, "this router expects"
        if expected is None:
            live = {r.report.manifest for r in pool.ranks if r.report and r.lost is None}
            if len(live) <= 1:
                return None
            expected, whose = pool.joined.manifest, "its pool describes"
        if report.manifest == expected:
            return None
        return (
            f"rank {report.rank.index} runs patches {report.manifest!r}, {whose} {expected!r}: "
            f"launch the pool with the same sgl-vertumnus"
        )


def _claim(report: RankReported) -> tuple[str, int, Block, str]:
    return report.incarnation, report.epoch, report.block, report.manifest


def _dissent(
    block: Block, epoch: int, members: list[_Rank], rivals: list[RankReported]
) -> str | None:
    for index, rank in zip(block.ranks, members, strict=True):
        if rank.report is None:
            return f"rank {index} has not reported yet"
        if rank.report.block != block:
            return f"rank {index} still reports block {_name(rank.report.block)}"
    for rival in rivals:
        if rival.epoch == epoch:
            return f"rank {rival.rank.index} claims block {_name(rival.block)} in the same epoch"
    return None


def _name(block: Block) -> str:
    return f"{block.first}x{block.degree}"
