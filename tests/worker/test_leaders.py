"""Which ranks take requests, against a naive model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vertumnus_router.lattice import Block

from sgl_vertumnus.worker.leaders import Leaders

LADDER = (1, 2, 4)


def layouts(size: int) -> st.SearchStrategy[tuple[Block, ...]]:
    """Every way to divide ``size`` ranks into aligned blocks."""

    def lay(degrees: list[int]) -> tuple[Block, ...]:
        blocks: list[Block] = []
        at = 0
        for degree in [*degrees, *([1] * size)]:
            while degree > 1 and (at % degree or at + degree > size):
                degree //= 2
            if at < size:
                blocks.append(Block(at, degree))
                at += degree
        return tuple(blocks)

    return st.lists(st.sampled_from(LADDER), max_size=size).map(lay)


class LeadersMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 9))
    def start(self, size: int) -> None:
        self.size = size
        self.leaders = Leaders(size)
        self.block_of = {rank: [rank] for rank in range(size)}
        self.dead: set[int] = set()

    @rule(data=st.data())
    def regroup(self, data: st.DataObject) -> None:
        blocks = data.draw(layouts(self.size))
        self.leaders.regroup(data.draw(st.permutations(blocks)))
        self.block_of = {rank: list(block.ranks) for block in blocks for rank in block.ranks}

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.size - 1))
        ranks = self.block_of[rank]
        failed_before = bool(self.dead & set(ranks))
        if not failed_before:
            self.dead |= set(ranks)
        expected = None if failed_before else Block(ranks[0], len(ranks))
        assert self.leaders.lose(rank) == expected

    @invariant()
    def leaders_are_those_of_whole_blocks(self) -> None:
        whole = [r for r in range(self.size) if not self.dead & set(self.block_of[r])]
        assert self.leaders.serving == whole
        assert self.leaders.alive == sorted({self.block_of[rank][0] for rank in whole})
        for rank in range(self.size):
            expected = self.block_of[rank][0] if rank in whole else None
            assert self.leaders.leader_for(rank) == expected
            ranks = self.block_of[rank]
            assert self.leaders.is_failed(Block(ranks[0], len(ranks))) == (rank not in whole)


TestLeaders = LeadersMachine.TestCase


@given(st.integers(1, 8), st.integers())
def test_a_rank_that_does_not_exist_is_an_error(size: int, rank: int) -> None:
    leaders = Leaders(size)
    if 0 <= rank < size:
        assert leaders.leader_for(rank) == rank
        return
    with pytest.raises(ValueError, match=f"no rank {rank}"):
        leaders.leader_for(rank)
    with pytest.raises(ValueError, match=f"no rank {rank}"):
        leaders.lose(rank)
