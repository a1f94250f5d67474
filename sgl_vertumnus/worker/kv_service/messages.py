"""What ranks and their front say to KV services: a question, and one answer or an error.

Frames of a question: version, msgpack of a ``Question``. Of an answer: ``ok`` and the msgpack of
what the question's ``answer`` names, or ``error`` and a text. Never pickled.
"""

from typing import ClassVar, TypeVar

import msgspec
from vertumnus_router.protocol import (
    CopyCommand,
    CopyReport,
    ReclaimCommand,
    ReclaimReport,
    SnapshotCommand,
    SnapshotReport,
)

VERSION = b"vertumnus-kv-1"
OK, ERROR = b"ok", b"error"
#: A question or an answer names some ten bytes for each of its blocks and tokens.
MAX_BYTES = 16 << 20


class ServiceError(Exception):
    """A question that was refused, or has no answer; the message says why."""


class Malformed(ServiceError):
    """Not a question at all."""


class Buffer(msgspec.Struct, frozen=True):
    """Keys or values of one layer in the memory of a rank's process; bytes."""

    address: int
    slot_bytes: int


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that stays where it is until ``lease`` ends.

    ``tokens`` are those of the whole chain, ``pages`` its blocks from ``Pin.start`` on, slot
    number / tokens of a page; both as 64-bit integers. ``machine`` is equal where processes can
    read each other's memory.
    """

    lease: int
    tokens: bytes
    extra_key: str | None
    cache_salt: str | None
    pages: bytes
    machine: str
    pid: int
    buffers: tuple[Buffer, ...]


class Released(msgspec.Struct, frozen=True):
    """Whether the prefix has stayed until now."""

    was_held: bool


class Session(msgspec.Struct, frozen=True):
    """Where a transfer engine reads the rank's KV: Mooncake's "host:port"."""

    address: str


class Facts(msgspec.Struct, frozen=True):
    token_bytes: int


class _Asks(msgspec.Struct, frozen=True, kw_only=True):
    """A question; ``answer`` is the type of its answer."""

    answer: ClassVar[type[msgspec.Struct]]


class Pin(_Asks, frozen=True, kw_only=True, tag="pin"):
    """Keep the prefix that ends with ``blocks[-1]``, for ``lease_s`` at most. ``kind`` says what
    the asking rank's KV is like; only equals are copied."""

    answer = Pinned
    incarnation: str
    blocks: tuple[int, ...]
    start: int
    lease_s: float
    kind: str


class Release(_Asks, frozen=True, kw_only=True, tag="release"):
    answer = Released
    lease: int


class OpenSession(_Asks, frozen=True, kw_only=True, tag="open_session"):
    """``host`` is where the asking rank reaches this one."""

    answer = Session
    host: str


class Describe(_Asks, frozen=True, kw_only=True, tag="describe"):
    answer = Facts


class Copy(_Asks, frozen=True, kw_only=True, tag="copy"):
    answer = CopyReport
    command: CopyCommand


class Reclaim(_Asks, frozen=True, kw_only=True, tag="reclaim"):
    answer = ReclaimReport
    command: ReclaimCommand


class Snapshot(_Asks, frozen=True, kw_only=True, tag="snapshot"):
    answer = SnapshotReport
    command: SnapshotCommand


Question = Pin | Release | OpenSession | Describe | Copy | Reclaim | Snapshot

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


def encode_question(question: Question) -> list[bytes]:
    return [VERSION, _encoder.encode(question)]


def decode_question(frames: list[bytes]) -> Question:
    """Raises ``Malformed`` for what is none."""
    if sum(map(len, frames)) > MAX_BYTES:
        raise Malformed(f"a question of more than {MAX_BYTES} bytes")
    if len(frames) != 2 or frames[0] != VERSION:
        raise Malformed("not a question of this version: run the same sgl-vertumnus everywhere")
    try:
        return _questions.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise Malformed(f"not a question: {exc}") from exc


def encode_answer(answer: msgspec.Struct) -> list[bytes]:
    return [OK, _encoder.encode(answer)]


def encode_error(reason: str) -> list[bytes]:
    return [ERROR, reason.encode()]


Answer = TypeVar("Answer")


def decode_answer(frames: list[bytes], kind: type[Answer]) -> Answer:
    """Raises ``ServiceError`` for an error, and for what is no such answer."""
    if len(frames) != 2 or frames[0] not in (OK, ERROR):
        raise ServiceError("not an answer")
    if frames[0] == ERROR:
        raise ServiceError(frames[1].decode(errors="replace"))
    try:
        return msgspec.msgpack.decode(frames[1], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ServiceError(f"not an answer: {exc}") from exc
