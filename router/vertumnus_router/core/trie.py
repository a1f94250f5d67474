"""Which rank holds which KV block: one index for all ranks of all pools.

SGLang's block hash chains over the whole prefix, so a hash names one path from the root, and a
``hash -> node`` table answers a match without walking edges. Nodes are linked to their parents
and children, for the path of a node and for what lies below it.

Holders are a bit mask of rank slots (``Membership`` hands the slots out), so a change of
composition touches no node. A worker can use a prefix that any one of its ranks holds: the
others copy from it what they lack, on first use.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Union

import msgspec

from vertumnus_router.core.tally import Tallies, Tally
from vertumnus_router.core.types import BlockHash

#: Bytes of one block in the index, its share of the tables included, as measured on CPython 3.11.
NODE_BYTES = 144


class Node(msgspec.Struct, eq=False, gc=False):
    """One block. ``parent`` is None once the node has left the index.

    ``holders`` is one shared object for all nodes with the same holders. ``children`` is the child
    itself where there is one, which is the rule, and a dict, for its order, where there are more.

    The garbage collector knows nothing of nodes: to walk a million of them takes it 200 ms, in
    which the event loop stands still. So who lets go of one has to unlink it.
    """

    block: BlockHash
    parent: Union["Node", None]
    holders: int
    children: Union["Node", dict["Node", None], None] = None
    tally: Tally | None = None

    def below(self) -> Iterable["Node"]:
        """Its children, oldest first."""
        children = self.children
        if children is None:
            return ()
        return (children,) if isinstance(children, Node) else children


class PrefixMatch:
    """How far down one chain of blocks each rank reaches, in blocks."""

    __slots__ = ("_asked", "_cuts", "_each", "_length")

    def __init__(self, length: int, cuts: list[tuple[int, int]]) -> None:
        self._length = length
        self._cuts = cuts  # (depth, mask of the ranks that hold exactly depth blocks), ascending
        self._asked: tuple[int, ...] = ()
        self._each: list[int] = []

    def common(self, ranks: int) -> int:
        """Blocks of the chain that every rank in the mask ``ranks`` holds, from the first on."""
        for depth, stopped in self._cuts:
            if ranks & stopped:
                return depth
        return self._length

    def longest(self, ranks: int) -> int:
        """The same for the one rank in ``ranks`` that holds the most."""
        for depth, stopped in self._cuts:
            ranks &= ~stopped
            if not ranks:
                return depth
        return self._length

    def longest_each(self, masks: tuple[int, ...]) -> list[int]:
        """``longest`` of every mask, not to be changed. The last answer is remembered: the same
        masks are asked about each time that a waiting request is priced."""
        if self._asked is not masks:
            self._asked = masks
            # Most masks end at the first cut.
            depth, stopped = self._cuts[0] if self._cuts else (self._length, -1)
            self._each = [self.longest(m) if m & ~stopped else depth for m in masks]
        return self._each

    def holding(self, depth: int, ranks: int) -> int:
        """Which of ``ranks`` hold at least the first ``depth`` blocks."""
        for at, stopped in self._cuts:
            if at >= depth:
                break
            ranks &= ~stopped
        return ranks


class PrefixIndex:
    """The forest of block hashes with its holders.

    A node lives while a rank holds it or a node below it lives; the first event that names an
    unknown parent (events were lost) makes the parent as a node that nobody holds. Above
    ``max_bytes`` the oldest leaves go: the index then underestimates, never lies. (A leaf that
    nobody holds is gone already.)
    """

    def __init__(self, max_bytes: int, tallies: Tallies | None = None) -> None:
        self._root = Node(BlockHash(0), None, 0)
        self._nodes: dict[BlockHash, Node] = {}
        self._max_nodes = max_bytes // NODE_BYTES
        if self._max_nodes < 1:
            raise ValueError(f"the index needs room for at least one node, not {max_bytes} bytes")
        self.tallies = Tallies() if tallies is None else tallies
        self._leaves: deque[Node] = deque()  # became one in this order; many are none any more
        self._by_holders: dict[int, int] = {}  # held nodes by their mask of holders
        self._masks: dict[int, int] = {0: 0}  # every mask in use, for sharing
        #: grows with every change; a cached match is good while it stands still
        self.version = 0
        #: held nodes that were given up because the index was full
        self.forgotten = 0

    def __del__(self) -> None:
        # Parents and children hold on to each other.
        self._root.children = None
        for node in self._nodes.values():
            node.parent = node.children = None

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def bytes(self) -> int:
        """Memory of the nodes, estimated."""
        return len(self._nodes) * NODE_BYTES

    def blocks_held(self, slot: int) -> int:
        """How many blocks the rank in ``slot`` holds, as far as the index knows."""
        return self.usable_blocks(1 << slot)

    def usable_blocks(self, ranks: int) -> int:
        """Blocks that at least one rank in the mask ``ranks`` holds."""
        return sum(count for holders, count in self._by_holders.items() if holders & ranks)

    def partial_blocks(self, ranks: int) -> int:
        """Blocks that some ranks in the mask hold and others do not. Costs as many steps as
        there are different sets of holders, however many blocks there are."""
        return sum(
            count
            for holders, count in self._by_holders.items()
            if holders & ranks and ranks & ~holders
        )

    def match(self, blocks: Sequence[BlockHash]) -> PrefixMatch:
        """How far each rank holds the chain."""
        known = self._known(blocks, len(blocks))
        holders: list[tuple[int, int]] = []  # (depth of the last block that has them, mask)
        if known:
            # Up along the links, which is cheaper than looking each block up.
            depth, last = known, -1
            at, root = self._nodes[blocks[known - 1]], self._root
            while at is not root:
                if at.holders is not last:
                    last = at.holders
                    holders.append((depth, last))
                depth -= 1
                assert at.parent is not None
                at = at.parent
            if depth:
                # Not the chain that it should be: the events of blocks in between were lost.
                return self._match_each(blocks)
        cuts: list[tuple[int, int]] = []
        alive, depth = -1, 0  # every slot there could be
        for end, mask in reversed(holders):
            held = alive & mask
            if held != alive:
                cuts.append((depth, alive & ~held))
                if not held:
                    return PrefixMatch(len(blocks), cuts)
                alive = held
            depth = end
        if known < len(blocks):
            cuts.append((known, alive))
        return PrefixMatch(len(blocks), cuts)

    def _match_each(self, blocks: Sequence[BlockHash]) -> PrefixMatch:
        """The same for a chain that the index knows in pieces."""
        cuts: list[tuple[int, int]] = []
        alive = -1
        for depth, node in enumerate(map(self._nodes.get, blocks)):
            held = alive & node.holders if node is not None else 0
            if held != alive:
                cuts.append((depth, alive & ~held))
                if not held:
                    break
                alive = held
        return PrefixMatch(len(blocks), cuts)

    def _known(self, blocks: Sequence[BlockHash], depth: int) -> int:
        """How many of the first ``depth`` blocks of a chain are in the index. A node's parent
        always is, so they are the first ones."""
        nodes = self._nodes
        if depth and blocks[depth - 1] in nodes:
            return depth
        low, high = 0, depth
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    # -- nodes and paths ------------------------------------------------------------------------

    def find(self, block: BlockHash) -> Node | None:
        return self._nodes.get(block)

    def roots(self) -> list[Node]:
        """The nodes without a parent that is known, a copy."""
        return list(self._root.below())

    def path(self, node: Node) -> tuple[BlockHash, ...]:
        """The chain of blocks from the root to the node; empty for one that has left."""
        blocks = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            blocks.append(above.block)
            above = above.parent
        return tuple(blocks[::-1])

    def deepest(self, blocks: Sequence[BlockHash], depth: int) -> Node | None:
        """The node of the last of the first ``depth`` blocks of a chain that is in the index."""
        known = self._known(blocks, depth)
        return self._nodes[blocks[known - 1]] if known else None

    def held_below(self, node: Node, ranks: int) -> Iterator[Node]:
        """Every node below ``node``, parents first, that a rank in the mask holds."""
        stack = list(node.below())
        while stack:
            at = stack.pop()
            if at.holders & ranks:
                yield at
            stack.extend(at.below())

    # -- what the ranks tell --------------------------------------------------------------------

    def store(self, slot: int, parent: BlockHash | None, blocks: Iterable[BlockHash]) -> None:
        """The rank in ``slot`` holds ``blocks``, a chain below ``parent`` (None: the root)."""
        bit = self._shared(1 << slot)
        nodes, root = self._nodes, self._root
        above = root
        if parent is not None:
            above = nodes.get(parent) or self._place(parent)
        stub = above
        added, fresh = 0, False
        # The nodes of a path mostly have the same holders, so their counts change together.
        old = new = bit
        changed = 0
        for block in blocks:
            node = nodes.get(block)
            fresh = node is None
            if node is None:
                # In line: a long prompt stores thousands.
                node = nodes[block] = Node(block, above, bit)
                children = above.children
                if children is None:
                    above.children = node
                elif isinstance(children, Node):
                    above.children = {children: None, node: None}
                else:
                    children[node] = None
                added += 1
            elif node is above:
                continue  # two 64-bit hashes collided; a node cannot be its own parent
            else:
                if node.parent is root and above is not root:
                    self._move(node, above)
                holders = node.holders
                if not holders & bit:
                    if holders is not old:
                        self._recount(old, new, changed)
                        old, new, changed = holders, self._shared(holders | bit), 0
                    node.holders = new
                    changed += 1
            above = node
        if added:
            self._by_holders[bit] = self._by_holders.get(bit, 0) + added
        self._recount(old, new, changed)
        if fresh:
            self._leaves.append(above)
        if stub is not root and not stub.holders and stub.children is None:
            self._drop(stub)
        self._give_up_leaves()
        self.version += 1

    def remove(self, slot: int, blocks: Iterable[BlockHash]) -> None:
        """The rank in ``slot`` no longer holds ``blocks``; unknown ones are no news."""
        bit = 1 << slot
        old = new = 0
        changed = 0
        for block in blocks:
            node = self._nodes.get(block)
            if node is None or not node.holders & bit:
                continue
            if node.holders is not old:
                self._recount(old, new, changed)
                old, new, changed = node.holders, self._shared(node.holders & ~bit), 0
            node.holders = new
            changed += 1
            if not new and node.children is None:
                self._drop(node)
        self._recount(old, new, changed)
        self.version += 1

    def reset(self, ranks: int) -> None:
        """Nothing is known of the ranks in the mask any more. Visits every node, once."""
        if self.usable_blocks(ranks):
            emptied: list[Node] = []
            for node in self._nodes.values():
                if node.holders & ranks:
                    self._hold(node, node.holders & ~ranks)
                    if not node.holders:
                        emptied.append(node)
            for node in emptied:
                if node.parent is not None and node.children is None:
                    self._drop(node)
        self.version += 1

    def _shared(self, holders: int) -> int:
        return self._masks.setdefault(holders, holders)

    def _hold(self, node: Node, holders: int) -> None:
        """Change the holders of a node that is there."""
        old, node.holders = node.holders, self._shared(holders)
        self._recount(old, holders, 1)

    def _recount(self, old: int, new: int, changed: int) -> None:
        """So many nodes have the holders ``new``, no longer ``old``."""
        if not changed:
            return
        counts = self._by_holders
        if new:
            counts[new] = counts.get(new, 0) + changed
        if old:
            left = counts[old] - changed
            if left:
                counts[old] = left
            else:
                del counts[old], self._masks[old]

    def _place(self, block: BlockHash) -> Node:
        """A node that nobody holds, for others to be below."""
        node = self._nodes[block] = Node(block, self._root, 0)
        self._attach(node, self._root)
        return node

    def _attach(self, node: Node, parent: Node) -> None:
        node.parent = parent
        children = parent.children
        if children is None:
            parent.children = node
        elif isinstance(children, dict):
            children[node] = None
        else:
            parent.children = {children: None, node: None}

    def _detach(self, node: Node, parent: Node) -> None:
        node.parent = None
        children = parent.children
        if isinstance(children, dict):
            del children[node]
            if len(children) == 1:
                (parent.children,) = children
        else:
            parent.children = None

    def _move(self, node: Node, parent: Node) -> None:
        """The parent of a node at the top has come to be known."""
        above: Node | None = parent
        while above is not None:
            if above is node:  # hashes collided, and a path must not close on itself
                self._leaves.append(parent)
                return
            above = above.parent
        self._detach(node, self._root)
        self._attach(node, parent)

    def _drop(self, node: Node) -> None:
        """Take out a childless node, then every ancestor that it alone kept alive."""
        while True:
            parent = node.parent
            assert parent is not None
            del self._nodes[node.block]
            self._detach(node, parent)
            if parent is self._root:
                return
            if node.tally is not None:
                self.tallies.fold(node, parent)
            if parent.children is not None:
                return
            if parent.holders:
                self._leaves.append(parent)
                return
            node = parent

    def _give_up_leaves(self) -> None:
        leaves = self._leaves
        while len(self._nodes) > self._max_nodes and leaves:
            node = leaves.popleft()
            if node.parent is None or node.children is not None:
                continue
            self._hold(node, 0)
            self.forgotten += 1
            self._drop(node)
        if len(leaves) > 2 * len(self._nodes) + 1000:
            still = (n for n in leaves if n.parent is not None and n.children is None)
            self._leaves = deque(dict.fromkeys(still))
