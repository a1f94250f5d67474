"""What operators see of the workers."""

from dataclasses import dataclass

from vertumnus_router.core.types import PoolId, Rank, RequestId, WorkerId, WorkerState


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker at one moment.

    ``queue_s``: predicted seconds of the prefills that it still has. ``requests``: all that are
    assigned to it, in prefill or past it. ``rank_blocks``: KV blocks of each rank, in rank
    order, as far as the index knows; the worker as a whole can hit ``cached_blocks`` at most.
    ``reason``: why it does not serve, None while it does.
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
    reason: str | None = None

    @property
    def cached_blocks(self) -> int:
        return min(self.rank_blocks, default=0)
