"""Which rank holds which KV block: one index for all ranks of all pools.

SGLang's block hash chains over the whole prefix, so a hash names one path from the root and a
``hash -> holders`` table is a radix tree without edges to walk. Parent links are kept for one
purpose: to give up leaves before the prefixes they extend when the index is full.

Holders are a bit mask of rank slots (``Membership`` hands the slots out). A worker holds a
prefix iff every rank of its block does, so a change of composition touches no node.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vertumnus_router.core.types import BlockHash


class _Node:
    __slots__ = ("children", "holders", "parent")

    def __init__(self, parent: BlockHash | None) -> None:
        self.parent = parent
        self.holders = 0
        self.children = 0


class PrefixMatch:
    """How far down one chain of blocks each rank reaches, in blocks."""

    __slots__ = ("_cuts", "_length")

    def __init__(self, length: int, cuts: list[tuple[int, int]]) -> None:
        self._length = length
        self._cuts = cuts  # (depth, mask of the ranks that hold exactly depth blocks), ascending

    def depth(self, ranks: int) -> int:
        """Blocks of the chain that every rank in the mask ``ranks`` holds, from the first on."""
        for depth, stopped in self._cuts:
            if ranks & stopped:
                return depth
        return self._length


class PrefixIndex:
    """The forest of block hashes with its holders.

    A node lives while a rank holds it or a node below it lives; the first event that names an
    unknown parent (events were lost) makes the parent as a node that nobody holds. Above
    ``max_nodes`` the oldest leaves go, held or not: the index then underestimates, never lies.
    """

    def __init__(self, max_nodes: int) -> None:
        if max_nodes < 1:
            raise ValueError(f"the index needs room for at least one node, not {max_nodes}")
        self._max_nodes = max_nodes
        self._nodes: dict[BlockHash, _Node] = {}
        self._leaves: OrderedDict[BlockHash, None] = OrderedDict()
        self._held: dict[int, int] = {}
        #: grows with every change; a cached match is good while it stands still
        self.version = 0
        #: held nodes that were given up because the index was full
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def blocks_held(self, slot: int) -> int:
        """How many blocks the rank in ``slot`` holds, as far as the index knows."""
        return self._held.get(slot, 0)

    def match(self, blocks: Sequence[BlockHash]) -> PrefixMatch:
        """Walk the chain once, until no rank holds further."""
        cuts: list[tuple[int, int]] = []
        alive = -1  # every slot there could be
        for depth, node in enumerate(map(self._nodes.get, blocks)):
            held = alive & node.holders if node is not None else 0
            if held != alive:
                cuts.append((depth, alive & ~held))
                if not held:
                    break
                alive = held
        return PrefixMatch(len(blocks), cuts)

    def store(self, slot: int, parent: BlockHash | None, blocks: Iterable[BlockHash]) -> None:
        """The rank in ``slot`` holds ``blocks``, a chain below ``parent`` (None: the root)."""
        bit = 1 << slot
        for block in blocks:
            if block == parent:
                continue  # two 64-bit hashes collided; a node cannot be its own parent
            node = self._nodes.get(block)
            if node is None:
                node = self._add(block, parent)
            elif node.parent is None and parent is not None:
                self._link(node, parent)
            if not node.holders & bit:
                node.holders |= bit
                self._held[slot] = self._held.get(slot, 0) + 1
            parent = block
        self._give_up_leaves()
        self.version += 1

    def remove(self, slot: int, blocks: Iterable[BlockHash]) -> None:
        """The rank in ``slot`` no longer holds ``blocks``; unknown ones are no news."""
        bit = 1 << slot
        for block in blocks:
            node = self._nodes.get(block)
            if node is None or not node.holders & bit:
                continue
            node.holders &= ~bit
            self._held[slot] -= 1
            if not node.holders and not node.children:
                self._drop(block, node)
        self.version += 1

    def reset(self, slot: int) -> None:
        """Nothing is known of the rank in ``slot`` any more. Visits every node."""
        if self._held.pop(slot, 0):
            bit = 1 << slot
            emptied: list[BlockHash] = []
            for block, node in self._nodes.items():
                if node.holders & bit:
                    node.holders &= ~bit
                    if not node.holders:
                        emptied.append(block)
            for block in emptied:
                gone = self._nodes.get(block)
                if gone is not None and not gone.children:
                    self._drop(block, gone)
        self.version += 1

    def _add(self, block: BlockHash, parent: BlockHash | None) -> _Node:
        node = self._nodes[block] = _Node(None)
        self._leaves[block] = None
        if parent is not None:
            self._link(node, parent)
        return node

    def _link(self, node: _Node, parent: BlockHash) -> None:
        above = self._nodes.get(parent)
        if above is None:
            above = self._add(parent, None)
        above.children += 1
        node.parent = parent
        self._leaves.pop(parent, None)

    def _drop(self, block: BlockHash, node: _Node) -> None:
        """Take out a childless node, then every ancestor that it alone kept alive."""
        while True:
            del self._nodes[block]
            self._leaves.pop(block, None)
            if node.parent is None:
                return
            block = node.parent
            node = self._nodes[block]
            node.children -= 1
            if node.children:
                return
            if node.holders:
                self._leaves[block] = None
                return

    def _give_up_leaves(self) -> None:
        while len(self._nodes) > self._max_nodes and self._leaves:
            block = next(iter(self._leaves))
            node = self._nodes[block]
            slot, holders = 0, node.holders
            while holders:
                if holders & 1:
                    self._held[slot] -= 1
                holders >>= 1
                slot += 1
            node.holders = 0
            self.forgotten += 1
            self._drop(block, node)
