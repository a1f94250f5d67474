"""SGLang's event batches: one bad field costs one event, never the batch."""

from typing import Any

import msgspec
from vertumnus_router.core.events import BlocksRemoved, BlocksStored, IndexReset
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io.kv_batch import decode_batch, index_events

RANK = Rank(PoolId("p"), 3)


def payload(*events: dict[str, Any], extra: tuple[Any, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), *extra])


def store(hashes: list[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [1] * 4 * len(hashes),
        "block_size": 4,
        "lora_id": None,
    }
    return {**event, **more}


def test_stores_that_continue_each_other_become_one() -> None:
    batch = decode_batch(payload(store([1, 2]), store([3], 2), store([9]), store([-5], 9)))
    assert batch.ts == 1.5
    assert index_events(RANK, batch, 4) == [
        BlocksStored(RANK, None, (1, 2, 3)),  # type: ignore[arg-type]
        BlocksStored(RANK, None, (9, -5)),  # type: ignore[arg-type]
    ]


def test_order_and_kinds_survive() -> None:
    batch = decode_batch(
        payload(
            store([1]),
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
            store([2]),
        )
    )
    kinds = [type(event) for event in index_events(RANK, batch, 4)]
    assert kinds == [BlocksStored, BlocksRemoved, IndexReset, BlocksStored]


def test_token_ids_are_not_read() -> None:
    """Ids that no reader could represent, or of another type: pairs, under EAGLE."""
    batch = decode_batch(
        payload(
            store([1], token_ids=[b"\x00", {"a": 1}, [2**63, -(2**63)], 1e300]),
            {"type": "BlockRemoved", "block_hashes": [7]},
        )
    )
    assert batch.skipped == 0
    assert len(index_events(RANK, batch, 4)) == 2


def test_an_unknown_event_is_skipped_and_its_neighbours_stay() -> None:
    batch = decode_batch(
        payload(
            store([1]),
            {"type": "BlockMoved", "from": 1},
            {"type": "BlockStored", "block_hashes": "none"},
            {"type": "BlockRemoved", "block_hashes": [1]},
        )
    )
    assert batch.skipped == 2
    assert len(index_events(RANK, batch, 4)) == 2


def test_new_fields_and_a_longer_batch_are_accepted() -> None:
    batch = decode_batch(payload(store([1], session_id="s", new_field=[1]), extra=(0, "more")))
    assert len(index_events(RANK, batch, 4)) == 1


def test_other_tiers_and_other_block_sizes_are_not_ours() -> None:
    batch = decode_batch(
        payload(
            store([1], medium="CPU_PINNED"),
            store([2], block_size=16),
            {"type": "BlockRemoved", "block_hashes": [3], "medium": "CPU_PINNED"},
            store([4], medium="GPU"),
        )
    )
    assert index_events(RANK, batch, 4) == [BlocksStored(RANK, None, (4,))]  # type: ignore[arg-type]


def test_what_is_no_batch_is_empty() -> None:
    for junk in (b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), b"\x93\x01"):
        assert decode_batch(junk).events == ()
        assert decode_batch(junk).skipped == 1
