import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import BlockHash

A, B, C, D, X, Y = (BlockHash(n) for n in (1, 2, 3, 4, 50, 60))


def holds(index: PrefixIndex, slot: int, block: BlockHash) -> bool:
    """Whether the rank holds ``block``, whatever lies above it."""
    return index.match((block,)).depth(1 << slot) == 1


def test_depth_is_what_every_rank_of_the_mask_holds() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A, B))
    index.store(2, None, (A, X))
    match = index.match((A, B, C, D))
    assert [match.depth(mask) for mask in (0b001, 0b010, 0b100)] == [3, 2, 1]
    assert match.depth(0b011) == 2
    assert match.depth(0b111) == 1
    assert match.depth(0b1000) == 0  # a rank without any block
    assert match.depth(0b1001) == 0


def test_whole_chain_and_empty_chain() -> None:
    index = PrefixIndex(100)
    index.store(5, None, (A, B))
    assert index.match((A, B)).depth(1 << 5) == 2
    assert index.match(()).depth(1 << 5) == 0
    assert PrefixIndex(1).match((A,)).depth(1) == 0


def test_stores_extend_a_chain_below_its_parent() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A,))
    index.store(0, A, (B, C))
    assert index.match((A, B, C)).depth(1) == 3
    assert index.blocks_held(0) == 3


def test_storing_again_changes_nothing() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B))
    index.store(0, None, (A, B))
    assert (len(index), index.blocks_held(0)) == (2, 2)
    index.remove(0, (B, A))
    assert (len(index), index.blocks_held(0)) == (0, 0)


def test_leaf_first_removal_shortens_the_prefix() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B, C))
    index.remove(0, (C,))
    assert index.match((A, B, C)).depth(1) == 2
    assert len(index) == 2


def test_interior_removal_cuts_the_prefix_and_a_new_store_mends_it() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B, C))
    index.remove(0, (B,))
    assert index.match((A, B, C)).depth(1) == 1
    assert index.blocks_held(0) == 2
    index.store(0, A, (B,))
    assert index.match((A, B, C)).depth(1) == 3


def test_a_node_that_nobody_holds_goes_with_its_last_child() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B, C))
    index.remove(0, (A, B))
    assert len(index) == 3
    index.remove(0, (C,))
    assert len(index) == 0


def test_one_holder_leaves_the_other_stays() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B))
    index.store(1, None, (A, B))
    index.remove(0, (B, A))
    assert index.match((A, B)).depth(0b10) == 2
    assert index.match((A, B)).depth(0b01) == 0
    assert [holds(index, slot, A) for slot in (0, 1)] == [False, True]


def test_reset_forgets_one_rank_only() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A, X))
    index.reset(0)
    assert index.blocks_held(0) == 0
    assert index.match((A, B)).depth(0b01) == 0
    assert index.match((A, X)).depth(0b10) == 2
    assert len(index) == 2
    index.reset(1)
    assert len(index) == 0


def test_unknown_parent_counts_once_the_gap_is_filled() -> None:
    index = PrefixIndex(100)
    index.store(0, B, (C, D))  # the events of A and B were lost
    assert index.match((A, B, C, D)).depth(1) == 0
    assert index.blocks_held(0) == 2
    index.store(0, None, (A, B))
    assert index.match((A, B, C, D)).depth(1) == 4
    assert index.blocks_held(0) == 4
    index.remove(0, (D, C, B, A))
    assert len(index) == 0


def test_a_filled_gap_is_a_prefix_again_and_outlives_leaves() -> None:
    index = PrefixIndex(3)
    index.store(0, B, (C,))
    index.store(0, None, (A, B))
    index.store(0, None, (X,))  # one too many: C goes, the oldest leaf
    index.store(0, None, (Y,))  # then X; A is no leaf, B extends it
    assert index.match((A, B)).depth(1) == 2
    assert [holds(index, 0, block) for block in (C, X, Y)] == [False, False, True]


def test_removing_what_is_not_held_is_no_news() -> None:
    index = PrefixIndex(100)
    index.store(0, None, (A,))
    index.remove(1, (A,))
    index.remove(0, (X,))
    assert index.match((A,)).depth(1) == 1


def test_a_hash_that_names_itself_as_parent_is_left_out() -> None:
    index = PrefixIndex(100)
    index.store(0, A, (A,))
    assert len(index) == 0


def test_full_index_gives_up_the_oldest_leaf_and_keeps_prefixes() -> None:
    index = PrefixIndex(4)
    index.store(0, None, (A, B))
    index.store(0, None, (X, Y))
    index.store(0, Y, (D,))
    assert len(index) == 4
    assert index.forgotten == 1
    assert index.match((A, B)).depth(1) == 1  # the leaf B went, its prefix A is still good
    assert index.match((X, Y, D)).depth(1) == 3
    assert index.blocks_held(0) == 4


def test_chain_longer_than_the_index_keeps_its_head() -> None:
    index = PrefixIndex(2)
    index.store(0, None, (A, B, C, D))
    assert len(index) == 2
    assert index.match((A, B, C, D)).depth(1) == 2


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        PrefixIndex(0)


# Blocks 1..31 form a binary tree, as chained hashes do: a block determines its parent.
SLOTS, BLOCKS = range(3), range(1, 32)


def parent_of(block: int) -> int | None:
    return block // 2 or None


def path_to(block: int) -> list[int]:
    path = []
    at: int | None = block
    while at is not None:
        path.append(at)
        at = parent_of(at)
    return path[::-1]


class IndexAgainstSets(RuleBasedStateMachine):
    """The index against one plain set of blocks per rank."""

    cap = 1000

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(self.cap)
        self.held: dict[int, set[int]] = {slot: set() for slot in SLOTS}

    @rule(slot=st.sampled_from(SLOTS), block=st.sampled_from(BLOCKS), skip=st.integers(0, 4))
    def store(self, slot: int, block: int, skip: int) -> None:
        path = path_to(block)
        stored = path[min(skip, len(path) - 1) :]  # skip > 0: earlier events may be lost
        above = parent_of(stored[0])
        self.index.store(
            slot, None if above is None else BlockHash(above), tuple(map(BlockHash, stored))
        )
        self.held[slot].update(stored)

    @rule(slot=st.sampled_from(SLOTS), blocks=st.lists(st.sampled_from(BLOCKS), max_size=4))
    def remove(self, slot: int, blocks: list[int]) -> None:
        self.index.remove(slot, map(BlockHash, blocks))
        self.held[slot].difference_update(blocks)

    @rule(slot=st.sampled_from(SLOTS))
    def reset(self, slot: int) -> None:
        self.index.reset(slot)
        self.held[slot].clear()

    def known(self, slot: int) -> set[int]:
        return {b for b in BLOCKS if holds(self.index, slot, BlockHash(b))}

    @invariant()
    def holders_are_right(self) -> None:
        for slot in SLOTS:
            assert self.known(slot) == self.held[slot]

    @invariant()
    def counts_add_up(self) -> None:
        for slot in SLOTS:
            assert self.index.blocks_held(slot) == len(self.known(slot))

    @invariant()
    def depths_are_the_common_prefix(self) -> None:
        for leaf in range(16, 32):
            path = path_to(leaf)
            match = self.index.match(tuple(map(BlockHash, path)))
            for mask in range(1, 1 << len(SLOTS)):
                ranks = [slot for slot in SLOTS if mask >> slot & 1]
                depth = 0
                while depth < len(path) and all(path[depth] in self.known(r) for r in ranks):
                    depth += 1
                assert match.depth(mask) == depth

    @invariant()
    def no_node_without_use(self) -> None:
        held = set().union(*(self.known(slot) for slot in SLOTS))
        needed = held.union(*map(path_to, held))
        assert len(held) <= len(self.index) <= min(self.cap, len(needed))


class FullIndexAgainstSets(IndexAgainstSets):
    """With a cap the index may know less than the sets, never more."""

    cap = 6

    @invariant()
    def holders_are_right(self) -> None:
        for slot in SLOTS:
            assert self.known(slot) <= self.held[slot]


TestIndex = IndexAgainstSets.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFullIndex = FullIndexAgainstSets.TestCase
TestFullIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
