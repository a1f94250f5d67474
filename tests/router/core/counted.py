"""An index with counts, without a control plane around it."""

from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.statistics import PrefixStatistics
from vertumnus_router.core.tally import Tallies
from vertumnus_router.core.trie import NODE_BYTES, PrefixIndex
from vertumnus_router.core.types import BlockHash
from vertumnus_router.lattice import parse_composition

from tests.router.core.scene import IDEAL, joined, reported, request


def members(composition: str) -> Membership:
    """Pool p; rank r has slot r."""
    membership = Membership(PrefillModel(IDEAL).fault)
    blocks = parse_composition(composition, 4, (1, 2, 4))
    membership.join(joined("p", 4, kv_token_bytes=1))
    for block in blocks:
        for rank in block.ranks:
            membership.report(reported(rank, block))
    return membership


class Counted:
    """An index and its statistics; two degree-1 workers and one of degree 2 unless told."""

    def __init__(self, composition: str = "2x1,1x2", nodes: int = 10_000) -> None:
        self.index = PrefixIndex(nodes * NODE_BYTES, Tallies(decay=0.5))
        self.membership = members(composition)
        self.statistics = PrefixStatistics(self.index, self.membership)

    def dispatch(
        self, blocks: tuple[BlockHash, ...], degree: int, reused: int, preferred: int
    ) -> None:
        match = self.index.match(blocks)
        prompt = request("r", len(blocks) * 100 + 1, blocks=blocks)
        self.statistics.dispatched(prompt, match, degree, reused, preferred, len(blocks))

    def at(self, block: BlockHash, degree: int) -> tuple[float, float]:
        """Accesses and misses of the block: what ends at it and below."""
        node = self.index.find(block)
        assert node is not None
        nodes = [node, *self.index.held_below(node, -1)]
        found = [self.index.tallies.read(one).get(degree, (0.0, 0.0)) for one in nodes]
        return sum(a for a, _ in found), sum(m for _, m in found)


# Blocks 1..15 form a binary tree; a path is a prompt.
def path_to(block: int) -> tuple[BlockHash, ...]:
    path = []
    while block:
        path.append(BlockHash(block))
        block //= 2
    return tuple(path[::-1])
