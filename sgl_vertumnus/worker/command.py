"""A regroup command, as every process of a pool must understand it."""

from collections.abc import Mapping
from dataclasses import dataclass

from vertumnus_patches.regroup_message import MalformedRegroup, Phase, read_regroup
from vertumnus_router.lattice import Block, CompositionError, lattice

from sgl_vertumnus.config import PoolConfig


@dataclass(frozen=True, slots=True)
class Regroup:
    """A phase of the move to ``blocks``, in rank order, every rank in exactly one, which begin
    with ``epoch``."""

    phase: Phase
    epoch: int
    blocks: tuple[Block, ...]

    def block_of(self, rank: int) -> Block:
        return next(block for block in self.blocks if rank in block)


def read_command(config: PoolConfig, knobs: Mapping[str, float]) -> Regroup:
    """The command in ``knobs``.

    Raises:
        MalformedRegroup: when it does not divide the pool into blocks of its lattice.
    """
    phase, epoch, pairs = read_regroup(knobs)
    try:
        blocks = tuple(Block(first, degree) for first, degree in pairs)
    except CompositionError as exc:
        raise MalformedRegroup(str(exc)) from exc
    known = set(lattice(config.size, config.degrees))
    if unknown := [block for block in blocks if block not in known]:
        raise MalformedRegroup(
            f"{unknown} not in the lattice of {config.size} ranks and degrees {config.degrees}"
        )
    if [rank for block in blocks for rank in block.ranks] != list(range(config.size)):
        raise MalformedRegroup(f"{blocks} does not use each of {config.size} ranks once")
    return Regroup(phase, epoch, blocks)
