"""From what the ranks of a pool last reported to the workers that they make up.

A pure function: the same reports and the same workers of a moment ago always give the same
workers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vertumnus_router.core.events import PoolJoined, RankReported
from vertumnus_router.core.types import WorkerId, WorkerState, worker_id
from vertumnus_router.lattice import Block

#: Dead lives remembered per rank; a report cannot be late by more restarts than this.
REMEMBERED_DEATHS = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block of ranks that a request could run on.

    ``ranks`` is its mask of rank slots, ``lives`` are the incarnations of its ranks in rank
    order; another life is another worker of the same id.
    """

    id: WorkerId
    block: Block
    ranks: int
    lives: tuple[str, ...]
    pool: PoolJoined

    @property
    def degree(self) -> int:
        return self.block.degree


class Candidates:
    """Blocks that a request could run on, in order, and columns of what is asked about all of
    them for every request. ``kinds`` numbers the different (degree, tokens of a KV block)."""

    __slots__ = (
        "at_slot",
        "at_worker",
        "each",
        "ids",
        "kind_of",
        "kinds",
        "paired",
        "pools",
        "ranks",
        "ranks_by_block",
        "room_tokens",
    )

    def __init__(self, each: tuple[Candidate, ...]) -> None:
        self.each = each
        self.ids = tuple(candidate.id for candidate in each)
        self.ranks = tuple(candidate.ranks for candidate in each)
        self.at_worker = {candidate.id: at for at, candidate in enumerate(each)}
        #: by slot of a rank, the first that has it
        self.at_slot: dict[int, int] = {}
        for at, ranks in enumerate(self.ranks):
            for slot in slots(ranks):
                self.at_slot.setdefault(slot, at)
        kinds = [(candidate.degree, candidate.pool.block_tokens) for candidate in each]
        self.kinds = tuple(dict.fromkeys(kinds))
        self.kind_of = tuple(map(self.kinds.index, kinds))
        #: all ranks whose KV blocks have so many tokens, masks
        self.ranks_by_block: dict[int, int] = {}
        for candidate in each:
            block_tokens = candidate.pool.block_tokens
            self.ranks_by_block[block_tokens] = (
                self.ranks_by_block.get(block_tokens, 0) | candidate.ranks
            )
        self.pools = tuple({candidate.pool.pool: candidate.pool for candidate in each}.values())
        #: whether some of them need a decode server
        self.paired = any(pool.prefill_only for pool in self.pools)
        #: a request of so many tokens fits each of them
        self.room_tokens = min(
            (min(pool.context_tokens, pool.kv_capacity_tokens) for pool in self.pools), default=0
        )

    def __len__(self) -> int:
        return len(self.each)


def slots(ranks: int) -> Iterator[int]:
    """The slots in a mask of ranks, ascending."""
    while ranks:
        lowest = ranks & -ranks
        yield lowest.bit_length() - 1
        ranks ^= lowest


@dataclass(frozen=True, slots=True)
class Worker:
    """A block that serves, or would: then ``reason`` says what keeps it from serving."""

    candidate: Candidate
    epoch: int
    state: WorkerState
    reason: str | None = None

    @property
    def id(self) -> WorkerId:
        return self.candidate.id

    @property
    def serving(self) -> bool:
        return self.state is WorkerState.SERVING

    @property
    def formed(self) -> bool:
        """Whether it works: all its ranks agree on it and live."""
        return self.state in (WorkerState.SERVING, WorkerState.DRAINING)


@dataclass(slots=True)
class RankRecord:
    """What is known of one rank: its slot in masks, the last report of its current life, why it
    is out while it is, and the lives that are over."""

    slot: int
    report: RankReported | None = None
    lost: str | None = None
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_DEATHS))


@dataclass(frozen=True, slots=True)
class Drain:
    """These blocks take no new requests, in epochs before ``until`` (None: for now)."""

    blocks: frozenset[Block] = frozenset()
    reason: str = ""
    until: int | None = None

    def holds(self, block: Block, epoch: int) -> bool:
        return block in self.blocks and (self.until is None or epoch < self.until)


NO_DRAIN = Drain()


@dataclass(frozen=True, slots=True)
class Rules:
    """What a block must meet to serve.

    ``degree_fault`` says why a degree cannot be priced (None: it can). With
    ``expected_manifest`` every rank must report that one; without it, the ranks of a pool must
    agree, and where they differ the pool's own description decides.
    """

    degree_fault: Callable[[int], str | None]
    expected_manifest: str | None = None


def derive_workers(
    pool: PoolJoined,
    ranks: Sequence[RankRecord],
    before: Mapping[WorkerId, Worker],
    rules: Rules,
    drain: Drain = NO_DRAIN,
    leaving: str | None = None,
) -> Iterator[Worker]:
    """The workers and would-be workers of a pool, in rank order. ``leaving`` is why the whole pool
    drains, if it does."""
    claims: dict[Block, list[RankReported]] = {}
    for rank in ranks:
        if rank.report is not None:
            claims.setdefault(rank.report.block, []).append(rank.report)
    for block, claimants in sorted(claims.items()):
        epoch = max(report.epoch for report in claimants)
        rivals = _rivals(block, ranks)
        if any(rival.epoch > epoch for rival in rivals):
            continue  # its ranks have begun to move on
        name = worker_id(pool.pool, block)
        members = [ranks[index] for index in block.ranks if index < len(ranks)]
        lives = tuple(rank.report.incarnation for rank in members if rank.report is not None)
        old = before.get(name)
        state, reason = WorkerState.SERVING, None
        if (refusal := _refusal(pool, ranks, block, claimants, rules)) is not None:
            state, reason = WorkerState.REFUSED, refusal
        elif (loss := _loss(block, members)) is not None:
            state, reason = WorkerState.LOST, loss
        elif (dissent := _dissent(block, epoch, members, rivals)) is not None:
            state, reason = WorkerState.FORMING, dissent
        elif len(epochs := {report.epoch for report in claimants}) > 1:
            # A new epoch of the pool that leaves this block as it is reaches its ranks one
            # heartbeat apart: a worker outlives that, a new one waits for it.
            if old is not None and old.formed and old.candidate.lives == lives:
                epoch = old.epoch
            else:
                state = WorkerState.FORMING
                reason = f"its ranks report epochs {', '.join(map(str, sorted(epochs)))}"
        if state is WorkerState.SERVING and drain.holds(block, epoch):
            state, reason = WorkerState.DRAINING, drain.reason
        if state is WorkerState.SERVING and leaving is not None:
            state, reason = WorkerState.DRAINING, leaving
        mask = sum(1 << rank.slot for rank in members)
        yield Worker(Candidate(name, block, mask, lives, pool), epoch, state, reason)


def _rivals(block: Block, ranks: Sequence[RankRecord]) -> list[RankReported]:
    """The living ranks' claims to other blocks that share a rank with this one."""
    return [
        rank.report
        for rank in ranks
        if rank.report is not None
        and rank.lost is None
        and rank.report.block != block
        and (rank.report.block.first in block or block.first in rank.report.block)
    ]


def _refusal(
    pool: PoolJoined,
    ranks: Sequence[RankRecord],
    block: Block,
    claimants: Sequence[RankReported],
    rules: Rules,
) -> str | None:
    """Why the block can never serve as it is, or None."""
    if block.first + block.degree > pool.size:
        return f"block {_name(block)} reaches beyond the pool of {pool.size} rank(s)"
    for report in claimants:
        if report.rank.index not in block:
            return f"rank {report.rank.index} claims this block and is not part of it"
    if block.degree not in pool.degrees:
        ladder = ", ".join(map(str, pool.degrees))
        return f"degree {block.degree} is none of the pool's degrees ({ladder})"
    fault = rules.degree_fault(block.degree)
    if fault is not None:
        return fault
    if pool.plain:
        return None
    expected, whose = rules.expected_manifest, "this router expects"
    if expected is None:
        live = {rank.report.manifest for rank in ranks if rank.report and rank.lost is None}
        if len(live) <= 1:
            return None
        expected, whose = pool.manifest, "its pool describes"
    for report in claimants:
        if report.manifest != expected:
            return (
                f"rank {report.rank.index} runs patches {report.manifest!r}, {whose} "
                f"{expected!r}: launch the pool with the same sgl-vertumnus"
            )
    return None


def _loss(block: Block, members: Sequence[RankRecord]) -> str | None:
    for index, rank in zip(block.ranks, members, strict=True):
        if rank.lost is not None:
            return f"rank {index}: {rank.lost}"
    return None


def _dissent(
    block: Block, epoch: int, members: Sequence[RankRecord], rivals: Sequence[RankReported]
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
