"""Which ranks take requests: the controller's picture of the composition. Pure."""

from collections.abc import Iterable

from vertumnus_router.lattice import Block


class Leaders:
    """Starts with every rank alone; follows the compositions and the failures of blocks."""

    def __init__(self, size: int) -> None:
        self._blocks = [Block(rank, 1) for rank in range(size)]
        self._lost: set[int] = set()

    def regroup(self, blocks: Iterable[Block]) -> None:
        """From now on these blocks take the requests."""
        self._blocks = sorted(blocks)

    def lose(self, rank: int) -> Block | None:
        """A rank cannot go on, nor can its block: that block, unless it had failed before."""
        block = self._block_of(rank)
        if self.is_failed(block):
            return None
        self._lost.update(block.ranks)
        return block

    @property
    def alive(self) -> list[int]:
        """Leaders of the blocks that have not failed, ascending."""
        return [block.leader for block in self._blocks if not self.is_failed(block)]

    @property
    def serving(self) -> list[int]:
        """All ranks of the blocks that have not failed, ascending."""
        return [rank for block in self._blocks if not self.is_failed(block) for rank in block.ranks]

    def leader_for(self, rank: int) -> int | None:
        """Who takes the requests whose home is ``rank``; None when its block has failed."""
        block = self._block_of(rank)
        return None if self.is_failed(block) else block.leader

    def is_failed(self, block: Block) -> bool:
        """Whether a rank of ``block`` is lost."""
        return any(rank in self._lost for rank in block.ranks)

    def _block_of(self, rank: int) -> Block:
        for block in self._blocks:
            if rank in block:
                return block
        raise ValueError(f"the pool has no rank {rank}")
