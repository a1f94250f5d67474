"""Which pools, ranks and workers there are, and which rank slot is whose."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vertumnus_router.core.effects import Life
from vertumnus_router.core.events import PoolJoined, RankLost, RankReported
from vertumnus_router.core.types import PoolId, Rank, WorkerId, WorkerState, worker_id
from vertumnus_router.core.workers import (
    NO_DRAIN,
    Candidate,
    Candidates,
    Drain,
    RankRecord,
    Rules,
    Worker,
    derive_workers,
)
from vertumnus_router.lattice import Block, lattice


@dataclass(frozen=True, slots=True)
class Change:
    """What one event did: the pool whose workers may differ now, and rank slots whose index is
    void. ``left`` is why all that the pool was is gone, None unless it is."""

    pool: PoolId | None = None
    void: tuple[int, ...] = ()
    left: str | None = None


NO_CHANGE = Change()


@dataclass(frozen=True, slots=True)
class Peer:
    """A living rank that can copy prefixes from others of the same ``geometry``. ``slot`` is its
    bit in masks, ``worker`` the block that it says it is in."""

    life: Life
    slot: int
    worker: WorkerId
    pool: PoolJoined

    @property
    def rank(self) -> Rank:
        return self.life.rank

    @property
    def geometry(self) -> tuple[int, int]:
        return geometry(self.pool)


def geometry(pool: PoolJoined) -> tuple[int, int]:
    """What must be the same for KV to be copied as it is: tokens of a block, bytes of a token."""
    return pool.block_tokens, pool.kv_token_bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """An attempt cannot go on where it is."""

    cause: str


@dataclass(slots=True)
class _Pool:
    joined: PoolJoined
    ranks: list[RankRecord]
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    drain: Drain = NO_DRAIN
    leaving: str | None = None
    peers: tuple[Peer, ...] = ()
    #: its part of the lattice; None until somebody asks
    lattice: tuple[Candidate, ...] | None = None


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
        self._out: tuple[Worker, ...] = ()
        self._serving: tuple[Candidate, ...] = ()
        self._candidates: Candidates | None = None
        self._draining: tuple[Candidate, ...] = ()
        self._serving_ranks = 0
        self._ladder: tuple[int, ...] = ()
        self._joined: tuple[PoolJoined, ...] = ()
        self._peers: dict[int, Peer] = {}
        self._alike: dict[tuple[int, int], int] = {}
        self._peers_of: dict[PoolId, int] = {}
        self._lattice = Candidates(())
        self._lattice_keys: tuple[tuple[Candidate, ...], ...] = ()
        self._lattice_is_new = True

    @property
    def serving(self) -> tuple[Candidate, ...]:
        """The committed blocks: every worker that takes requests."""
        return self._serving

    @property
    def candidates(self) -> Candidates:
        """The same in columns. Another object after every change."""
        if self._candidates is None:
            self._candidates = Candidates(self._serving)
        return self._candidates

    @property
    def out(self) -> tuple[Worker, ...]:
        """The workers that do not serve."""
        return self._out

    @property
    def draining(self) -> tuple[Candidate, ...]:
        """The workers that are about to end in a move."""
        return self._draining

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The ranks that can copy prefixes, by slot. Another object after every change."""
        return self._peers

    @property
    def alike(self) -> Mapping[tuple[int, int], int]:
        """The same ranks by geometry, masks: those that can copy from each other."""
        return self._alike

    @property
    def peers_of(self) -> Mapping[PoolId, int]:
        """The same ranks by pool, masks."""
        return self._peers_of

    @property
    def serving_ranks(self) -> int:
        """How many ranks take requests."""
        return self._serving_ranks

    @property
    def ladder(self) -> tuple[int, ...]:
        """The degrees that a pool supports and the profile covers, ascending.

        They depend on the pools alone, so prices do not jump when the composition changes.
        """
        return self._ladder

    @property
    def least_degree(self) -> int | None:
        """C_min, the first of the ladder."""
        return self._ladder[0] if self._ladder else None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker and would-be worker, by pool and rank."""
        return self._workers

    @property
    def pools(self) -> tuple[PoolJoined, ...]:
        return self._joined

    def is_leaving(self, name: PoolId) -> bool:
        """Whether the pool takes no new requests, since it is about to leave."""
        known = self._pools.get(name)
        return known is not None and known.leaving is not None

    def pool(self, name: PoolId) -> PoolJoined | None:
        known = self._pools.get(name)
        return None if known is None else known.joined

    def workers_of(self, name: PoolId) -> tuple[Worker, ...]:
        """Every worker and would-be worker of one pool, in rank order."""
        known = self._pools.get(name)
        return () if known is None else tuple(known.workers.values())

    def epoch(self, name: PoolId) -> int:
        """The latest epoch that a living rank of the pool reports."""
        known = self._pools[name]
        reports = (rank.report for rank in known.ranks if rank.lost is None)
        return max((report.epoch for report in reports if report is not None), default=0)

    def mask(self, name: PoolId, block: Block) -> int:
        """The rank slots of a block of the pool, whether it serves or not."""
        known = self._pools[name]
        return sum(1 << known.ranks[index].slot for index in block.ranks)

    @property
    def lattice(self) -> Candidates:
        """Every block that could serve, small degrees first in each pool: of a pool that can be
        moved (``movable``) all blocks of living ranks, of any other those that work. The same
        object as long as that is so, however a pool that can be moved is composed."""
        if not self._lattice_is_new:
            for pool in self._pools.values():
                if pool.lattice is None:
                    pool.lattice = self._possible(pool)
            keys = tuple(pool.lattice or () for pool in self._pools.values())
            if keys != self._lattice_keys:
                self._lattice_keys = keys
                self._lattice = Candidates(tuple(c for each in keys for c in each))
            self._lattice_is_new = True
        return self._lattice

    def movable(self, joined: PoolJoined) -> bool:
        """Whether the pool may be moved for a request. One that decodes as well is left as it is,
        since a merge would interrupt all its streams; and moves go through all its degrees."""
        return joined.prefill_only and set(joined.degrees) <= set(self._ladder)

    def _possible(self, pool: _Pool) -> tuple[Candidate, ...]:
        joined = pool.joined
        if pool.leaving is not None:
            return ()
        if not self.movable(joined):
            return tuple(w.candidate for w in pool.workers.values() if w.formed)
        lost = {
            rank
            for worker in pool.workers.values()
            if worker.state in (WorkerState.LOST, WorkerState.REFUSED)
            for rank in worker.candidate.block.ranks
        }
        lives = {
            rank: record.report.incarnation
            for rank, record in enumerate(pool.ranks)
            if record.report is not None and record.lost is None and rank not in lost
        }
        return tuple(
            Candidate(
                worker_id(joined.pool, block),
                block,
                sum(1 << pool.ranks[rank].slot for rank in block.ranks),
                tuple(lives[rank] for rank in block.ranks),
                joined,
            )
            for block in lattice(joined.size, joined.degrees)
            if lives.keys() >= set(block.ranks)
        )

    def degree_fault(self, degree: int) -> str | None:
        """Why blocks of that degree cannot serve, or None."""
        return self._rules.degree_fault(degree)

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
        return Change(pool, void, left=cause)

    def retire(self, pool: PoolId, cause: str | None) -> Change:
        """The pool takes no new requests from now on; with None it does again."""
        known = self._pools.get(pool)
        if known is None or known.leaving == cause:
            return NO_CHANGE
        known.leaving = cause
        return self._derive(pool, ())

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

    def drain(self, name: PoolId, blocks: Iterable[Block], reason: str) -> None:
        """These blocks of the pool, and no others of it, take no new requests from now on."""
        self._drain(name, Drain(frozenset(blocks), reason))

    def end_drain(self, name: PoolId, until: int | None = None) -> None:
        """They serve again: in the epoch ``until`` and later ones, or, with None, as they are."""
        if name in self._pools:
            drain = self._pools[name].drain
            self._drain(name, NO_DRAIN if until is None else replace(drain, until=until))

    def _drain(self, name: PoolId, drain: Drain) -> None:
        self._pools[name].drain = drain
        self._derive(name, ())

    def fate(self, home: Rank, candidate: Candidate) -> Worker | Lost | None:
        """What became of an attempt at ``candidate`` whose home is ``home``: the worker that has
        it now, its loss, or None while the ranks are on their way to another composition.

        A rank that is in its old block goes down with any other rank of that block; one that has
        moved has left them behind.
        """
        pool, record = self._pools.get(home.pool), self._record(home)
        if pool is None or record is None or record.report is None:
            return Lost("its pool has left")
        here = record.report.block
        for index, life in zip(candidate.block.ranks, candidate.lives, strict=True):
            rank = pool.ranks[index]
            if rank is not record and here != candidate.block:
                continue
            if rank.lost is not None:
                return Lost(f"rank {index}: {rank.lost}")
            if rank.report is None or rank.report.incarnation != life:
                return Lost(f"rank {index} was restarted")
        worker = pool.workers.get(worker_id(home.pool, here))
        if worker is None:
            return None
        if worker.state in (WorkerState.LOST, WorkerState.REFUSED):
            return Lost(worker.reason or worker.state.value)
        return worker if worker.formed else None

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
        derived = derive_workers(
            pool.joined, pool.ranks, pool.workers, self._rules, pool.drain, pool.leaving
        )
        pool.workers = {worker.id: worker for worker in derived}
        pool.peers = tuple(_find_peers(pool))
        pool.lattice = None
        self._publish()
        return Change(name, void)

    def _publish(self) -> None:
        self._workers = tuple(w for pool in self._pools.values() for w in pool.workers.values())
        self._out = tuple(w for w in self._workers if not w.serving)
        self._serving = tuple(w.candidate for w in self._workers if w.serving)
        self._candidates = None
        self._joined = tuple(pool.joined for pool in self._pools.values())
        draining = (w.candidate for w in self._workers if w.state is WorkerState.DRAINING)
        self._draining = tuple(c for c in draining if not self.is_leaving(c.pool.pool))
        self._serving_ranks = sum(candidate.degree for candidate in self.serving)
        degrees = {degree for pool in self.pools for degree in pool.degrees}
        priced = (degree for degree in degrees if self._rules.degree_fault(degree) is None)
        self._ladder = tuple(sorted(priced))
        self._peers = {p.slot: p for pool in self._pools.values() for p in pool.peers}
        self._lattice_is_new = False
        self._alike, self._peers_of = {}, {}
        for name, pool in self._pools.items():
            ranks, alike = sum(1 << peer.slot for peer in pool.peers), geometry(pool.joined)
            self._peers_of[name] = ranks
            if ranks:
                self._alike[alike] = self._alike.get(alike, 0) | ranks


def _find_peers(pool: _Pool) -> Iterator[Peer]:
    """The ranks of a pool that can copy prefixes."""
    if not pool.joined.kv_token_bytes:
        return
    for record in pool.ranks:
        report = record.report
        if report is None or record.lost is not None:
            continue
        worker = worker_id(pool.joined.pool, report.block)
        known = pool.workers.get(worker)
        if known is None or known.state not in (WorkerState.LOST, WorkerState.REFUSED):
            yield Peer(Life(report.rank, report.incarnation), record.slot, worker, pool.joined)


def _claim(report: RankReported) -> tuple[object, ...]:
    """What of a heartbeat makes workers; the rest is load."""
    return report.incarnation, report.epoch, report.block, report.manifest
