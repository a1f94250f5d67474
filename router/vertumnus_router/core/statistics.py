"""Algorithm 1 of the paper: what each dispatched request says of the prefixes that it met.

The paper adds, at every matched block z that no worker of the preferred degree C holds,
``Ê_C(L − P0, P0) − Ê_C(L − P1, P1)`` to missed[z, C], P0 and P1 being the prefix length before and
behind z. With ``W(R, P)`` as it is, L drops out of the difference: a miss of z costs the same
whoever misses it. So misses are counted, and ``saved_s`` is what one is worth.
"""

from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.trie import PrefixIndex, PrefixMatch
from vertumnus_router.core.types import Request


def saved_s(model: PrefillModel, degree: int, before_tokens: int, behind_tokens: int) -> float:
    """Seconds that holding the tokens from ``before_tokens`` to ``behind_tokens`` of a prompt
    saves each request at the degree: Ê_C(L − P0, P0) − Ê_C(L − P1, P1), for any L."""
    without_s = model.service_s(degree, behind_tokens - before_tokens, before_tokens)
    return without_s - model.service_s(degree, 0, behind_tokens)


class PrefixStatistics:
    """access[z, C] and missed[z, C], kept as counts on the nodes where paths end."""

    def __init__(self, index: PrefixIndex, membership: Membership) -> None:
        self._index = index
        self._membership = membership

    def dispatched(
        self,
        request: Request,
        match: PrefixMatch,
        degree: int,
        reused_blocks: int,
        preferred_degree: int,
        usable_blocks: int,
    ) -> None:
        """The request goes to a worker of ``degree`` and finds its first ``reused_blocks`` there.
        Of its blocks it could have found ``usable_blocks``, wherever they are held."""
        index, blocks = self._index, request.blocks
        reused = index.deepest(blocks, reused_blocks)
        if reused is not None:
            index.tallies.add(reused, degree, accesses=1.0)
        matched = min(match.longest(-1), usable_blocks)
        held = match.longest(self._ranks_at(preferred_degree))
        if held >= matched:
            return
        missed, above = index.deepest(blocks, matched), index.deepest(blocks, held)
        assert missed is not None
        index.tallies.add(missed, preferred_degree, misses=1.0)
        if above is not None:
            # From here up the degree has it.
            index.tallies.add(above, preferred_degree, misses=-1.0)

    def _ranks_at(self, degree: int) -> int:
        ranks = 0
        for candidate in self._membership.serving:
            if candidate.degree == degree:
                ranks |= candidate.ranks
        return ranks
