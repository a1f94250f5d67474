"""Pull at dispatch: the prefix comes to the worker that the request wants to run at.

A pull competes with computing: it is taken where the copy and the shorter prefill together beat
the longer prefill. Asking changes nothing.
"""

from dataclasses import dataclass

from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Cause, Copy
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership, Peer, geometry
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import PrefixMatch
from vertumnus_router.core.types import Request
from vertumnus_router.core.workers import Candidate


@dataclass(frozen=True, slots=True)
class Pull:
    """The first ``depth`` blocks of the prompt can be copied, ``tokens`` of them in ``seconds``."""

    source: Peer
    destination: Peer
    depth: int
    tokens: int
    seconds: float


class Pulls:
    """Finds the best pull for a request and a candidate."""

    def __init__(
        self, config: PrefixConfig, membership: Membership, ledger: Ledger, transfers: Transfers
    ) -> None:
        #: whether there are pulls at all
        self.enabled = config.pull
        self._membership = membership
        self._ledger = ledger
        self._transfers = transfers

    def find(
        self,
        request: Request,
        match: PrefixMatch,
        candidate: Candidate,
        usable_blocks: int,
        now: float,
    ) -> Pull | None:
        """The copy that would leave the candidate with the longest prefix that any rank holds.
        None if it holds as much, or gets more of it already."""
        blocks, pool = request.blocks, candidate.pool
        here = min(match.longest(candidate.ranks), usable_blocks)
        if not pool.kv_token_bytes or here >= len(blocks):
            return None
        peers = self._membership.peers
        alike = [peer for peer in peers.values() if peer.geometry == geometry(pool)]
        depth = min(match.longest(_mask(alike)), usable_blocks)
        if depth <= here or self._is_on_its_way(request, candidate, here):
            return None
        mine = [peer for peer in alike if candidate.ranks >> peer.slot & 1]
        holding = match.holding(depth, _mask(alike))
        sources = [peer for peer in alike if holding >> peer.slot & 1]
        if not mine:
            return None
        own = {peer.slot: min(match.longest(1 << peer.slot), usable_blocks) for peer in mine}
        destination = min(mine, key=lambda peer: (-own[peer.slot], peer.slot))
        tokens = (depth - own[destination.slot]) * pool.block_tokens
        size = tokens * pool.kv_token_bytes
        offers = []
        for source in sources:
            if self._transfers.copy_fault(source, destination, now, pull=True) is None:
                seconds = self._transfers.link(source.rank.pool, pool.pool).seconds(size)
                given = self._transfers.given(source.slot)
                queue_s = self._ledger.queue_s(source.worker, now)
                offers.append((seconds, given, queue_s, source.slot))
        if not offers:
            return None
        seconds, _, _, slot = min(offers)
        return Pull(peers[slot], destination, depth, tokens, seconds)

    def begin(self, pull: Pull, request: Request, now: float) -> Copy:
        """The effect; it is in flight from now on."""
        return self._transfers.begin_copy(
            self._transfers.new_id(),
            pull.source,
            pull.destination,
            request.blocks[: pull.depth],
            Cause.PULL,
            now,
        )

    def on_its_way(
        self, request: Request, match: PrefixMatch, candidate: Candidate, usable_blocks: int
    ) -> Copy | None:
        """The copy in flight that brings the candidate what it lacks next of the prompt."""
        held = match.longest(candidate.ranks)
        if held >= usable_blocks:
            return None
        return self._transfers.bringing(candidate.ranks, held + 1, request.blocks)

    def _is_on_its_way(self, request: Request, candidate: Candidate, held: int) -> bool:
        """Whether the next block is being computed or copied there."""
        block = request.blocks[held]
        return block in self._ledger.in_flight(candidate.id) or self._transfers.brings(
            candidate.ranks, held + 1, block
        )


def _mask(peers: list[Peer]) -> int:
    return sum(1 << peer.slot for peer in peers)
