"""Which pools, ranks and workers there are, and which rank slot is whose."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vertumnus_router.core.events import PoolJoined, RankLost, RankReported
from vertumnus_router.core.types import PoolId, Rank, WorkerId
from vertumnus_router.core.workers import Candidate, RankRecord, Rules, Worker, derive_workers


@dataclass(frozen=True, slots=True)
class Change:
    """What one event did: workers that serve no more, with the cause, and rank slots whose
    index is void."""

    lost: tuple[tuple[Worker, str], ...] = ()
    void: tuple[int, ...] = ()


NO_CHANGE = Change()


@dataclass(slots=True)
class _Pool:
    joined: PoolJoined
    ranks: list[RankRecord]
    workers: dict[WorkerId, Worker] = field(default_factory=dict)


class Membership:
    """The pools, their ranks and the workers that these make up; see ``Rules`` for the terms."""

    def __init__(
        self,
        degree_fault: Callable[[int], str | None],
        expected_manifest: str | None = None,
    ) -> None:
        self._rules = Rules(degree_fault, expected_manifest)
        self._pools: dict[PoolId, _Pool] = {}
        self._free_slots: list[int] = []  # descending
        self._slots = 0
        self._workers: tuple[Worker, ...] = ()
        self._serving: tuple[Candidate, ...] = ()
        self._serving_ranks = 0
        self._least_degree: int | None = None

    @property
    def serving(self) -> tuple[Candidate, ...]:
        """The committed blocks: every worker that takes requests."""
        return self._serving

    @property
    def serving_ranks(self) -> int:
        """How many ranks take requests."""
        return self._serving_ranks

    @property
    def least_degree(self) -> int | None:
        """C_min: the smallest degree that a pool supports and the profile covers.

        It depends on the pools alone, so prices do not jump when the composition changes.
        """
        return self._least_degree

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker and would-be worker, by pool and rank."""
        return self._workers

    @property
    def pools(self) -> tuple[PoolJoined, ...]:
        return tuple(pool.joined for pool in self._pools.values())

    def slot(self, rank: Rank) -> int | None:
        """The rank's bit in masks, None for a rank of no known pool."""
        record = self._record(rank)
        return None if record is None else record.slot

    def last_report(self, rank: Rank) -> RankReported | None:
        """What the rank last said of itself, None before its first report."""
        record = self._record(rank)
        return None if record is None else record.report

    def join(self, joined: PoolJoined) -> Change:
        """A pool described itself. Another description than before replaces the pool."""
        known = self._pools.get(joined.pool)
        if known is not None and known.joined == joined:
            return NO_CHANGE
        left = NO_CHANGE if known is None else self.leave(joined.pool, "the pool was relaunched")
        ranks = [RankRecord(self._take_slot()) for _ in range(joined.size)]
        self._pools[joined.pool] = _Pool(joined, ranks)
        self._publish()
        return left

    def leave(self, pool: PoolId, cause: str) -> Change:
        """The pool is gone, and every worker of it."""
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
        record = self._record(report.rank)
        if record is None or report.incarnation in record.dead:
            return NO_CHANGE
        before = record.report
        void: tuple[int, ...] = ()
        if before is not None:
            if before.incarnation != report.incarnation:
                record.dead.append(before.incarnation)
                void = (record.slot,)
            elif report.epoch < before.epoch:
                return NO_CHANGE
        news = before is None or record.lost is not None or _claim(before) != _claim(report)
        record.report, record.lost = report, None
        return self._derive(report.rank.pool, void) if news else NO_CHANGE

    def lose(self, event: RankLost) -> Change:
        """A rank died (its life is named) or fell silent (it is not)."""
        record = self._record(event.rank)
        if record is None:
            return NO_CHANGE
        life = None if record.report is None else record.report.incarnation
        died = event.incarnation is not None
        if event.incarnation is not None and event.incarnation not in record.dead:
            record.dead.append(event.incarnation)
        if life is None or (died and event.incarnation != life):
            return NO_CHANGE
        record.lost = event.cause
        return self._derive(event.rank.pool, (record.slot,) if died else ())

    def _record(self, rank: Rank) -> RankRecord | None:
        pool = self._pools.get(rank.pool)
        if pool is None or not 0 <= rank.index < len(pool.ranks):
            return None
        return pool.ranks[rank.index]

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._slots += 1
        return self._slots - 1

    def _derive(self, name: PoolId, void: tuple[int, ...]) -> Change:
        pool = self._pools[name]
        before = pool.workers
        derived = derive_workers(pool.joined, pool.ranks, before, self._rules)
        pool.workers = {worker.id: worker for worker in derived}
        self._publish()
        lost = []
        for old in before.values():
            cause = _loss(old, pool.workers.get(old.id))
            if cause is not None:
                lost.append((old, cause))
        return Change(tuple(lost), void)

    def _publish(self) -> None:
        self._workers = tuple(w for pool in self._pools.values() for w in pool.workers.values())
        self._serving = tuple(w.candidate for w in self._workers if w.serving)
        self._serving_ranks = sum(candidate.degree for candidate in self._serving)
        degrees = {degree for pool in self.pools for degree in pool.degrees}
        priced = (degree for degree in degrees if self._rules.degree_fault(degree) is None)
        self._least_degree = min(priced, default=None)


def _claim(report: RankReported) -> tuple[object, ...]:
    """What of a heartbeat makes workers; the rest is load."""
    return report.incarnation, report.epoch, report.block, report.manifest


def _loss(old: Worker, new: Worker | None) -> str | None:
    """Why ``old`` serves no more, None if it goes on or did not serve."""
    if not old.serving:
        return None
    if new is None:
        return "its ranks moved to another composition"
    if not new.serving:
        return new.reason or new.state.value
    return None if new.lives == old.lives else "a rank of it was restarted"
