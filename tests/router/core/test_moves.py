from collections import deque
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.core.moves import Move, adjacent, plan, surround
from vertumnus_router.lattice import Block, format_composition, parse_composition

LADDER = (1, 2, 4, 8)
Composition = tuple[Block, ...]


def way(current: str, target: str, size: int = 4, ladder: tuple[int, ...] = LADDER) -> list[str]:
    """The compositions on the way, both ends included."""
    moves = plan(
        parse_composition(current, size, ladder), parse_composition(target, size, ladder), ladder
    )
    return [current, *(format_composition(move.after) for move in moves)]


def test_nothing_to_do() -> None:
    assert way("2x1,1x2", "2x1,1x2") == ["2x1,1x2"]


def test_a_split_and_a_merge_one_degree_at_a_time() -> None:
    assert way("1x4", "4x1") == ["1x4", "2x2", "2x1,1x2", "4x1"]
    assert way("4x1", "1x4") == ["4x1", "1x2,2x1", "2x2", "1x4"]


def test_what_need_not_move_stays() -> None:
    assert way("2x1,1x2", "1x2,2x1") == ["2x1,1x2", "4x1", "1x2,2x1"]  # capacity first
    assert way("2x2,1x4", "1x4,1x4", 8) == ["2x2,1x4", "2x4"]


def test_the_ladder_may_have_gaps() -> None:
    assert way("1x4", "4x1", ladder=(1, 4)) == ["1x4", "4x1"]


def test_a_pool_that_no_large_block_fills() -> None:
    assert way("1x4,1x2", "6x1", 6) == [
        "1x4,1x2",
        "3x2",
        "2x1,2x2",
        "4x1,1x2",
        "6x1",
    ]


def test_a_move_knows_what_changes() -> None:
    (move,) = plan(
        parse_composition("2x1,1x2", 4, LADDER), parse_composition("2x2", 4, LADDER), LADDER
    )
    assert (move.leaving, move.arriving) == ((Block(0, 1), Block(1, 1)), (Block(0, 2),))
    assert move.merges
    assert not Move(move.after, move.before).merges
    assert str(move) == "2x1,1x2 to 2x2"


def test_other_ranks_and_other_degrees_are_refused() -> None:
    four = parse_composition("1x4", 4, LADDER)
    with pytest.raises(ValueError, match="not the ranks of one pool"):
        plan(four, parse_composition("1x2", 2, LADDER), LADDER)
    with pytest.raises(ValueError, match="cannot be split on the ladder 2, 8"):
        plan(four, parse_composition("2x2", 4, LADDER), (2, 8))


def steps(current: str, size: int = 4, ladder: tuple[int, ...] = LADDER) -> list[str]:
    blocks = parse_composition(current, size, ladder)
    return [format_composition(move.after) for move in adjacent(blocks, ladder)]


def test_every_move_of_one_step() -> None:
    assert steps("4x1") == ["1x2,2x1", "2x1,1x2"]
    assert steps("2x2") == ["2x1,1x2", "1x2,2x1", "1x4"]
    assert steps("2x1,1x2") == ["2x2", "4x1"]
    assert steps("1x4") == ["2x2"]
    assert steps("1x1", 1) == []


def test_steps_follow_the_ladder_and_stay_within_the_pool() -> None:
    assert steps("4x1", ladder=(1, 4)) == ["1x4"]
    assert steps("1x4", ladder=(1, 4)) == ["4x1"]
    assert steps("1x4", ladder=(4,)) == []
    assert steps("3x2", 6) == ["2x1,2x2", "1x2,2x1,1x2", "2x2,2x1", "1x4,1x2"]


def test_a_step_is_a_plan_of_one_move() -> None:
    for text in ("4x1", "2x2", "2x1,1x2", "1x2,2x1", "1x4"):
        current = parse_composition(text, 4, LADDER)
        for move in adjacent(current, LADDER):
            assert plan(current, move.after, LADDER) == (move,)


def compositions(first: int, degree: int, ladder: tuple[int, ...]) -> list[Composition]:
    """Every way to fill ``degree`` ranks from ``first`` on."""
    at = ladder.index(degree)
    whole: list[Composition] = [(Block(first, degree),)]
    if at == 0:
        return whole
    step = ladder[at - 1]
    parts = (compositions(f, step, ladder) for f in range(first, first + degree, step))
    return whole + [sum(choice, ()) for choice in product(*parts)]


def neighbours(blocks: Composition, ladder: tuple[int, ...]) -> set[Composition]:
    """Every composition one adjacent move away, by definition."""
    found = set()
    for small, large in pairwise(ladder):
        for first in range(0, 8, large):
            one = {Block(first, large)}
            many = {Block(f, small) for f in range(first, first + large, small)}
            for old, new in ((one, many), (many, one)):
                if old <= set(blocks):
                    found.add(tuple(sorted(set(blocks) - old | new, key=lambda b: b.first)))
    return found


def distance(start: Composition, end: Composition, ladder: tuple[int, ...]) -> int:
    seen, queue = {start: 0}, deque([start])
    while queue:
        at = queue.popleft()
        if at == end:
            return seen[at]
        for near in neighbours(at, ladder):
            if near not in seen:
                seen[near] = seen[at] + 1
                queue.append(near)
    raise AssertionError("no way")


@given(data=st.data(), ladder=st.sampled_from([(1, 2, 4, 8), (1, 4, 8), (2, 8), (1, 8)]))
@settings(max_examples=60, deadline=None)
def test_every_way_is_adjacent_and_the_shortest(
    data: st.DataObject, ladder: tuple[int, ...]
) -> None:
    every = compositions(0, 8, ladder)
    start, end = data.draw(st.sampled_from(every)), data.draw(st.sampled_from(every))
    moves = plan(start, end, ladder)
    at = start
    for move in moves:
        assert move.before == at
        assert move.after in neighbours(at, ladder)
        at = move.after
    assert at == end
    assert len(moves) == distance(start, end, ladder)


@pytest.mark.parametrize(
    ("current", "block", "expected"),
    [
        ("4x1", Block(0, 1), "4x1"),
        ("4x1", Block(2, 2), "2x1,1x2"),
        ("4x1", Block(0, 4), "1x4"),
        ("1x4", Block(3, 1), "1x2,2x1"),
        ("1x4", Block(0, 2), "2x2"),
        ("2x1,1x2", Block(0, 4), "1x4"),
        ("1x2,2x1", Block(2, 2), "2x2"),
    ],
)
def test_the_nearest_composition_with_a_block(current: str, block: Block, expected: str) -> None:
    blocks = parse_composition(current, 4, (1, 2, 4))
    found = surround(blocks, block, (1, 2, 4))
    assert format_composition(found) == expected
    assert sorted(rank for one in found for rank in one.ranks) == [0, 1, 2, 3]


def test_a_block_off_the_ladder_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        surround((Block(0, 4),), Block(0, 1), (2, 4))
