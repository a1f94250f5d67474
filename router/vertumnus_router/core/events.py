"""Everything the control plane is told. Facts that were observed, never intentions."""

from dataclasses import dataclass
from enum import Enum

from vertumnus_router.core.types import BlockHash, PoolId, Rank, Request, RequestId, WorkerId
from vertumnus_router.lattice import Block


@dataclass(frozen=True, slots=True)
class PoolJoined:
    """A pool described itself; its ranks follow one by one."""

    pool: PoolId
    size: int
    degrees: tuple[int, ...]
    block_tokens: int
    context_tokens: int
    kv_capacity_tokens: int
    chunk_tokens: int
    manifest: str


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The front of the pool is gone: none of its ranks can be reached.

    The pool and its index are forgotten; ``PoolJoined`` and a replay bring it back.
    """

    pool: PoolId
    cause: str


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank's heartbeat. A worker exists while all ranks of its block agree on it.

    An incarnation that differs from the rank's last one ends that one for good and clears the
    rank's index, so replay the rank's KV events after this event.
    """

    rank: Rank
    incarnation: str
    epoch: int
    block: Block
    manifest: str
    running_requests: int = 0
    waiting_requests: int = 0
    kv_used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank died or fell silent.

    With an ``incarnation`` that life is over for good: later reports of it are ignored and its
    index is cleared. None means silence, of whichever life is current: the rank is out until it
    reports again, its index is kept.
    """

    rank: Rank
    cause: str
    incarnation: str | None = None


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    request_id: RequestId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The engine's own count of cached tokens and compute time; None where unknown.

    The first one ends the prefill. Where that was the first byte of the answer, the report that
    follows still corrects the prefill-time model.
    """

    request_id: RequestId
    worker: WorkerId
    cached_tokens: int | None = None
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    request_id: RequestId


class Failure(Enum):
    """Why an attempt failed, as far as placement cares."""

    UNREACHABLE = "unreachable"  # no connection: the front of all the pool's workers is dead
    DISCONNECTED = "disconnected"  # the connection broke before the answer was complete
    OVERLOADED = "overloaded"  # 429 or 503: backpressure, not a fault
    SERVER_ERROR = "server_error"
    CLIENT_ERROR = "client_error"  # 4xx: the request is at fault, never retried
    WORKER_LOST = "worker_lost"


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """An attempt ended badly, aborted ones included.

    ``streamed`` is True once a byte of the answer has reached the client: then there is no
    second attempt. The core answers with a ``Dispatch`` elsewhere, now or later, or with the
    ``Reject`` that ends the request. ``worker`` names the attempt; a failure of any other
    attempt than the current one is ignored (None: it is the current one).
    """

    request_id: RequestId
    failure: Failure
    cause: str
    streamed: bool = False
    worker: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, in whatever phase. The request is over with this event."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks entered the rank's tree below ``parent`` (None: below the root), in order."""

    rank: Rank
    parent: BlockHash | None
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    rank: Rank
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class IndexReset:
    """Nothing is known of the rank's tree any more (cleared, restarted, or events lost)."""

    rank: Rank
    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Timers of the policy run on ticks only."""


Event = (
    PoolJoined
    | PoolLost
    | RankReported
    | RankLost
    | RequestArrived
    | PrefillStarted
    | PrefillFinished
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | BlocksStored
    | BlocksRemoved
    | IndexReset
    | Tick
)
