"""A rank's blocks by hash, against a naive model."""

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_patches.block_events import Cleared, Removed, Stored

from sgl_vertumnus.worker.kv_service.index import BlockIndex, NotHeld

NAMES = ("key", "salt")


def page(number: int) -> bytes:
    return array("q", [number, number + 1]).tobytes()


def stored(*hashes: int, parent: int | None = None) -> Stored:
    return Stored(hashes, parent, tuple(page(name) for name in hashes), NAMES)


def test_a_chain_says_what_its_blocks_stand_for() -> None:
    index = BlockIndex()
    index.note(stored(1, 2))
    index.published()
    index.note(stored(3, parent=2))
    chain = index.chain([1, 2, 3])
    assert chain.tokens.tolist() == [1, 2, 2, 3, 3, 4] and chain.namespace == NAMES
    assert (chain.newest, index.chain([1, 2, 3], since=3).newest) == (2, 0)
    assert index.chain([1, 2]).newest == 1 == index.version
    assert index.chain([]).tokens.tolist() == []
    assert index.held([1, 2, 9, 3]) == 2 and index.held([]) == 0


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([2], "block 1 of 1 does not follow"),
        ([1, 3], "block 2 of 2 does not follow"),
        ([1, 9], "block 2 of 2 is not held"),
        ([1, 1], "block 2 of 2 does not follow"),
    ],
)
def test_what_is_no_chain(blocks: list[int], reason: str) -> None:
    index = BlockIndex()
    index.note(stored(1, 2, 3))
    with pytest.raises(NotHeld, match=reason):
        index.chain(blocks)


def test_batches_are_counted_as_subscribers_count_them() -> None:
    index = BlockIndex()
    index.published()
    assert index.version == 0, "an empty batch is not published"
    index.note(stored(1))
    index.note(Removed((1,)))
    index.published()
    index.published()
    assert index.version == 1
    index.published_again()
    assert index.version == 2
    index.note(Cleared())
    index.published()
    assert index.version == 3


def test_a_block_that_was_stored_twice_is_as_old_as_the_first() -> None:
    index = BlockIndex()
    for _ in range(2):
        index.note(stored(1))
        index.published()
    assert index.chain([1]).newest == 1
    index.note(Removed((1,)))
    index.note(stored(1))
    assert index.chain([1]).newest == 3


@settings(max_examples=60)
@given(st.data())
def test_told_again_it_is_the_same(data: Any) -> None:
    """Trees that grow and lose leaves: what is told again builds the same tree, parents first."""
    index, tree, following = BlockIndex(), dict[int, int | None](), 0
    for _ in range(data.draw(st.integers(1, 12))):
        leaves = [name for name in tree if name not in tree.values()]
        if leaves and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(leaves))
            del tree[gone]
            index.note(Removed((gone,)))
            continue
        parent = data.draw(st.sampled_from([None, *tree]))
        names = tuple(range(following, following := following + data.draw(st.integers(1, 3))))
        index.note(stored(*names, parent=parent))
        for name in names:
            tree[name], parent = parent, name
    again = BlockIndex()
    size = data.draw(st.integers(1, 5))
    hashes = index.hashes()
    known: set[int | None] = {None}
    for at in range(0, len(hashes), size):
        for run in index.runs(hashes[at : at + size]):
            assert run.parent in known
            known.update(run.hashes)
            again.note(run)
    assert sorted(again.hashes()) == sorted(tree)
    for name in tree:
        chain = [name]
        while (parent := tree[chain[0]]) is not None:
            chain.insert(0, parent)
        assert again.chain(chain).tokens == index.chain(chain).tokens
