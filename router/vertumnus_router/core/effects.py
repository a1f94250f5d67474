"""Everything the control plane wants done. Each effect carries the terms that explain it."""

from dataclasses import dataclass

from vertumnus_router.core.types import PoolId, Rank, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class CostTerms:
    """One candidate of one placement, in seconds (paper section 5).

    ``total`` = ``queue_s`` + ``beta``·``service_s`` + ``lam``·``extra_gpu_s``.
    ``cached_tokens`` is what the prefill is expected to find, with late binding including
    prefixes that are still being computed there.
    """

    worker: WorkerId
    degree: int
    cached_tokens: int
    queue_s: float
    service_s: float
    extra_gpu_s: float
    beta: float
    lam: float
    total: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement and every candidate it was chosen from, best first.

    Without candidates (``explain`` when nothing is eligible) nothing is chosen, and ``excluded``
    says why.
    """

    request_id: RequestId
    policy: str
    candidates: tuple[CostTerms, ...]
    #: workers that were not candidates, with the reason
    excluded: tuple[tuple[WorkerId, str], ...] = ()

    @property
    def chosen(self) -> CostTerms:
        """The candidate that was taken; ``IndexError`` if there is none."""
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to the worker's pool, routed to its leader. The estimate is already
    reserved."""

    request_id: RequestId
    pool: PoolId
    leader: Rank
    worker: WorkerId
    decision: Decision
    attempt: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is over: answer the client with ``status`` and this message.

    Where the engine's own 4xx is at hand (``Failure.CLIENT_ERROR``), relay that instead; where
    bytes of an answer are out already, end the stream with this error.
    """

    request_id: RequestId
    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the attempt at this worker (its answer is no longer wanted).

    After a ``RequestCancelled`` the request is over. Otherwise its worker is lost, and the
    request waits for ``RequestFailed(WORKER_LOST, streamed=...)`` to be placed elsewhere or end.
    """

    request_id: RequestId
    pool: PoolId
    worker: WorkerId


Effect = Dispatch | Reject | Abort
