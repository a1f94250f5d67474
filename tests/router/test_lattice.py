"""Blocks and compositions."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from vertumnus_router.lattice import (
    Block,
    CompositionError,
    check_degrees,
    format_composition,
    lattice,
    parse_composition,
)

LADDER = (1, 2, 4, 8)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, tuple[Block, ...]]:
    """A pool size and blocks that fill it, each where it is aligned."""
    blocks: list[Block] = []
    at = 0
    for degree in draw(st.lists(st.sampled_from(LADDER), min_size=1, max_size=8)):
        fits = max(d for d in LADDER if d <= degree and at % d == 0)
        blocks.append(Block(at, fits))
        at += fits
    return at, tuple(blocks)


@given(tilings())
def test_format_and_parse_are_inverse(tiling: tuple[int, tuple[Block, ...]]) -> None:
    size, blocks = tiling
    assert parse_composition(format_composition(blocks), size, LADDER) == blocks


@given(tilings())
def test_every_rank_is_used_once(tiling: tuple[int, tuple[Block, ...]]) -> None:
    size, blocks = tiling
    parsed = parse_composition(format_composition(blocks), size, LADDER)
    assert [rank for block in parsed for rank in block.ranks] == list(range(size))
    assert all(block.leader == block.first == min(block.ranks) for block in parsed)


@given(tilings(), st.randoms(use_true_random=False))
def test_format_does_not_depend_on_the_order(
    tiling: tuple[int, tuple[Block, ...]], source: "object"
) -> None:
    _, blocks = tiling
    mixed = list(blocks)
    source.shuffle(mixed)  # type: ignore[attr-defined]
    assert format_composition(mixed) == format_composition(blocks)


@given(
    text=st.text(alphabet="0123456789x, -X", max_size=12)
    | st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9)).map(lambda t: f"{t[0]}x{t[1]}"),
        min_size=1,
        max_size=4,
    ).map(",".join),
    size=st.integers(1, 16),
    degrees=st.sets(st.sampled_from(LADDER), min_size=1),
)
def test_any_text_is_a_tiling_or_refused(text: str, size: int, degrees: set[int]) -> None:
    try:
        blocks = parse_composition(text, size, sorted(degrees))
    except CompositionError as refusal:
        assert str(refusal)
        return
    assert [rank for block in blocks for rank in block.ranks] == list(range(size))
    assert {block.degree for block in blocks} <= degrees


@pytest.mark.parametrize(
    ("text", "size", "degrees", "reason"),
    [
        ("", 4, (1, 2), "COUNTxDEGREE"),
        ("\N{SUPERSCRIPT TWO}x1", 4, (1, 2), "COUNTxDEGREE"),
        ("9" * 5000 + "x1", 4, (1, 2), "COUNTxDEGREE"),
        ("999999999999x1", 4, (1, 2), "uses 999999999999 rank"),
        ("4", 4, (1, 2), "COUNTxDEGREE"),
        ("2x", 4, (1, 2), "COUNTxDEGREE"),
        ("2x1,", 2, (1, 2), "COUNTxDEGREE"),
        ("-1x1", 4, (1, 2), "COUNTxDEGREE"),
        ("1x4", 4, (1, 2), "not among --cp-degrees 1,2"),
        ("1x1,1x2,1x1", 4, (1, 2), "start at rank 1"),
        ("2x1", 4, (1, 2), r"uses 2 rank\(s\), the pool has 4"),
        ("3x2", 4, (1, 2), r"uses 6 rank\(s\), the pool has 4"),
    ],
)
def test_refusals_say_why(text: str, size: int, degrees: tuple[int, ...], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        parse_composition(text, size, degrees)


@pytest.mark.parametrize(
    ("size", "degrees", "reason"),
    [
        (4, (), "at least one"),
        (4, (0,), "power of two"),
        (4, (-2,), "power of two"),
        (4, (1, 3), "power of two"),
        (4, (1, 8), "larger than the pool of 4"),
    ],
)
def test_ladders_that_do_not_fit_are_refused(
    size: int, degrees: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(CompositionError, match=reason):
        check_degrees(size, degrees)


def test_a_ladder_is_sorted_and_without_doubles() -> None:
    assert check_degrees(8, (4, 1, 4, 2)) == (1, 2, 4)


@given(st.integers(-4, 20), st.integers(-4, 20))
def test_a_block_is_aligned_or_refused(first: int, degree: int) -> None:
    right = degree in (1, 2, 4, 8, 16) and first >= 0 and first % degree == 0
    if right:
        assert [r in Block(first, degree) for r in range(-1, 40)] == [
            first <= r < first + degree for r in range(-1, 40)
        ]
    else:
        with pytest.raises(CompositionError):
            Block(first, degree)


@given(st.integers(1, 33), st.sets(st.sampled_from(LADDER), min_size=1))
def test_the_lattice_holds_every_aligned_block(size: int, degrees: set[int]) -> None:
    assume(max(degrees) <= size)
    blocks = lattice(size, sorted(degrees))
    assert set(blocks) == {
        Block(first, degree)
        for degree in degrees
        for first in range(size)
        if first % degree == 0 and first + degree <= size
    }
    assert len(set(blocks)) == len(blocks)
    assert [block.degree for block in blocks] == sorted(block.degree for block in blocks)
