"""Everything the control plane wants done. Each effect carries the terms that explain it."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from vertumnus_router.core.events import Leg, RegroupEnded
from vertumnus_router.core.moves import PricedMove
from vertumnus_router.core.types import (
    BlockHash,
    BreakerState,
    DecodeId,
    PlanId,
    PoolId,
    Rank,
    RequestId,
    TransferId,
    WorkerId,
)
from vertumnus_router.core.verdict import Verdict
from vertumnus_router.lattice import Block


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """One candidate of one placement, in seconds (paper section 5).

    ``total`` = ``queue_s`` + ``beta``·``service_s`` + ``lam``·``extra_gpu_s``. With late binding
    ``lam`` is higher for a candidate that would compute what another one is computing.
    ``cached_tokens`` is what the prefill is expected to find, with late binding including
    prefixes that are still being computed there; ``reconcile_tokens`` of them are not on all
    ranks of the worker yet and are copied between them first, which has no price here.
    ``pull_tokens`` are copied to the worker from another one first; they count as cached, and the
    time for it, ``pull_s``, is part of ``service_s``.
    With fluid composition the candidate may have to be made first: that takes part of ``queue_s``,
    and what its ranks stand still for it is part of ``extra_gpu_s``.
    ``extrapolated``: the lengths lie outside what the profile was measured with.
    """

    worker: WorkerId
    degree: int
    cached_tokens: int
    reconcile_tokens: int
    queue_s: float
    service_s: float
    extra_gpu_s: float
    beta: float
    lam: float
    total: float
    pull_tokens: int = 0
    pull_s: float = 0.0
    extrapolated: bool = False


class DecodeTerms(msgspec.Struct, frozen=True, gc=False):
    """One decode server: ``rooms`` of its ``limit`` are taken. ``doubted``: it did not answer a
    request lately, and takes none until it is heard of again. ``leaving``: it takes none."""

    decode: DecodeId
    rooms: int
    limit: int
    doubted: bool = False
    leaving: bool = False


class Prices(Protocol):
    """What a placement was chosen by, as it was at that moment."""

    def chosen(self) -> CostTerms:
        """The terms of the choice."""

    def terms(self) -> tuple[CostTerms, ...]:
        """The terms of every candidate, the choice first."""


class Chosen(NamedTuple):
    """A choice of which nothing else is told."""

    only: CostTerms

    def chosen(self) -> CostTerms:
        return self.only

    def terms(self) -> tuple[CostTerms, ...]:
        return (self.only,)


class Decision:
    """A placement and every candidate it was chosen from, best first.

    Without candidates (``explain`` when nothing is eligible) nothing is chosen, and ``excluded``
    says why. ``decodes`` are the decode servers as they stood, ``decode`` the one that was taken,
    None if none has a room or none is needed. ``excluded`` are the workers that were not
    candidates, with the reason.

    A value that never changes. The terms are worked out from ``prices`` when they are first read:
    a cluster has dozens of candidates, and of most decisions only the choice is of interest.
    """

    __slots__ = (
        "_candidates",
        "_chosen",
        "_prices",
        "decode",
        "decodes",
        "excluded",
        "policy",
        "request_id",
    )

    def __init__(
        self,
        request_id: RequestId,
        policy: str,
        prices: Prices | None,
        excluded: tuple[tuple[WorkerId, str], ...] = (),
        decode: DecodeId | None = None,
        decodes: tuple[DecodeTerms, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.policy = policy
        self.excluded = excluded
        self.decode = decode
        self.decodes = decodes
        self._prices = prices
        self._candidates: tuple[CostTerms, ...] | None = None
        self._chosen: CostTerms | None = None

    @property
    def candidates(self) -> tuple[CostTerms, ...]:
        """Every candidate with its terms."""
        if self._candidates is None:
            self._candidates = () if self._prices is None else self._prices.terms()
            self._prices = None
        return self._candidates

    @property
    def chosen(self) -> CostTerms:
        """The candidate that was taken; ``IndexError`` if there is none."""
        if self._chosen is None:
            prices = self._prices
            self._chosen = self.candidates[0] if prices is None else prices.chosen()
        return self._chosen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return (
            f"Decision(request_id={self.request_id!r}, policy={self.policy!r}, "
            f"candidates={self.candidates!r}, excluded={self.excluded!r}, "
            f"decode={self.decode!r}, decodes={self.decodes!r})"
        )

    def _values(self) -> tuple[object, ...]:
        return (
            self.request_id,
            self.policy,
            self.candidates,
            self.excluded,
            self.decode,
            self.decodes,
        )


class Pairing(msgspec.Struct, frozen=True, gc=False):
    """The other half of an attempt at a pool that prefills only: ``decode`` fetches the KV from
    the home in SGLang's bootstrap ``room``, or rooms from there on for a batch. 0 < room < 2**62,
    another one for every attempt, and room % pool size = home, which is SGLang's own rule for
    the rank that a room is at."""

    decode: DecodeId
    room: int


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a rank: what is meant for it must not reach another one."""

    rank: Rank
    incarnation: str


class Cause(Enum):
    """Why KV is copied or deleted."""

    INTER_DEGREE = "inter_degree"  # no worker of a degree that requests prefer holds it
    INTRA_DEGREE = "intra_degree"  # too few workers of a degree do
    RECLAIM = "reclaim"  # more than are used
    PULL = "pull"  # a request is about to need it
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the KV of ``blocks``, a chain from the root, from ``source`` to ``destination``: what
    the destination lacks of it, and nothing else. ``CopyEnded`` has to follow.

    The index learns of the copy from the destination's own events.
    """

    transfer: TransferId
    source: Life
    destination: Life
    blocks: tuple[BlockHash, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Delete the KV of ``blocks[keep:]`` at ``holder``; ``blocks`` is a chain from the root.
    ``ReclaimEnded`` has to follow.

    The rank refuses where a block is in use, has been stored again since, or has others below it
    that are not named.
    """

    transfer: TransferId
    holder: Life
    blocks: tuple[BlockHash, ...]
    keep: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class TransferRefused:
    """What an operator asked for cannot be done."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to the worker's pool, routed to ``home``, one of the worker's ranks. The
    estimate is already reserved.

    Whatever block contains the home serves the request, so a regroup does not end the attempt.
    ``worker`` is where it begins, and names the attempt for good. With a ``pair`` the request
    goes to that decode server as well, which answers it. A ``pull`` goes first; whatever becomes
    of it, the request follows. It may be a copy that was begun before, for another request or by
    a ``Copy``: then it is waited for, not begun again.
    """

    request_id: RequestId
    pool: PoolId
    home: Rank
    worker: WorkerId
    decision: Decision
    attempt: int
    pair: Pairing | None = None
    pull: Copy | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is over: answer the client with ``status`` and this message.

    Where the engine's own 4xx is at hand (``Failure.CLIENT_ERROR``), relay that instead; where
    bytes of an answer are out already, end the stream with this error. ``retry_s``: when another
    try may do better, if that can be told.
    """

    request_id: RequestId
    status: int
    code: str
    message: str
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the attempt at this worker (its answer is no longer wanted).

    After a ``RequestCancelled`` the request is over. Otherwise its worker is lost, or its decode
    server, as ``leg`` says, and the request waits for ``RequestFailed(WORKER_LOST, leg=...,
    streamed=...)`` to be placed elsewhere or end.
    """

    request_id: RequestId
    pool: PoolId
    worker: WorkerId
    attempt: int
    leg: Leg = Leg.PREFILL


@dataclass(frozen=True, slots=True)
class Regroup:
    """Command the pool, at ``epoch``, from the composition ``before`` to ``after``, one adjacent
    move away. A pool has one of these at a time; ``RegroupEnded`` has to follow."""

    plan: PlanId
    pool: PoolId
    epoch: int
    before: tuple[Block, ...]
    after: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class PlanEnded:
    """A reconfiguration is over: ``ended`` are its moves as they went, one for each of the first
    of ``moves``. ``reason`` says why it stopped short, None when the pool serves as asked."""

    plan: PlanId
    pool: PoolId
    moves: tuple[PricedMove, ...] = ()
    ended: tuple[RegroupEnded, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class BreakerChanged:
    """News of a worker's circuit breaker, for the log. Nothing has to be done."""

    worker: WorkerId
    state: BreakerState
    reason: str


Effect = (
    Dispatch
    | Reject
    | Abort
    | Regroup
    | PlanEnded
    | Verdict
    | Copy
    | Reclaim
    | TransferRefused
    | BreakerChanged
)
