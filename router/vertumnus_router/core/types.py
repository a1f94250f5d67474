"""Nouns of the control plane: ids, ranks, workers, requests.

Times are seconds of the caller's monotonic clock, lengths are tokens.
"""

from enum import Enum
from typing import NewType

import msgspec

from vertumnus_router.lattice import Block

PoolId = NewType("PoolId", str)
WorkerId = NewType("WorkerId", str)
RequestId = NewType("RequestId", str)
DecodeId = NewType("DecodeId", str)
#: One reconfiguration: the moves that bring a pool to the composition that was asked for.
PlanId = NewType("PlanId", str)
#: One copy of a prefix between ranks, or one deletion of a copy.
TransferId = NewType("TransferId", str)
#: SGLang's chained block hash as its KV events carry it: a signed 64-bit integer.
BlockHash = NewType("BlockHash", int)


class Rank(msgspec.Struct, frozen=True, order=True, gc=False):
    """One persistent process of a pool, named by its data-parallel rank."""

    pool: PoolId
    index: int

    def __str__(self) -> str:
        return f"{self.pool}/{self.index}"


def worker_id(pool: PoolId, block: Block) -> WorkerId:
    """``pool/FIRSTxDEGREE``: stable across epochs for the same block."""
    return WorkerId(f"{pool}/{block.first}x{block.degree}")


class WorkerState(Enum):
    """A worker takes requests only while SERVING.

    FORMING: its ranks do not all agree on it yet. DRAINING: it is about to end in a move, or its
    pool leaves, and goes on with the requests that it has.
    """

    FORMING = "forming"
    SERVING = "serving"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


class BreakerState(Enum):
    """A circuit breaker keeps requests from a worker while OPEN; HALF_OPEN it lets one through at
    a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Request(msgspec.Struct, frozen=True, gc=False):
    """What the policy knows of one request.

    ``blocks`` are the hashes of the full KV blocks of the prompt, first to last; empty when
    the prompt could not be tokenised in time, and ``input_tokens`` is then an estimate.
    ``output_tokens`` is the most the client allows. ``prompts``: how many the engine will run of
    it, more than one for a batch. ``client``: whose it is, a name among few. ``streams``: the
    first byte of its answer comes when its prefill ends; ``reported``: and the ranks of a pool
    report that.
    """

    id: RequestId
    input_tokens: int
    output_tokens: int
    blocks: tuple[BlockHash, ...] = ()
    exact: bool = True
    priority: int = 0
    prompts: int = 1
    client: str = ""
    streams: bool = True
    reported: bool = True
