"""Wire messages between a pool and its routers. Versioned, msgpack or JSON, never pickled.

Two channels carry them:

* ``GET /vertumnus/pool`` on the pool's HTTP front answers a ``PoolDescription`` (JSON): what
  is fixed for the life of the pool.
* every rank has one ZMQ PUB socket on ``reports.port_base + rank``; each message is two
  frames, ``[b"vertumnus", msgpack(Report)]``. ``RankState`` comes once a second and at every
  change, the prefill messages as they happen, from the leader of a block only.

KV events and load come on SGLang's own sockets in SGLang's own format.
"""

from typing import Annotated

import msgspec

PROTOCOL_VERSION = 3
REPORT_TOPIC = b"vertumnus"

#: A rank that has been silent this long is lost (its reports come every second).
HEARTBEAT_S = 1.0
SILENCE_S = 5.0

#: A front takes no ``CopyCommand`` with a longer timeout.
MAX_COPY_S = 100.0


Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ProtocolError(ValueError):
    """A message that this side cannot use: wrong version, wrong shape."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A range of TCP ports, one per rank: ``host:port_base + rank``.

    ``host`` None means the host that the pool's URL names.
    """

    port_base: int
    host: str | None = None


class KvEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Where SGLang's ``KVEventBatch`` streams are published and replayed."""

    publish: Endpoint
    replay: Endpoint
    topic: str
    block_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the router must know of the model to tokenise and to refuse what cannot fit."""

    served_name: str
    model_path: str
    tokenizer_path: str
    context_tokens: int
    kv_capacity_tokens: int
    chunk_tokens: int
    chat_template: str | None = None
    #: architecture, sizes and type of the weights: what prefill times depend on
    shape: str = ""


class PrefillSide(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that prefills only; decode servers fetch the KV from its ranks.

    They learn the ranks' addresses from SGLang's bootstrap server, on ``bootstrap_port`` of the
    host that the pool's URL names. Every rank is registered there once, for life, as the
    data-parallel rank of its own number. They copy the KV as it is, so theirs must be of the same
    type: ``dtype`` and ``kv_cache_dtype`` are the pool's, in the words of SGLang's flags.
    """

    bootstrap_port: int
    dtype: str
    kv_cache_dtype: str


class KvService(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that copy cached prefixes from each other and delete them when told to.

    ``endpoint`` is where rank r answers other ranks; only they connect to it. Routers send
    ``CopyCommand``, ``ReclaimCommand`` and ``SnapshotCommand`` to the front.
    """

    endpoint: Endpoint
    token_bytes: int


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /vertumnus/pool``. ``prefill`` None: the pool decodes, too.
    ``device``: what a rank computes on, in words."""

    version: int
    pool_id: str
    sglang_version: str
    pool_size: int
    degrees: tuple[int, ...]
    model: ModelInfo
    kv_events: KvEvents
    reports: Endpoint
    manifest: str
    prefill: PrefillSide | None = None
    kv_service: KvService | None = None
    device: str = ""

    @property
    def block_tokens(self) -> int:
        return self.kv_events.block_tokens


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """How long each part of a move took, milliseconds.

    ``drain``: from the command until every block of ranks that changes stood at a step boundary
    and began no further prefill. ``vote``: until every rank had reached the command to switch.
    ``switch``: until the last of them served in its new block. ``publish``: until the epoch was
    committed and handed out.
    """

    drain: float
    vote: float
    switch: float
    publish: float


class MoveReport(msgspec.Struct, frozen=True, kw_only=True):
    """One move of a pool, as it ended.

    ``outcome``: ``committed``; ``abandoned`` before any rank had switched, nothing has changed;
    ``failed``: the epoch holds, and the blocks in ``failed`` serve no more.
    """

    epoch: int
    before: str
    after: str
    outcome: str
    reason: str | None = None
    failed: tuple[tuple[int, int], ...] = ()
    stages: Stages | None = None


class BlockState(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a pool's composition; ``state`` is ``serving`` or ``failed``."""

    first: int
    degree: int
    state: str


class PoolComposition(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /vertumnus/composition`` on a pool's front: what it serves as now,
    where it is moving, and its last moves, oldest first."""

    epoch: int
    composition: str
    blocks: tuple[BlockState, ...]
    moving: str | None = None
    moves: tuple[MoveReport, ...] = ()


class MoveCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /vertumnus/regroup`` on a pool's front. ``epoch`` is the one that the
    sender knows; a pool that has moved on refuses."""

    composition: str
    epoch: int | None = None


class CopyCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /vertumnus/kv/copy`` on the front of the destination's pool: rank
    ``rank`` fetches what it lacks of ``blocks``, block hashes from the root, from the rank at
    ``source`` ("host:port"). Each must be in the life that is named."""

    rank: int
    incarnation: str
    source: str
    source_incarnation: str
    blocks: tuple[int, ...]
    timeout_s: float


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """``outcome``: ``done``; ``refused``, nothing was moved; ``failed``, what was moved is not
    used. ``seconds`` is the whole copy, ``transfer_s`` its bytes alone."""

    outcome: str
    reason: str | None = None
    blocks: Count = 0
    bytes: Count = 0
    seconds: Seconds = 0.0
    transfer_s: Seconds = 0.0


class ReclaimCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /vertumnus/kv/reclaim``: rank ``rank`` deletes ``blocks[keep:]`` of a
    chain of block hashes from the root.

    ``as_of`` is the version of the rank's index that the sender knows: the number of batches of
    KV events that it has seen. What was stored later is not what it means.
    """

    rank: int
    incarnation: str
    blocks: tuple[int, ...]
    keep: int
    as_of: int


class ReclaimReport(msgspec.Struct, frozen=True, kw_only=True):
    """``outcome``: ``done`` or ``refused``."""

    outcome: str
    reason: str | None = None
    blocks: Count = 0


class SnapshotCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /vertumnus/kv/snapshot``: rank ``rank`` publishes every block that it
    holds once more in its stream of KV events, in order with what else happens to them."""

    rank: int
    incarnation: str


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    """``outcome``: ``done`` or ``refused``; ``blocks``: how many are published."""

    outcome: str
    reason: str | None = None
    blocks: Count = 0


class RankState(msgspec.Struct, frozen=True, kw_only=True, tag="rank_state"):
    """Heartbeat. ``incarnation`` changes with every life of the rank's process.

    ``first``/``degree`` name the block the rank serves in at ``epoch``. ``manifest`` is the
    digest of the patches that are live in the rank. Tokens count the KV pool of this rank.
    """

    version: int
    pool_id: str
    rank: int
    incarnation: str
    epoch: int
    first: int
    degree: int
    manifest: str
    running_requests: int = 0
    waiting_requests: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0


class PrefillStarted(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_started"):
    """The leader began the first chunk of these requests (engine request ids)."""

    rank: int
    incarnation: str
    epoch: int
    rids: tuple[str, ...]


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True):
    """One finished prefill; tokens as the engine counted them.

    ``compute_s`` is the time its chunks ran, shared chunks counted in full.
    """

    rid: str
    input_tokens: int
    cached_tokens: int
    compute_s: float


class PrefillFinished(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_finished"):
    """The leader has the first token of these requests."""

    rank: int
    incarnation: str
    epoch: int
    done: tuple[PrefillDone, ...]


class RankLost(msgspec.Struct, frozen=True, kw_only=True, tag="rank_lost"):
    """Sent by the pool's supervisor on the socket ``reports.port_base + pool_size``."""

    rank: int
    cause: str
    #: None: whichever life of the rank is current
    incarnation: str | None = None


Report = RankState | PrefillStarted | PrefillFinished | RankLost

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode_report(report: Report) -> list[bytes]:
    """The frames of one report."""
    return [REPORT_TOPIC, _encoder.encode(report)]


def decode_report(frames: list[bytes]) -> Report:
    """The report in ``frames``; ``ProtocolError`` when it is not one of this version."""
    if len(frames) != 2 or frames[0] != REPORT_TOPIC:
        raise ProtocolError(f"not a report: {len(frames)} frame(s), topic {frames[:1]!r}")
    try:
        report = _decoder.decode(frames[1])
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not a report: {exc}") from exc
    if isinstance(report, RankState) and report.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"rank {report.rank} of pool {report.pool_id} speaks protocol {report.version}, "
            f"this router {PROTOCOL_VERSION}: run the same sgl-vertumnus on both sides"
        )
    return report


def decode_description(body: bytes) -> PoolDescription:
    """The description in a ``/vertumnus/pool`` answer, or ``ProtocolError``."""
    try:
        description = msgspec.json.decode(body, type=PoolDescription)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not a pool description: {exc}") from exc
    if description.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"pool {description.pool_id} speaks protocol {description.version}, this router "
            f"{PROTOCOL_VERSION}: run the same sgl-vertumnus on both sides"
        )
    return description
