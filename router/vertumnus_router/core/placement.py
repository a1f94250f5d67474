"""From candidates to a choice: eligible, then price, then pick. Asking changes nothing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vertumnus_router.core.breakers import Breakers
from vertumnus_router.core.chains import usable_blocks
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.decodes import Decodes
from vertumnus_router.core.effects import Decision
from vertumnus_router.core.events import PoolJoined
from vertumnus_router.core.lanes import Lanes
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.policy import Policy
from vertumnus_router.core.pricing import Alike, Offer, Quotes, pick
from vertumnus_router.core.pulls import Pulls, PullTerms
from vertumnus_router.core.requests import Entry
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import PrefixIndex, PrefixMatch
from vertumnus_router.core.types import DecodeId, Request, WorkerId
from vertumnus_router.core.workers import Candidate, Candidates

T = TypeVar("T")


def too_large(request: Request, pool: PoolJoined) -> str | None:
    """Why the request does not fit the memory or the context of the pool's ranks, or None.

    An estimated length refuses nothing: the engine counts the tokens and answers for itself.
    """
    if not request.exact:
        return None
    tokens = request.input_tokens + request.output_tokens
    if tokens > pool.context_tokens:
        return f"{tokens} tokens, the context has {pool.context_tokens}"
    if tokens > pool.kv_capacity_tokens:
        return f"{tokens} tokens, a rank has room for {pool.kv_capacity_tokens}"
    return None


@dataclass(slots=True)
class _Basis:
    """What the offers to one request have in common. ``usable``: by kind of candidate, the blocks
    that it could find. ``needed_s``: the GPU time that is no extra; None: that at the smallest
    degree with the prefix at hand. ``computing_tokens``: its longest prefix, if that is on its way
    to a candidate and none holds as much yet; else 0."""

    kinds: Sequence[tuple[int, int]]
    input_tokens: int
    usable: Sequence[int]
    lam: float
    needed_s: float | None = None
    computing_tokens: int = 0

    def cached_tokens(self, kind: int, depth: int) -> int:
        return min(depth, self.usable[kind]) * self.kinds[kind][1]


class Placement:
    """Prices and picks for a policy. Holds references to what it reads, no state of its own."""

    def __init__(
        self,
        config: PolicyConfig,
        policy: Policy,
        model: PrefillModel,
        index: PrefixIndex,
        membership: Membership,
        ledger: Ledger,
        decodes: Decodes,
        breakers: Breakers,
        transfers: Transfers,
        pulls: Pulls,
    ) -> None:
        self._tie_s = config.tie_s
        self._seed = config.seed
        self._policy = policy
        self._model = model
        self._index = index
        self._membership = membership
        self._ledger = ledger
        self._decodes = decodes
        self._breakers = breakers
        self._transfers = transfers
        self._pulls = pulls

    def can_take(self, entry: Entry) -> bool:
        """Whether the request fits a candidate that nothing rules out."""
        return bool(self._eligible(entry, self._policy.candidates(self._membership)))

    def least_queue_s(self, now: float) -> float | None:
        """How long the worker that is done first is busy with what it has, None without one."""
        serving = self._membership.serving
        return min((self._ledger.queue_s(one.id, now) for one in serving), default=None)

    def _eligible(self, entry: Entry, candidates: Candidates) -> Sequence[int]:
        """The positions of the candidates that can take the request."""
        request = entry.request
        if (
            not (entry.failed_at or entry.unreachable)
            and self._breakers.quiet
            and not (candidates.paired and not self._decodes.usable)
            and request.input_tokens + request.output_tokens <= candidates.room_tokens
        ):
            return range(len(candidates))
        each = candidates.each
        fitting = [at for at, one in enumerate(each) if self._fault(entry, one) is None]
        return self._breakers.willing(fitting, each)

    def _fault(self, entry: Entry, candidate: Candidate) -> str | None:
        """Why the candidate cannot take the request, or None. A decode server without a free
        room is no fault: the request waits for one."""
        if candidate.pool.prefill_only and not self._decodes.usable:
            return "there is no decode server to pair it with"
        return entry.rules_out(candidate) or too_large(entry.request, candidate.pool)

    def least_work(self, entry: Entry) -> tuple[int, int]:
        """R and P, uncached and cached tokens, with the longest prefix that any candidate has."""
        candidates, request = self._policy.candidates(self._membership), entry.request
        match = self.match(entry)
        cached, least = 0, len(request.blocks)
        for block_tokens, ranks in candidates.ranks_by_block.items():
            held = match.longest(ranks)
            least = min(least, held)
            cached = max(cached, min(held, usable_blocks(request, block_tokens)) * block_tokens)
        if self._policy.counts_in_flight:
            for worker, coming in self._coming(entry, candidates).items():
                if coming > least and worker in candidates.at_worker:
                    at = candidates.at_worker[worker]
                    block_tokens = candidates.each[at].pool.block_tokens
                    depth = min(coming, usable_blocks(request, block_tokens))
                    cached = max(cached, depth * block_tokens)
        return max(1, request.input_tokens - cached), cached

    def least_gpu_s(self, entry: Entry) -> float:
        """g: GPU-seconds at C_min of ``least_work``."""
        least = self._membership.least_degree
        if least is None:
            return 0.0
        return least * self._model.service_s(least, *self.least_work(entry))

    def match(self, entry: Entry) -> PrefixMatch:
        """The request's prefix in the index, walked again only after the index changed."""
        if entry.match is None or entry.match_version != self._index.version:
            entry.match = self._index.match(entry.request.blocks)
            entry.match_version = self._index.version
        return entry.match

    def _coming(self, entry: Entry, candidates: Candidates) -> Mapping[WorkerId, int]:
        """How many blocks of the prompt a rank of a worker will hold when what is being computed or
        copied there is done; mostly nobody gets any. Workers that are no candidates may be named.
        """
        blocks = entry.request.blocks
        if entry.computing is None or entry.computing_version != self._ledger.version:
            entry.computing = self._ledger.computing(blocks)
            entry.computing_version = self._ledger.version
        incoming = self._transfers.incoming(blocks)
        if not incoming:
            return entry.computing
        coming = dict(entry.computing)
        for slot, depth in incoming.items():
            if slot in candidates.at_slot:
                worker = candidates.ids[candidates.at_slot[slot]]
                coming[worker] = max(depth, coming.get(worker, 0))
        return coming

    def _coming_at(self, entry: Entry, lanes: Lanes, stored: Sequence[int]) -> Mapping[int, int]:
        """The same by lane, where it is more than the blocks that are ``stored`` there."""
        found: dict[int, int] = {}
        for worker, depth in self._coming(entry, lanes.candidates).items():
            for at in lanes.sharing(worker):
                if depth > stored[at]:
                    found[at] = max(depth, found.get(at, 0))
        return found

    def quotes(self, entry: Entry, lanes: Lanes, now: float) -> Quotes | None:
        """The prices of the request at every candidate that can take it; None if none can.

        P at a candidate is whole blocks that one of its ranks holds, or will where the policy
        counts what is being computed or copied, short of the last token, which is always computed.
        """
        candidates = lanes.candidates
        eligible = self._eligible(entry, candidates)
        if not eligible or self._membership.least_degree is None:
            return None
        match = self.match(entry)
        stored = match.longest_each(candidates.ranks)
        coming: Mapping[int, int] = {}
        if self._pulls.enabled or self._policy.counts_in_flight:
            coming = self._coming_at(entry, lanes, stored)
        depths = stored
        if coming and self._policy.counts_in_flight:
            depths = stored.copy()
            for at, depth in coming.items():
                depths[at] = depth
        queue_s, each, kind_of = lanes.queue_s.copy(), candidates.each, candidates.kind_of
        idle_gpu_s = None if lanes.idle_gpu_s is None else lanes.idle_gpu_s.copy()
        if len(eligible) < len(candidates):
            each, kind_of = _at(eligible, each), _at(eligible, kind_of)
            queue_s = list(_at(eligible, queue_s))
            stored, depths = (list(_at(eligible, of)) for of in (stored, depths))
            coming = {at: coming[was] for at, was in enumerate(eligible) if was in coming}
            if idle_gpu_s is not None:
                idle_gpu_s = list(_at(eligible, idle_gpu_s))
        has = list(zip(kind_of, depths, strict=True))
        different = set(has)
        stores = different if depths is stored else set(zip(kind_of, stored, strict=True))
        basis = self._basis(entry.request, candidates.kinds, different, stores)
        offers: dict[Alike, Offer] = {one: self._offer(basis, *one) for one in different}
        alike: list[Alike] = list(has)
        if self._pulls.enabled:
            pulls = self._pulls.terms(entry.request, match, each, stored, coming, now)
            for pull, positions in pulls:
                self._pull_instead(basis, offers, alike, pull, positions)
        prices = {one: (offer.service_j, offer.extra_j) for one, offer in offers.items()}
        each_price = map(prices.__getitem__, alike)
        parts = zip(queue_s, each_price, strict=True)
        totals = [q + service_j + extra_j for q, (service_j, extra_j) in parts]
        if idle_gpu_s is not None:
            lams = {one: offer.lam for one, offer in offers.items()}
            each_lam = map(lams.__getitem__, alike)
            waits = zip(totals, each_lam, idle_gpu_s, strict=True)
            totals = [j + lam * idle for j, lam, idle in waits]
        choice = pick(entry.id, each, totals, self._tie_s, self._seed)
        return Quotes(
            request=entry.id,
            candidates=each,
            lanes=eligible,
            queue_s=queue_s,
            idle_gpu_s=idle_gpu_s,
            offers=offers,
            alike=alike,
            totals=totals,
            choice=choice,
            match=match,
            stored=stored,
            beta=self._policy.beta,
            profile=self._model.profile,
        )

    def _pull_instead(
        self,
        basis: _Basis,
        offers: dict[Alike, Offer],
        alike: list[Alike],
        pull: PullTerms,
        positions: Sequence[int],
    ) -> None:
        """Let the candidates at ``positions`` have a prefix copied first where that is faster."""
        faster: dict[Alike, Alike] = {}
        for at in positions:
            plain = alike[at]
            if plain not in faster:
                pulled = plain[0], pull
                if pulled not in offers:
                    offers[pulled] = self._pulled(basis, plain[0], pull)
                gains = offers[pulled].service_s < offers[plain].service_s
                faster[plain] = pulled if gains else plain
            alike[at] = faster[plain]

    def _basis(
        self,
        request: Request,
        kinds: Sequence[tuple[int, int]],
        has: Collection[tuple[int, int]],
        stores: Collection[tuple[int, int]],
    ) -> _Basis:
        """``has``: kinds of candidates, with how many blocks they will have; ``stores``: with how
        many they hold."""
        usable = [usable_blocks(request, block_tokens) for _, block_tokens in kinds]
        basis = _Basis(kinds, request.input_tokens, usable, self._policy.lam)
        if self._policy.charges_recomputing:
            most = max(basis.cached_tokens(kind, depth) for kind, depth in has)
            stored = max(basis.cached_tokens(kind, depth) for kind, depth in stores)
            basis.needed_s = self._least_s(max(1, request.input_tokens - most), most)
            if stored < most:
                basis.computing_tokens = most
        return basis

    def _least_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """GPU time at the smallest degree."""
        least = self._membership.ladder[0]
        return least * self._model.service_s(least, uncached_tokens, cached_tokens)

    def _offer(self, basis: _Basis, kind: int, depth: int) -> Offer:
        """What candidates of the kind with so many blocks of the prompt would cost."""
        degree, cached = basis.kinds[kind][0], basis.cached_tokens(kind, depth)
        uncached = max(1, basis.input_tokens - cached)
        service_s = self._model.service_s(degree, uncached, cached)
        # To compute what is being computed wastes all the GPU time that it takes.
        lam = max(basis.lam, 1.0) if cached < basis.computing_tokens else basis.lam
        return self._offer_of(basis, degree, cached, uncached, service_s, lam)

    def _pulled(self, basis: _Basis, kind: int, pull: PullTerms) -> Offer:
        """The same with a prefix copied there first."""
        degree, block_tokens = basis.kinds[kind]
        cached = pull.depth * block_tokens
        uncached = max(1, basis.input_tokens - cached)
        service_s = self._model.service_s(degree, uncached, cached) + pull.seconds
        return self._offer_of(basis, degree, cached, uncached, service_s, basis.lam, pull)

    def _offer_of(
        self,
        basis: _Basis,
        degree: int,
        cached_tokens: int,
        uncached_tokens: int,
        service_s: float,
        lam: float,
        pull: PullTerms | None = None,
    ) -> Offer:
        needed_s = basis.needed_s
        if needed_s is None:
            needed_s = self._least_s(uncached_tokens, cached_tokens)
        extra_s = degree * service_s - needed_s
        return Offer(
            degree=degree,
            cached_tokens=cached_tokens,
            uncached_tokens=uncached_tokens,
            service_s=service_s,
            extra_gpu_s=extra_s,
            lam=lam,
            service_j=self._policy.beta * service_s,
            extra_j=lam * extra_s,
            pull_tokens=0 if pull is None else pull.tokens,
            pull_s=0.0 if pull is None else pull.seconds,
        )

    def decision(
        self, entry: Entry, quotes: Quotes | None, decode: DecodeId | None = None
    ) -> Decision:
        """The record of a choice: every candidate with its terms, everyone else with a reason."""
        return Decision(
            request_id=entry.id,
            policy=self._policy.name,
            prices=quotes,
            excluded=self._excluded(entry, quotes),
            decode=decode,
            decodes=self._decodes.terms(),
        )

    def _excluded(self, entry: Entry, quotes: Quotes | None) -> tuple[tuple[WorkerId, str], ...]:
        workers = self._membership.workers
        if quotes is not None and isinstance(quotes.lanes, range):  # none was left out
            workers = self._membership.out
        # A block that drains may be what a request waits for.
        priced = {c.id for c in quotes.candidates} if quotes is not None and workers else set()
        excluded = []
        for worker in workers:
            if worker.id in priced:
                continue
            if not worker.serving:
                reason: str | None = f"{worker.state.value}: {worker.reason}"
            else:
                candidate = worker.candidate
                reason = self._fault(entry, candidate) or self._breakers.refusal(candidate)
            if reason is not None:
                excluded.append((worker.id, reason))
        return tuple(excluded)


def _at(positions: Sequence[int], of: Sequence[T]) -> tuple[T, ...]:
    return tuple(of[at] for at in positions)
