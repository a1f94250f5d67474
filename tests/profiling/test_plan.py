"""What is measured, in which order, on which composition."""

import pytest

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.profiling.plan import Plan, composition_for, prompts

PLAN = Plan(degrees=(1, 2, 4), prompts=((32, 0), (64, 16)), repetitions=3, seed=0, highest_id=249)


def test_prefixes_are_whole_blocks_and_too_long_prompts_are_left_out() -> None:
    found, left_out = prompts(
        (100, 1000), hit_ratios=(0.0, 0.5), cached_tokens=(40,), block_tokens=16, most_tokens=1500
    )
    assert found == ((100, 0), (100, 32), (100, 96), (1000, 0), (1000, 32))
    assert left_out == ((1000, 992),)


@pytest.mark.parametrize(
    ("lengths", "ratios", "cached"), [((0,), (), ()), ((1,), (1.0,), ()), ((1,), (), (-1,))]
)
def test_lengths_that_make_no_sense_are_refused(
    lengths: tuple[int, ...], ratios: tuple[float, ...], cached: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigurationError):
        prompts(lengths, hit_ratios=ratios, cached_tokens=cached, block_tokens=16, most_tokens=99)


def test_every_repetition_has_every_cell_in_an_order_of_its_own() -> None:
    orders = [PLAN.cells(repetition) for repetition in range(3)]
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(orders[0]) == 6 and PLAN.size == 18
    assert PLAN.cells(1) == orders[1]
    for order in orders:  # a degree at a time: each is a move
        degrees = [cell.degree for cell in order]
        assert degrees == sorted(degrees, key=degrees.index)


@pytest.mark.parametrize(
    ("degree", "size", "expected"),
    [(1, 4, "4x1"), (2, 4, "2x2"), (4, 4, "1x4"), (2, 3, "1x2,1x1"), (4, 6, "1x4,1x2")],
)
def test_the_block_at_rank_0_has_the_degree(degree: int, size: int, expected: str) -> None:
    assert composition_for(degree, size, (1, 2, 4)) == expected


def test_no_rank_is_left_over() -> None:
    with pytest.raises(ConfigurationError, match="2 of the pool's 6 ranks"):
        composition_for(4, 6, (4,))
