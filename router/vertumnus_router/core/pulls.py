"""Pull at dispatch: the prefix comes to the worker that the request wants to run at.

A pull competes with computing: it is taken where the copy and the shorter prefill together beat
the longer prefill. Asking changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from vertumnus_router.core.chains import usable_blocks
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Cause, Copy
from vertumnus_router.core.events import PoolJoined
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership, Peer, geometry
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import PrefixMatch
from vertumnus_router.core.types import PoolId, Request
from vertumnus_router.core.workers import Candidate, slots


class PullTerms(msgspec.Struct, frozen=True, gc=False):
    """The first ``depth`` blocks of the prompt can be copied, ``tokens`` of them in ``seconds``."""

    depth: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """A copy of the first ``depth`` blocks of the prompt, and the ranks that it goes between."""

    source: Peer
    destination: Peer
    depth: int


@dataclass(frozen=True, slots=True)
class _Sources:
    """Ranks that hold the longest prefix of a prompt, ``depth`` blocks, and may give it now, the
    best first."""

    depth: int
    ranked: Sequence[Peer]


class Pulls:
    """Finds the best pull for a request and a candidate."""

    def __init__(
        self, config: PrefixConfig, membership: Membership, ledger: Ledger, transfers: Transfers
    ) -> None:
        #: whether there are pulls at all
        self.enabled = config.pull
        self._per_rank = config.pulls_per_rank
        self._membership = membership
        self._ledger = ledger
        self._transfers = transfers

    def terms(
        self,
        request: Request,
        match: PrefixMatch,
        candidates: Sequence[Candidate],
        stored: Sequence[int],
        coming: Mapping[int, int],
        now: float,
    ) -> list[tuple[PullTerms, list[int]]]:
        """The copies that would leave candidates with the longest prefix that any rank holds, and
        their positions. Without those that hold as much, get more than they hold already, or that
        no copy can go to now.

        ``stored``: how many blocks of the prompt a rank of each candidate holds; ``coming``: by
        position, how many one will when what is being computed or copied there is done, where
        that is more.
        """
        most = match.longest(-1)
        lacking = [at for at, held in enumerate(stored) if held < most and at not in coming]
        if not lacking:
            return []
        giving, taking = self._transfers.giving(), self._transfers.taking()
        full = self._at_limit(taking)
        spent = self._at_limit(giving)
        any_failed = self._transfers.any_failed
        # Ranks of one pool that hold as much are alike, unless they are full or a copy has failed.
        groups: dict[tuple[PoolId, int], list[int]] = {}
        sources_of: dict[tuple[int, int], _Sources | None] = {}
        found: list[tuple[PullTerms, list[int]]] = []
        for at in lacking:
            candidate, held = candidates[at], stored[at]
            name = candidate.pool.pool
            if not any_failed and not candidate.ranks & (full | ~self._membership.peers_of[name]):
                groups.setdefault((name, held), []).append(at)
                continue
            alike = geometry(candidate.pool)
            if alike not in sources_of:
                sources_of[alike] = self._sources(request, match, candidate.pool, giving, now)
            sources = sources_of[alike]
            if sources is not None and held < sources.depth:
                best = self._best(sources, candidate, match, taking, now)
                if best is not None:
                    found.append((best[0], [at]))
        for (_, held), group in groups.items():
            terms = self._terms(request, match, candidates[group[0]].pool, held, spent)
            if terms is not None:
                found.append((terms, group))
        return found

    def _at_limit(self, copies: Mapping[int, int]) -> int:
        """The ranks that have as many copies as they may, a mask."""
        return sum(1 << slot for slot, count in copies.items() if count >= self._per_rank)

    def _terms(
        self, request: Request, match: PrefixMatch, pool: PoolJoined, held: int, spent: int
    ) -> PullTerms | None:
        """Those of a rank of the pool that holds ``held`` blocks, where no copy has failed: which
        source it is makes no difference, but for whether it is in the pool. ``spent``: the ranks
        that give as many copies as they may."""
        alike, depth = self._reach(request, match, pool)
        if held >= depth:
            return None
        givers = match.holding(depth, alike) & ~spent
        tokens = (depth - held) * pool.block_tokens
        size, mine = tokens * pool.kv_token_bytes, self._membership.peers_of[pool.pool]
        seconds = []
        if givers & mine:
            seconds.append(self._transfers.local.seconds(size))
        if givers & ~mine:
            seconds.append(self._transfers.remote.seconds(size))
        return PullTerms(depth, tokens, min(seconds)) if seconds else None

    def _reach(self, request: Request, match: PrefixMatch, pool: PoolJoined) -> tuple[int, int]:
        """The ranks that the pool could copy from, a mask, and how many blocks of the prompt one
        of them has."""
        alike = self._membership.alike.get(geometry(pool), 0)
        return alike, min(match.longest(alike), usable_blocks(request, pool.block_tokens))

    def find(
        self, request: Request, match: PrefixMatch, candidate: Candidate, now: float
    ) -> Pull | None:
        """The copy to a candidate that has ``terms``."""
        giving, taking = self._transfers.giving(), self._transfers.taking()
        sources = self._sources(request, match, candidate.pool, giving, now)
        if sources is None:
            return None
        best = self._best(sources, candidate, match, taking, now)
        return None if best is None else best[1]

    def _sources(
        self,
        request: Request,
        match: PrefixMatch,
        pool: PoolJoined,
        giving: Mapping[int, int],
        now: float,
    ) -> _Sources | None:
        """Where candidates of the pool could copy from; None if from nowhere."""
        alike, depth = self._reach(request, match, pool)
        if not depth:
            return None
        ranked = []
        for slot in slots(match.holding(depth, alike)):
            peer, given = self._membership.peers[slot], giving.get(slot, 0)
            if given < self._per_rank:
                ranked.append((given, self._ledger.queue_s(peer.worker, now), slot, peer))
        if not ranked:
            return None
        ranked.sort()  # by three of them: no two have the same slot
        return _Sources(depth, [peer for *_, peer in ranked])

    def _best(
        self,
        sources: _Sources,
        candidate: Candidate,
        match: PrefixMatch,
        taking: Mapping[int, int],
        now: float,
    ) -> tuple[PullTerms, Pull] | None:
        """The fastest copy to the rank of the candidate that holds most of the prompt; None if
        that one takes as many as it may, or nobody can give."""
        pool, peers = candidate.pool, self._membership.peers
        destination: Peer | None = None
        held = -1
        for slot in slots(candidate.ranks):
            if slot in peers and (holds := match.longest(1 << slot)) > held:
                destination, held = peers[slot], holds
        if destination is None or taking.get(destination.slot, 0) >= self._per_rank:
            return None
        tokens = (sources.depth - held) * pool.block_tokens
        offers: dict[bool, tuple[float, Peer]] = {}
        for source in sources.ranked:
            local = source.rank.pool == pool.pool
            if local not in offers and not self._transfers.failed(source, destination, now):
                link = self._transfers.link(source.rank.pool, pool.pool)
                offers[local] = link.seconds(tokens * pool.kv_token_bytes), source
                if len(offers) == 2:
                    break  # sources within the pool are equally fast, and so are all others
        if not offers:
            return None
        seconds, source = min(offers.values(), key=lambda offer: offer[0])
        depth = sources.depth
        return PullTerms(depth, tokens, seconds), Pull(source, destination, depth)

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
