"""Decode SGLang's KV event batches: ``[ts, [event, …], attn_dp_rank]`` in msgpack.

Events are maps tagged ``type`` (``disaggregation/kv_events.py``). ``token_ids`` stay
undecoded: they are most of the bytes, nothing here needs them, and one that cannot be
represented must not cost the batch its removals.
"""

import math
from dataclasses import dataclass

import msgspec

from vertumnus_router.core.events import BlocksRemoved, BlocksStored, Event, IndexReset
from vertumnus_router.core.types import BlockHash, Rank

#: Copies in another tier (host, disk) are not what a worker can use at once.
_DEVICE = (None, "GPU")


class BlockStored(msgspec.Struct, tag=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None = None
    block_size: int = 0
    medium: str | None = None
    token_ids: msgspec.Raw = msgspec.Raw()


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[KvEvent]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)
_raw_batch = msgspec.msgpack.Decoder(_RawBatch)
_event: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(KvEvent)


@dataclass(frozen=True, slots=True)
class Batch:
    """One decoded batch. ``ts`` is the publisher's wall clock in seconds, ``skipped`` the
    number of events that could not be understood."""

    ts: float
    events: tuple[KvEvent, ...]
    skipped: int = 0


def decode_batch(payload: bytes) -> Batch:
    """The batch in ``payload``. An event of an unknown type or shape is skipped and counted,
    the others survive; a payload that is no batch at all is an empty one without a time."""
    try:
        batch = _batch.decode(payload)
        return Batch(batch.ts, tuple(batch.events))
    except msgspec.MsgspecError:
        pass
    try:
        raw = _raw_batch.decode(payload)
    except msgspec.MsgspecError:
        return Batch(math.nan, (), skipped=1)
    events: list[KvEvent] = []
    skipped = 0
    for item in raw.events:
        try:
            events.append(_event.decode(item))
        except msgspec.MsgspecError:
            skipped += 1
    return Batch(raw.ts, tuple(events), skipped)


def index_events(rank: Rank, batch: Batch, block_tokens: int) -> list[Event]:
    """What the batch means for the index of ``rank``. Runs of stores that continue each
    other become one event; blocks of another size than ``block_tokens`` are not ours."""
    out: list[Event] = []
    for event in batch.events:
        match event:
            case BlockStored(block_hashes=hashes, medium=medium) if medium in _DEVICE:
                if not hashes or event.block_size != block_tokens:
                    continue
                blocks = tuple(BlockHash(h) for h in hashes)
                parent = event.parent_block_hash
                last = out[-1] if out else None
                if isinstance(last, BlocksStored) and last.blocks[-1] == parent:
                    out[-1] = BlocksStored(rank, last.parent, last.blocks + blocks)
                else:
                    above = None if parent is None else BlockHash(parent)
                    out.append(BlocksStored(rank, above, blocks))
            case BlockRemoved(block_hashes=hashes, medium=medium) if medium in _DEVICE:
                if hashes:
                    out.append(BlocksRemoved(rank, tuple(BlockHash(h) for h in hashes)))
            case AllBlocksCleared():
                out.append(IndexReset(rank, "the rank cleared its cache"))
            case _:
                pass
    return out
