"""Which ranks take requests: the controller's picture of the composition. Pure."""

from collections.abc import Iterable

from vertumnus_router.lattice import Block


class Leaders:
    """Starts with every rank alone; follows regroup commands and deaths."""

    def __init__(self, size: int) -> None:
        self._blocks = [Block(rank, 1) for rank in range(size)]
        self._dead: set[int] = set()

    def regroup(self, blocks: Iterable[Block]) -> None:
        """The composition that was just commanded."""
        self._blocks = sorted(blocks)

    def lose(self, rank: int) -> Block | None:
        """A rank died; the block that fails with it, unless it had failed before."""
        block = self._block_of(rank)
        failed_now = not self._is_failed(block)
        self._dead.add(rank)
        return block if failed_now else None

    @property
    def alive(self) -> list[int]:
        """Leaders of the blocks whose ranks are all alive, ascending."""
        return [block.leader for block in self._blocks if not self._is_failed(block)]

    @property
    def answering(self) -> int:
        """How many ranks answer a control message: all of the blocks that have not failed."""
        return sum(block.degree for block in self._blocks if not self._is_failed(block))

    def leader_for(self, rank: int) -> int | None:
        """Who takes a request that names ``rank``; None when its block has failed."""
        block = self._block_of(rank)
        return None if self._is_failed(block) else block.leader

    def _block_of(self, rank: int) -> Block:
        for block in self._blocks:
            if rank in block:
                return block
        raise ValueError(f"the pool has no rank {rank}")

    def _is_failed(self, block: Block) -> bool:
        return any(rank in self._dead for rank in block.ranks)
