"""A regroup command, as every process of a pool understands it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches.regroup_message import MalformedRegroup, Phase, regroup_knobs
from vertumnus_router.lattice import Block, CompositionError, lattice

from sgl_vertumnus.worker.command import read_command
from tests.worker.configs import config_of

CONFIG = config_of(4, (1, 2, 4))


@pytest.mark.parametrize("phase", Phase)
def test_a_command_names_the_block_of_every_rank(phase: Phase) -> None:
    command = read_command(CONFIG, regroup_knobs(phase, 3, [(2, 2), (0, 1), (1, 1)]))
    assert (command.phase, command.epoch) == (phase, 3)
    assert command.blocks == (Block(0, 1), Block(1, 1), Block(2, 2))
    assert [command.block_of(rank).leader for rank in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([], "does not use each of 4 ranks once"),
        ([(0, 2)], "does not use each of 4 ranks once"),
        ([(0, 2), (0, 1), (2, 2)], "does not use each of 4 ranks once"),
        ([(0, 4), (2, 2)], "does not use each of 4 ranks once"),
        ([(0, 2), (2, 2), (4, 2)], "not in the lattice"),
        ([(0, 8)], "not in the lattice of 4 ranks"),
        ([(1, 2), (0, 1), (3, 1)], "starts at a multiple of 2"),
        ([(0, 3), (3, 1)], "a degree is a power of two"),
        ([(0, 0), (2, 2)], "a degree is a power of two"),
    ],
)
def test_what_does_not_divide_the_pool_is_refused(
    blocks: list[tuple[int, int]], reason: str
) -> None:
    with pytest.raises(MalformedRegroup, match=reason):
        read_command(CONFIG, regroup_knobs(Phase.COMMIT, 1, blocks))


@pytest.mark.parametrize(("degrees", "blocks"), [((1, 4), [(0, 2), (2, 2)]), ((2, 4), [(0, 1)])])
def test_a_degree_that_was_not_launched_is_refused(
    degrees: tuple[int, ...], blocks: list[tuple[int, int]]
) -> None:
    with pytest.raises(MalformedRegroup, match=r"not in the lattice of .* degrees"):
        read_command(config_of(4, degrees), regroup_knobs(Phase.COMMIT, 1, blocks))


@given(
    st.lists(st.tuples(st.integers(-1, 8), st.integers(-1, 9)), max_size=5),
    st.sampled_from([(1,), (1, 2), (2, 4), (1, 2, 4)]),
)
def test_every_command_divides_the_pool_or_is_refused(
    pairs: list[tuple[int, int]], degrees: tuple[int, ...]
) -> None:
    config = config_of(4, degrees, ports=CONFIG.ports)
    try:
        command = read_command(config, regroup_knobs(Phase.COMMIT, 1, pairs))
    except MalformedRegroup:
        # Written otherwise: some pair is no block of the lattice, or they do not tile.
        try:
            blocks = [Block(first, degree) for first, degree in dict(pairs).items()]
        except CompositionError:
            return
        ranks = sorted(rank for block in blocks for rank in block.ranks)
        assert ranks != [0, 1, 2, 3] or not set(blocks) <= set(lattice(4, degrees))
        return
    assert sorted(r for b in command.blocks for r in b.ranks) == [0, 1, 2, 3]
    assert set(command.blocks) <= set(lattice(4, degrees))
