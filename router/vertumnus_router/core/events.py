"""Everything the control plane is told. Facts that were observed, never intentions.

Those that come several times for every request are structs, which cost a fifth of a dataclass to
make.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from vertumnus_router.core.types import (
    BlockHash,
    DecodeId,
    PlanId,
    PoolId,
    Rank,
    Request,
    RequestId,
    TransferId,
    WorkerId,
)
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import Stages


@dataclass(frozen=True, slots=True)
class PoolJoined:
    """A pool described itself; its ranks follow one by one.

    A ``prefill_only`` pool needs a decode server for every request.
    """

    pool: PoolId
    size: int
    degrees: tuple[int, ...]
    block_tokens: int
    context_tokens: int
    kv_capacity_tokens: int
    chunk_tokens: int
    manifest: str
    prefill_only: bool = False
    #: bytes of KV of one token on one rank; 0: its ranks cannot copy prefixes
    kv_token_bytes: int = 0
    #: a server of plain SGLang: it has no patches, is never moved, and reports no prefills
    plain: bool = False


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The front of the pool is gone: none of its ranks can be reached.

    The pool and its index are forgotten; ``PoolJoined`` and a replay bring it back.
    """

    pool: PoolId
    cause: str


@dataclass(frozen=True, slots=True)
class PoolLeaving:
    """The pool takes no new requests, and goes on with those that it has; ``PoolLost`` follows when
    they have ended. ``cause`` None: it stays after all."""

    pool: PoolId
    cause: str | None


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
class PoolComposed:
    """What a pool itself says of its composition: ``failed`` blocks may hold ranks that died
    before anybody here heard of them."""

    pool: PoolId
    epoch: int
    blocks: tuple[Block, ...]
    failed: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeJoined:
    """A decode server is there and takes up to ``max_requests`` prompts at a time.

    The same ``life`` again confirms that it still is; another one means that it was started
    anew, and what it had is lost.
    """

    decode: DecodeId
    life: str
    max_requests: int


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """A decode server is gone, and every request that it had."""

    decode: DecodeId
    cause: str


@dataclass(frozen=True, slots=True)
class DecodeLeaving:
    """The same of a decode server."""

    decode: DecodeId
    cause: str | None


class RequestArrived(msgspec.Struct, frozen=True, gc=False):
    request: Request


class PrefillStarted(msgspec.Struct, frozen=True, gc=False):
    """``worker`` names the attempt: it is the one of its ``Dispatch``, wherever it runs now.

    A worker may get a request twice, if it was not at fault: ``attempt`` then tells which one is
    meant (None: whichever it has).
    """

    request_id: RequestId
    worker: WorkerId
    attempt: int | None = None


class PrefillFinished(msgspec.Struct, frozen=True, gc=False):
    """The engine's own count of cached tokens and compute time; None where unknown.

    The first one ends the prefill. Where that was the first byte of the answer, the report that
    follows still corrects the prefill-time model.
    """

    request_id: RequestId
    worker: WorkerId
    cached_tokens: int | None = None
    compute_s: float | None = None
    attempt: int | None = None


class HandedOver(msgspec.Struct, frozen=True, gc=False):
    """The KV of the attempt has arrived at its decode server. No worker has the request any more,
    so from now on none can lose it."""

    request_id: RequestId
    worker: WorkerId
    attempt: int | None = None


class RequestFinished(msgspec.Struct, frozen=True, gc=False):
    request_id: RequestId


class Failure(Enum):
    """Why an attempt failed, as far as placement cares."""

    UNREACHABLE = "unreachable"  # no connection: the front of all the pool's workers is dead
    DISCONNECTED = "disconnected"  # the connection broke before the answer was complete
    OVERLOADED = "overloaded"  # 429 or 503: backpressure, not a fault
    SERVER_ERROR = "server_error"
    STALLED = "stalled"  # nothing came for too long
    CLIENT_ERROR = "client_error"  # 4xx: the request is at fault, never retried
    WORKER_LOST = "worker_lost"


class Leg(Enum):
    """The two halves of an attempt: at a worker, and at a decode server if the worker's pool
    prefills only."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """An attempt ended badly, aborted ones included.

    ``streamed`` is True once a byte of the answer has reached the client: then there is no
    second attempt. The core answers with a ``Dispatch`` elsewhere, now or later, or with the
    ``Reject`` that ends the request. ``retry_after_s``: after how long an ``OVERLOADED`` worker
    wants to be asked again, if it said. ``worker`` names the attempt; a failure of any other
    attempt than the current one is ignored (None: it is the current one). ``leg`` is the one at
    fault; the other one is not held against its worker or decode server.
    """

    request_id: RequestId
    failure: Failure
    cause: str
    streamed: bool = False
    worker: WorkerId | None = None
    attempt: int | None = None
    leg: Leg = Leg.PREFILL
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, in whatever phase. The request is over with this event."""

    request_id: RequestId


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks entered the rank's tree below ``parent`` (None: below the root), in order."""

    rank: Rank
    parent: BlockHash | None
    blocks: tuple[BlockHash, ...]


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    rank: Rank
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class IndexReset:
    """Nothing is known of the rank's tree any more (cleared, restarted, or events lost)."""

    rank: Rank
    cause: str


@dataclass(frozen=True, slots=True)
class ReconfigureRequested:
    """Bring the pool to the composition ``blocks``. The core answers with a ``PlanEnded`` for
    ``plan``, at once when it cannot be done."""

    plan: PlanId
    pool: PoolId
    blocks: tuple[Block, ...]


class MoveOutcome(Enum):
    COMMITTED = "committed"
    ABANDONED = "abandoned"  # before any rank had switched: nothing has changed
    FAILED = "failed"  # the epoch holds, some blocks of it are lost
    REFUSED = "refused"  # the pool did not begin the move
    UNKNOWN = "unknown"  # no answer: what the ranks report decides


@dataclass(frozen=True, slots=True)
class RegroupEnded:
    """How the ``Regroup`` of ``plan`` ended, in the words of its pool. ``epoch`` is the number of
    the move, None if it has none; the pool is at it where the move was committed or has failed.
    """

    plan: PlanId
    pool: PoolId
    outcome: MoveOutcome
    epoch: int | None = None
    reason: str | None = None
    failed: tuple[Block, ...] = ()
    stages: Stages | None = None


class TransferOutcome(Enum):
    """How a copy or a deletion went. What the ranks hold is told by their own events only."""

    DONE = "done"
    REFUSED = "refused"  # it cannot be done now, and nothing has changed
    FAILED = "failed"  # it was begun; what came of it is not used


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """``blocks`` and ``bytes`` are what was moved: what the destination lacked, no more. 0 where
    it held everything by then. ``seconds``: the whole copy, ``transfer_s``: its bytes alone."""

    transfer: TransferId
    outcome: TransferOutcome
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    transfer_s: float = 0.0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ReclaimEnded:
    transfer: TransferId
    outcome: TransferOutcome
    blocks: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicateRequested:
    """An operator wants ``worker`` to hold the prefix that ends with ``tip``. The core answers
    with a ``Copy`` of that id, or with ``TransferRefused``."""

    transfer: TransferId
    tip: BlockHash
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ReclaimRequested:
    """An operator wants ``worker`` to give up the block ``tip`` and what it holds below it."""

    transfer: TransferId
    tip: BlockHash
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Timers of the policy run on ticks only."""


Event = (
    PoolJoined
    | PoolLeaving
    | PoolLost
    | PoolComposed
    | RankReported
    | RankLost
    | DecodeJoined
    | DecodeLeaving
    | DecodeLost
    | RequestArrived
    | PrefillStarted
    | PrefillFinished
    | HandedOver
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | BlocksStored
    | BlocksRemoved
    | IndexReset
    | ReconfigureRequested
    | RegroupEnded
    | CopyEnded
    | ReclaimEnded
    | ReplicateRequested
    | ReclaimRequested
    | Tick
)
