"""The control plane of a running router, told by a test what to decide about caches."""

from collections.abc import Callable
from dataclasses import replace

from vertumnus_router.core.effects import (
    Cause,
    Copy,
    Dispatch,
    Effect,
    Life,
    Reclaim,
)
from vertumnus_router.core.events import (
    CopyEnded,
    Event,
    ReclaimEnded,
    ReclaimRequested,
    ReplicateRequested,
)
from vertumnus_router.core.types import BlockHash, PoolId, Rank, TransferId
from vertumnus_router.io.router import Router

Requested = ReplicateRequested | ReclaimRequested


class Script:
    """Takes the place of ``on_event``. ``ended`` is what came of copies and deletions."""

    def __init__(
        self,
        router: Router,
        *,
        pull: Callable[[Dispatch], Copy | None] = lambda dispatch: None,
        answer: Callable[[Requested], Effect] | None = None,
    ) -> None:
        self.ended: list[CopyEnded | ReclaimEnded] = []
        self.dispatches: list[Dispatch] = []
        self._on_event = router.core.on_event
        self._pull = pull
        self._answer = answer
        router.core.on_event = self  # type: ignore[assignment]

    def __call__(self, event: Event, now: float) -> list[Effect]:
        match event:
            case CopyEnded() | ReclaimEnded():
                self.ended.append(event)
                return []
            case ReplicateRequested() | ReclaimRequested() if self._answer is not None:
                return [self._answer(event)]
        effects = self._on_event(event, now)
        return [self._with_pull(one) if isinstance(one, Dispatch) else one for one in effects]

    def _with_pull(self, dispatch: Dispatch) -> Dispatch:
        dispatch = replace(dispatch, pull=self._pull(dispatch))
        self.dispatches.append(dispatch)
        return dispatch


def life(rank: int, pool: str = "fake") -> Life:
    return Life(Rank(PoolId(pool), rank), "life")


def copy_of(
    *blocks: int,
    source: Life | None = None,
    destination: Life | None = None,
    cause: Cause = Cause.INTER_DEGREE,
    transfer: str = "t",
) -> Copy:
    """From rank 0 to rank 1, if nothing else is said."""
    chain = tuple(BlockHash(block) for block in blocks)
    return Copy(TransferId(transfer), source or life(0), destination or life(1), chain, cause)


def reclaim_of(*blocks: int, keep: int = 0, holder: Life | None = None) -> Reclaim:
    chain = tuple(BlockHash(block) for block in blocks)
    return Reclaim(TransferId("t"), holder or life(0), chain, keep, Cause.RECLAIM)
