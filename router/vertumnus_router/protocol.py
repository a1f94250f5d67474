"""Wire messages between a pool and its routers. Versioned, msgpack or JSON, never pickled.

Two channels carry them:

* ``GET /vertumnus/pool`` on the pool's HTTP front answers a ``PoolDescription`` (JSON): what
  is fixed for the life of the pool.
* every rank has one ZMQ PUB socket on ``reports.port_base + rank``; each message is two
  frames, ``[b"vertumnus", msgpack(Report)]``. ``RankState`` comes once a second and at every
  change, the prefill messages as they happen, from the leader of a block only.

KV events and load come on SGLang's own sockets in SGLang's own format.
"""

import msgspec

PROTOCOL_VERSION = 1
REPORT_TOPIC = b"vertumnus"

#: A rank that has been silent this long is lost (its reports come every second).
HEARTBEAT_S = 1.0
SILENCE_S = 5.0


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


class PoolDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /vertumnus/pool``."""

    version: int
    pool_id: str
    sglang_version: str
    pool_size: int
    degrees: tuple[int, ...]
    model: ModelInfo
    kv_events: KvEvents
    reports: Endpoint
    manifest: str


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
