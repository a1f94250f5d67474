import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vertumnus_bench.index import bytes_per_block
from vertumnus_router.core.trie import NODE_BYTES, PrefixIndex
from vertumnus_router.core.types import BlockHash

A, B, C, D, X, Y = (BlockHash(n) for n in (1, 2, 3, 4, 50, 60))


def index_of(nodes: int) -> PrefixIndex:
    """An index with room for so many blocks."""
    return PrefixIndex(nodes * NODE_BYTES)


def holds(index: PrefixIndex, slot: int, block: BlockHash) -> bool:
    """Whether the rank holds ``block``, whatever lies above it."""
    return index.match((block,)).common(1 << slot) == 1


def test_depth_is_what_every_rank_of_the_mask_holds() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A, B))
    index.store(2, None, (A, X))
    match = index.match((A, B, C, D))
    assert [match.common(mask) for mask in (0b001, 0b010, 0b100)] == [3, 2, 1]
    assert match.common(0b011) == 2
    assert match.common(0b111) == 1
    assert match.common(0b1000) == 0  # a rank without any block
    assert match.common(0b1001) == 0


def test_longest_is_what_one_rank_of_the_mask_holds_alone() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A, B))
    index.store(2, None, (A,))
    index.store(2, B, (C, D))  # after a gap, which rank 1 could fill: two ranks, not one
    match = index.match((A, B, C, D))
    assert [match.longest(mask) for mask in (0b001, 0b010, 0b100)] == [3, 2, 1]
    assert match.longest(0b111) == 3
    assert match.longest(0b110) == 2
    assert match.longest(0b1001) == 3  # a rank without any block takes nothing away
    assert match.longest(0b1000) == 0
    index.store(1, B, (C, D))
    assert index.match((A, B, C, D)).longest(0b111) == 4


def test_partial_blocks_are_held_by_some_and_not_by_all() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A, B))
    index.store(2, None, (X,))
    assert (index.usable_blocks(0b011), index.partial_blocks(0b011)) == (3, 1)
    assert (index.usable_blocks(0b111), index.partial_blocks(0b111)) == (4, 4)
    assert (index.usable_blocks(0b001), index.partial_blocks(0b001)) == (3, 0)
    assert (index.usable_blocks(0b1000), index.partial_blocks(0b1000)) == (0, 0)
    index.store(1, B, (C,))
    assert index.partial_blocks(0b011) == 0


def test_whole_chain_and_empty_chain() -> None:
    index = index_of(100)
    index.store(5, None, (A, B))
    assert index.match((A, B)).common(1 << 5) == 2
    assert index.match(()).common(1 << 5) == 0
    assert index_of(1).match((A,)).common(1) == 0


def test_stores_extend_a_chain_below_its_parent() -> None:
    index = index_of(100)
    index.store(0, None, (A,))
    index.store(0, A, (B, C))
    assert index.match((A, B, C)).common(1) == 3
    assert index.blocks_held(0) == 3


def test_storing_again_changes_nothing() -> None:
    index = index_of(100)
    index.store(0, None, (A, B))
    index.store(0, None, (A, B))
    assert (len(index), index.blocks_held(0)) == (2, 2)
    index.remove(0, (B, A))
    assert (len(index), index.blocks_held(0)) == (0, 0)


def test_leaf_first_removal_shortens_the_prefix() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.remove(0, (C,))
    assert index.match((A, B, C)).common(1) == 2
    assert len(index) == 2


def test_interior_removal_cuts_the_prefix_and_a_new_store_mends_it() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.remove(0, (B,))
    assert index.match((A, B, C)).common(1) == 1
    assert index.blocks_held(0) == 2
    index.store(0, A, (B,))
    assert index.match((A, B, C)).common(1) == 3


def test_a_node_that_nobody_holds_goes_with_its_last_child() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.remove(0, (A, B))
    assert len(index) == 3
    index.remove(0, (C,))
    assert len(index) == 0


def test_one_holder_leaves_the_other_stays() -> None:
    index = index_of(100)
    index.store(0, None, (A, B))
    index.store(1, None, (A, B))
    index.remove(0, (B, A))
    assert index.match((A, B)).common(0b10) == 2
    assert index.match((A, B)).common(0b01) == 0
    assert [holds(index, slot, A) for slot in (0, 1)] == [False, True]


def test_reset_forgets_one_rank_only() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A, X))
    index.reset(0b01)
    assert index.blocks_held(0) == 0
    assert index.match((A, B)).common(0b01) == 0
    assert index.match((A, X)).common(0b10) == 2
    assert len(index) == 2
    index.reset(0b10)
    assert len(index) == 0


def test_several_ranks_are_forgotten_together() -> None:
    index = index_of(100)
    for rank in range(3):
        index.store(rank, None, (A, B))
    index.reset(0b011)
    assert [index.blocks_held(rank) for rank in range(3)] == [0, 0, 2]
    assert index.partial_blocks(0b110) == 2


def test_unknown_parent_counts_once_the_gap_is_filled() -> None:
    index = index_of(100)
    index.store(0, B, (C, D))  # the events of A and B were lost
    assert index.match((A, B, C, D)).common(1) == 0
    assert index.blocks_held(0) == 2
    index.store(0, None, (A, B))
    assert index.match((A, B, C, D)).common(1) == 4
    assert index.blocks_held(0) == 4
    index.remove(0, (D, C, B, A))
    assert len(index) == 0


def test_a_filled_gap_is_a_prefix_again_and_outlives_leaves() -> None:
    index = index_of(3)
    index.store(0, B, (C,))
    index.store(0, None, (A, B))
    index.store(0, None, (X,))  # one too many: C goes, the oldest leaf
    index.store(0, None, (Y,))  # then X; A is no leaf, B extends it
    assert index.match((A, B)).common(1) == 2
    assert [holds(index, 0, block) for block in (C, X, Y)] == [False, False, True]


def test_removing_what_is_not_held_is_no_news() -> None:
    index = index_of(100)
    index.store(0, None, (A,))
    index.remove(1, (A,))
    index.remove(0, (X,))
    assert index.match((A,)).common(1) == 1


def test_a_hash_that_names_itself_as_parent_is_left_out() -> None:
    index = index_of(100)
    index.store(0, A, (A,))
    assert len(index) == 0


def test_full_index_gives_up_the_oldest_leaf_and_keeps_prefixes() -> None:
    index = index_of(4)
    index.store(0, None, (A, B))
    index.store(0, None, (X, Y))
    index.store(0, Y, (D,))
    assert len(index) == 4
    assert index.forgotten == 1
    assert index.match((A, B)).common(1) == 1  # the leaf B went, its prefix A is still good
    assert index.match((X, Y, D)).common(1) == 3
    assert index.blocks_held(0) == 4


def test_chain_longer_than_the_index_keeps_its_head() -> None:
    index = index_of(2)
    index.store(0, None, (A, B, C, D))
    assert len(index) == 2
    assert index.match((A, B, C, D)).common(1) == 2


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        index_of(0)


def test_the_path_of_a_node_and_what_lies_below_it() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(1, A, (X, Y))
    node = index.find(Y)
    assert node is not None
    assert index.path(node) == (A, X, Y)
    top = index.find(A)
    assert top is not None
    assert [n.block for n in top.below()] == [B, X]
    assert {n.block for n in index.held_below(top, 0b01)} == {B, C}
    assert {n.block for n in index.held_below(top, 0b11)} == {B, C, X, Y}
    index.remove(1, (Y, X))
    assert index.path(node) == ()
    assert [n.block for n in top.below()] == [B]


def test_the_deepest_known_node_of_a_chain() -> None:
    index = index_of(100)
    index.store(0, None, (A, B))
    for depth, expected in ((4, B), (2, B), (1, A), (0, None)):
        node = index.deepest((A, B, C, D), depth)
        assert (None if node is None else node.block) == expected
    assert index.deepest((X, Y), 2) is None


def test_ranks_that_hold_so_many_blocks() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(1, None, (A,))
    match = index.match((A, B, C))
    assert [match.holding(depth, 0b111) for depth in range(4)] == [0b111, 0b011, 0b001, 0b001]


def test_hashes_that_collide_never_close_a_path_on_itself() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, A, C))
    index.store(0, B, (A,))
    for block in (A, B, C):
        node = index.find(block)
        assert node is not None
        assert len(index.path(node)) <= 3
    index.remove(0, (A, B, C))
    assert len(index) == 0


def test_leaves_that_came_and_went_take_no_memory() -> None:
    index = index_of(10)
    for n in range(20_000):
        index.store(0, None, (BlockHash(n + 100),))
    assert len(index) == 10
    assert index.forgotten == 19_990
    assert len(index._leaves) < 2000


def test_a_block_takes_the_memory_that_is_counted_for_it() -> None:
    # What tracemalloc says, on a small index of the shape that the benchmark measures.
    measured = bytes_per_block(30_000, 64)
    assert 0.75 * NODE_BYTES < measured < 1.25 * NODE_BYTES


def test_the_garbage_collector_does_not_walk_the_index() -> None:
    index = index_of(100)
    index.store(0, None, (A, B, C))
    index.store(0, A, (X,))
    branching = index.find(A)
    assert branching is not None and isinstance(branching.children, dict)
    assert not any(map(gc.is_tracked, (branching, branching.children, index.find(C))))


def test_an_index_that_nobody_needs_lets_go_of_its_nodes() -> None:
    index = index_of(100)
    index.store(0, None, (A, B))
    node = index.find(B)
    assert node is not None and node.parent is not None
    del index
    assert node.parent is None


def test_the_cap_is_in_bytes() -> None:
    index = PrefixIndex(100 * NODE_BYTES + 1)
    index.store(0, None, tuple(BlockHash(n) for n in range(1, 300)))
    assert (len(index), index.bytes) == (100, 100 * NODE_BYTES)


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
        self.index = index_of(self.cap)
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

    @rule(block=st.sampled_from(BLOCKS), degree=st.sampled_from([1, 2]))
    def count(self, block: int, degree: int) -> None:
        """Counted where the path is known to end, which is where it was held and counted."""
        node = self.index.deepest(tuple(map(BlockHash, path_to(block))), len(path_to(block)))
        if node is not None:
            self.index.tallies.add(node, degree, accesses=1.0)

    @rule(slot=st.sampled_from(SLOTS), block=st.sampled_from(BLOCKS))
    def collide(self, slot: int, block: int) -> None:
        """A block that is named as its own parent is no news."""
        self.index.store(slot, BlockHash(block), (BlockHash(block),))

    @rule(slot=st.sampled_from(SLOTS))
    def reset(self, slot: int) -> None:
        self.index.reset(1 << slot)
        self.held[slot].clear()

    def known(self, slot: int) -> set[int]:
        nodes = ((block, self.index.find(BlockHash(block))) for block in BLOCKS)
        return {block for block, node in nodes if node is not None and node.holders >> slot & 1}

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
        known = [self.known(slot) for slot in SLOTS]
        for leaf in range(16, 32):
            path = path_to(leaf)
            match = self.index.match(tuple(map(BlockHash, path)))
            reach = []
            for mine in known:
                missing = (depth for depth, block in enumerate(path) if block not in mine)
                reach.append(next(missing, len(path)))
            for mask in range(1, 1 << len(SLOTS)):
                depths = [reach[slot] for slot in SLOTS if mask >> slot & 1]
                assert match.common(mask) == min(depths)
                assert match.longest(mask) == max(depths)

    @invariant()
    def masks_are_counted_right(self) -> None:
        known = [self.known(slot) for slot in SLOTS]
        for mask in range(1 << (len(SLOTS) + 1)):  # one slot more than there are ranks
            holdings = [known[s] if s in SLOTS else set() for s in range(4) if mask >> s & 1]
            some = set().union(*holdings)
            everywhere = set.intersection(*holdings) if holdings else set()
            assert self.index.usable_blocks(mask) == len(some)
            assert self.index.partial_blocks(mask) == len(some - everywhere)

    @invariant()
    def links_and_paths_agree(self) -> None:
        stack = [(root, (root.block,)) for root in self.index.roots()]
        paths = []
        while stack:
            node, path = stack.pop()
            assert self.index.path(node) == path
            assert self.index.find(node.block) is node
            paths.append(path)
            stack += [(child, (*path, child.block)) for child in node.below()]
        assert len(paths) == len(self.index)
        known = self.known(0) | self.known(2)
        for block in (1, 2, 5):
            node = self.index.find(BlockHash(block))
            if node is not None:
                below = {path[-1] for path in paths if block in path[:-1]}
                held = {n.block for n in self.index.held_below(node, 0b101)}
                assert held == below & known

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
