"""The KV cache of one simulated rank, in whole blocks, as SGLang's tree keeps it.

What a request uses is pinned. The rest goes when room is needed: first the copies that another
rank of the block keeps (the home of a request keeps, the others hold surplus), then the least
recently used. A path is always used from its end to its root, so a block never goes before those
below it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from vertumnus_router.core.types import BlockHash

_Order = OrderedDict[BlockHash, None]


class RankCache:
    """``capacity`` blocks, some of them reserved for what is being computed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._pins: dict[BlockHash, int] = {}
        self._keeps: set[BlockHash] = set()  # of the pinned ones, those that stay as kept
        self._kept: _Order = OrderedDict()  # least recently used first
        self._surplus: _Order = OrderedDict()
        self._parents: dict[BlockHash, BlockHash | None] = {}  # of all that are here

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._parents

    @property
    def pinned(self) -> int:
        """How many blocks are pinned."""
        return len(self._pins)

    def unpinned(self, blocks: Sequence[BlockHash]) -> int:
        """How many of the blocks are not pinned."""
        return len(blocks) - sum(map(self._pins.__contains__, blocks))

    def held(self, blocks: Sequence[BlockHash]) -> int:
        """How many blocks of the chain are here, from the first on."""
        here = self._parents
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in here:
                low = middle + 1
            else:
                high = middle
        return low

    def fits(self, blocks: int) -> bool:
        """Whether so many blocks more could be reserved."""
        return len(self._pins) + self.reserved + blocks <= self.capacity

    def pin(self, blocks: Sequence[BlockHash], keep: bool) -> None:
        """Nothing of the chain, all of which is here, goes until it is unpinned as often."""
        pins, keeps = self._pins, self._keeps
        for block in blocks:
            count = pins.get(block)
            if count is None:
                pins[block] = 1
                if block in self._kept:
                    del self._kept[block]
                    keeps.add(block)
                else:
                    del self._surplus[block]
            else:
                pins[block] = count + 1
        if keep:
            keeps.update(blocks)

    def unpin(self, blocks: Sequence[BlockHash]) -> None:
        """Undo one ``pin``, or the pin of ``fill``: the chain has just been used."""
        pins, keeps = self._pins, self._keeps
        for block in reversed(blocks):
            count = pins[block]
            if count > 1:
                pins[block] = count - 1
                continue
            del pins[block]
            if block in keeps:
                keeps.discard(block)
                self._kept[block] = None
            else:
                self._surplus[block] = None

    def reserve(self, blocks: int) -> list[BlockHash]:
        """Make room for so many blocks, which must fit; what had to go for it."""
        self.reserved += blocks
        gone: list[BlockHash] = []
        for _ in range(len(self) + self.reserved - self.capacity):
            order = self._surplus or self._kept
            block, _ = order.popitem(last=False)
            del self._parents[block]
            gone.append(block)
        return gone

    def unreserve(self, blocks: int) -> None:
        self.reserved -= blocks

    def fill(self, parent: BlockHash | None, blocks: Sequence[BlockHash], keep: bool) -> None:
        """Blocks that were reserved, a chain below ``parent`` (None: the root), are computed: here,
        and pinned. Where another request has computed the same meanwhile, one of the two goes."""
        self.reserved -= len(blocks)
        pins, parents = self._pins, self._parents
        for block in blocks:
            if block in parents:
                self.pin((block,), keep)
            else:
                pins[block] = 1
                parents[block] = parent
                if keep:
                    self._keeps.add(block)
            parent = block

    def drop(self, blocks: Sequence[BlockHash]) -> bool:
        """Give up the blocks, all of them or, where one is in use, not here or above others that
        stay, none. Looks at every block that is here."""
        if any(block in self._pins or block not in self for block in blocks):
            return False
        named = set(blocks)
        if any(above in named and block not in named for block, above in self._parents.items()):
            return False
        for block in blocks:
            order = self._kept if block in self._kept else self._surplus
            del order[block], self._parents[block]
        return True
