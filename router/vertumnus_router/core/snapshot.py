"""What operators see of the workers and of the prefixes that these hold."""

from collections.abc import Mapping
from dataclasses import dataclass

from vertumnus_router.core.effects import Cause
from vertumnus_router.core.types import (
    BlockHash,
    BreakerState,
    PoolId,
    Rank,
    RequestId,
    TransferId,
    WorkerId,
    WorkerState,
)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker at one moment.

    ``queue_s``: predicted seconds of the prefills that it still has. ``requests``: all that are
    assigned to it, in prefill or past it. ``rank_blocks``: KV blocks of each rank, in rank
    order, as far as the index knows. The worker as a whole can use ``cached_blocks``, those that
    any of its ranks holds; ``partial_blocks`` of them are not on all its ranks.
    ``rank_kv_used_tokens``: tokens in the KV pool of each rank, cached ones included;
    ``running_requests`` and ``waiting_requests``: the engine's own count at the leader, those of
    other routers included. Each as last reported, None before the first report. ``reason``: why
    it does not serve, None while it does. ``prefill_only``: it leaves the decoding to others.
    ``resting``: why it gets no requests although it serves: its ``breaker`` is not closed, or it
    answered that it has no room.
    """

    id: WorkerId
    pool: PoolId
    degree: int
    ranks: tuple[Rank, ...]
    epoch: int
    state: WorkerState
    queue_s: float
    requests: tuple[RequestId, ...]
    rank_blocks: tuple[int, ...]
    cached_blocks: int
    partial_blocks: int
    rank_kv_used_tokens: tuple[int | None, ...]
    running_requests: int | None
    waiting_requests: int | None
    reason: str | None = None
    prefill_only: bool = False
    breaker: BreakerState = BreakerState.CLOSED
    resting: str | None = None


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that requests used or missed, as of the last scan. ``tip`` is its last block.

    ``ranks`` hold that block now, as parts of ``workers``. By degree: ``accesses``, requests that
    found it, decayed; ``missed_s``, seconds of prefill that it would have saved where no worker
    holds it.
    """

    tip: BlockHash
    tokens: int
    ranks: tuple[Rank, ...]
    workers: tuple[WorkerId, ...]
    accesses: Mapping[int, float]
    missed_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class TransferSnapshot:
    """A copy (``source`` is read) or a deletion (no source) of ``blocks`` blocks at most."""

    transfer: TransferId
    cause: Cause
    source: Rank | None
    target: Rank
    tip: BlockHash
    blocks: int
    age_s: float


@dataclass(frozen=True, slots=True)
class PrefixDecision:
    """One thing that a scan decided, or could not do: then ``reason`` says why.

    ``level`` ranked it: seconds of prefill per copied block for a copy to another degree,
    accesses per replica otherwise. ``missed_s``: what the path would have saved. ``replicas``:
    workers of ``degree`` that held it. The path of ``tip`` is ``depth`` blocks long, ``blocks`` of
    it are to be copied or deleted, at most.
    """

    at_s: float
    cause: Cause
    degree: int
    tip: BlockHash
    depth: int
    level: float
    replicas: int
    missed_s: float = 0.0
    blocks: int = 0
    source: Rank | None = None
    target: Rank | None = None
    transfer: TransferId | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """How fast copies are believed to be, after ``copies`` reports."""

    latency_s: float
    bytes_per_s: float
    copies: int


@dataclass(frozen=True, slots=True)
class PrefixesSnapshot:
    """The prefix manager at one moment. ``scans`` have ended; ``scanning``: one is going on."""

    mode: str
    pull: bool
    scans: int
    scanning: bool
    hot: tuple[HotPrefix, ...]
    transfers: tuple[TransferSnapshot, ...]
    decisions: tuple[PrefixDecision, ...]
    local: LinkSnapshot
    remote: LinkSnapshot
    index_blocks: int
    index_bytes: int
