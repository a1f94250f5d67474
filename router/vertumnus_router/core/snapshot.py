"""What operators see of the workers."""

from dataclasses import dataclass

from vertumnus_router.core.types import PoolId, Rank, RequestId, WorkerId, WorkerState


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker at one moment.

    ``queue_s``: predicted seconds of the prefills that it still has. ``requests``: all that are
    assigned to it, in prefill or past it. ``rank_blocks``: KV blocks of each rank, in rank
    order, as far as the index knows; the worker as a whole can hit ``cached_blocks`` at most.
    ``rank_kv_used_tokens``: tokens in the KV pool of each rank, cached ones included;
    ``running_requests`` and ``waiting_requests``: the engine's own count at the leader, those of
    other routers included. Each as last reported, None before the first report. ``reason``: why
    it does not serve, None while it does.
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
    rank_kv_used_tokens: tuple[int | None, ...]
    running_requests: int | None
    waiting_requests: int | None
    reason: str | None = None

    @property
    def cached_blocks(self) -> int:
        return min(self.rank_blocks, default=0)
