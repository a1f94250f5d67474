"""From candidates to a choice: eligible, then price, then pick. Asking changes nothing."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.decodes import Decodes
from vertumnus_router.core.effects import CostTerms, Decision
from vertumnus_router.core.events import PoolJoined
from vertumnus_router.core.lanes import Lane
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.policy import Policy
from vertumnus_router.core.pulls import Pull, Pulls
from vertumnus_router.core.requests import Entry
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import PrefixIndex, PrefixMatch
from vertumnus_router.core.types import DecodeId, Request, RequestId, WorkerId
from vertumnus_router.core.workers import Candidate


@dataclass(slots=True)
class Quote:
    """What one candidate would cost, seconds; ``total`` is J."""

    lane: Lane
    cached_tokens: int
    reconcile_tokens: int
    uncached_tokens: int
    queue_s: float
    service_s: float
    extra_gpu_s: float
    lam: float
    total: float
    #: what is copied there first; its seconds are part of ``service_s``
    pull: Pull | None = None


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


def usable_blocks(request: Request, block_tokens: int) -> int:
    """The blocks that a prefill could find: without the last token, which is always computed."""
    return min(len(request.blocks), max(0, request.input_tokens - 1) // block_tokens)


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
        self._transfers = transfers
        self._pulls = pulls

    def can_take(self, entry: Entry, candidate: Candidate) -> bool:
        """Whether the request fits the candidate and nothing rules it out."""
        return self._fault(entry, candidate) is None

    def _fault(self, entry: Entry, candidate: Candidate) -> str | None:
        """Why the candidate cannot take the request, or None. A decode server without a free
        room is no fault: the request waits for one."""
        if candidate.pool.prefill_only and not self._decodes.usable:
            return "there is no decode server to pair it with"
        return entry.rules_out(candidate) or too_large(entry.request, candidate.pool)

    def least_work(self, entry: Entry) -> tuple[int, int]:
        """R and P, uncached and cached tokens, with the longest prefix that any candidate has."""
        places = ((c, (c.id,)) for c in self._policy.candidates(self._membership))
        cached = max((tokens for tokens, _ in self._cached_tokens(entry, places)), default=0)
        return max(1, entry.request.input_tokens - cached), cached

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

    def _cached_tokens(
        self, entry: Entry, places: Iterable[tuple[Candidate, tuple[WorkerId, ...]]]
    ) -> list[tuple[int, int]]:
        """P at each candidate, with the workers that have its ranks, and how much of it some of its
        ranks still lack. P is whole blocks that one of its ranks holds, or will where the policy
        counts what is being computed or copied, short of the last token, which is always
        computed."""
        match, blocks = self.match(entry), entry.request.blocks
        counts_in_flight = self._policy.counts_in_flight
        found = []
        for candidate, workers in places:
            block_tokens = candidate.pool.block_tokens
            longest, common = match.longest(candidate.ranks), match.common(candidate.ranks)
            depth = longest
            if counts_in_flight and depth < len(blocks):
                depth = max(depth, self._transfers.incoming(candidate.ranks, blocks))
                for worker in workers:
                    in_flight = self._ledger.in_flight(worker)
                    while depth < len(blocks) and blocks[depth] in in_flight:
                        depth += 1
            usable = min(depth, usable_blocks(entry.request, block_tokens))
            lacking = max(0, min(usable, longest) - common)
            found.append((usable * block_tokens, lacking * block_tokens))
        return found

    def quotes(self, entry: Entry, lanes: Sequence[Lane], now: float) -> list[Quote]:
        """A price from every eligible lane, the choice first, the others by rising price."""
        least = self._membership.least_degree
        if least is None:
            return []
        request = entry.request
        beta, lam = self._policy.beta, self._policy.lam
        service_s = self._model.service_s
        terms: dict[tuple[int, int], tuple[float, float]] = {}
        quotes = []
        lanes = [lane for lane in lanes if self.can_take(entry, lane.candidate)]
        cached_at = self._cached_tokens(entry, ((lane.candidate, lane.workers) for lane in lanes))
        needed_s: float | None = None
        most = stored = max((cached for cached, _ in cached_at), default=0)
        if self._policy.charges_recomputing:
            stored = self._stored_tokens(entry, lanes)
            needed_s = least * service_s(least, max(1, request.input_tokens - most), most)
        for lane, (cached, lacking) in zip(lanes, cached_at, strict=True):
            candidate = lane.candidate
            degree = candidate.degree
            uncached = max(1, request.input_tokens - cached)
            known = terms.get((degree, cached))
            if known is None:
                own_s = service_s(degree, uncached, cached)
                least_s = needed_s
                if least_s is None:
                    least_s = least * service_s(least, uncached, cached)
                extra_s = degree * own_s - least_s
                terms[degree, cached] = own_s, extra_s
            else:
                own_s, extra_s = known
            queue_s = lane.queue_s
            if lane.switch_s:
                extra_s += 2 * degree * lane.switch_s  # the way there, and somebody's way back
            # To compute what is being computed wastes all the GPU time that it takes.
            weight = max(lam, 1.0) if cached < most and stored < most else lam
            total = queue_s + beta * own_s + weight * extra_s
            quote = Quote(lane, cached, lacking, uncached, queue_s, own_s, extra_s, weight, total)
            if self._pulls.enabled:
                quote = self._with_pull(quote, entry, needed_s, now)
            quotes.append(quote)
        quotes.sort(key=_total)
        self._break_tie(request.id, quotes)
        return quotes

    def _with_pull(self, quote: Quote, entry: Entry, needed_s: float | None, now: float) -> Quote:
        """The same candidate with a prefix copied to it first, if that is faster. ``needed_s``:
        GPU time that is no extra; None: that at the smallest degree with the same prefix."""
        candidate, request = quote.lane.candidate, entry.request
        block_tokens = candidate.pool.block_tokens
        usable, least = usable_blocks(request, block_tokens), self._membership.least_degree
        pull = self._pulls.find(request, self.match(entry), candidate, usable, now)
        if pull is None or least is None:
            return quote
        cached = pull.depth * block_tokens
        uncached = max(1, request.input_tokens - cached)
        service_s = self._model.service_s(candidate.degree, uncached, cached) + pull.seconds
        if service_s >= quote.service_s:
            return quote
        if needed_s is None:
            needed_s = least * self._model.service_s(least, uncached, cached)
        extra_s = candidate.degree * (service_s + 2 * quote.lane.switch_s) - needed_s
        total = quote.queue_s + self._policy.beta * service_s + self._policy.lam * extra_s
        # After the pull one rank holds all of it; the others take over what they lack.
        lacking = cached - min(self.match(entry).common(candidate.ranks) * block_tokens, cached)
        reconcile = lacking if candidate.degree > 1 else 0
        return Quote(
            quote.lane,
            cached,
            reconcile,
            uncached,
            quote.queue_s,
            service_s,
            extra_s,
            self._policy.lam,
            total,
            pull,
        )

    def _stored_tokens(self, entry: Entry, lanes: Iterable[Lane]) -> int:
        """The longest prefix that a candidate has, without what is on its way."""
        match = self.match(entry)
        return max(
            (
                min(match.longest(c.ranks), usable_blocks(entry.request, c.pool.block_tokens))
                * c.pool.block_tokens
                for c in (lane.candidate for lane in lanes)
            ),
            default=0,
        )

    def _break_tie(self, request: RequestId, quotes: list[Quote]) -> None:
        """Bring one of the near-equal best to the front, another one for another request.

        A hash, not a generator: ``explain`` gives the choice that placement will make, and
        several routers with their own seeds do not herd.
        """
        equal = 1
        while equal < len(quotes) and quotes[equal].total - quotes[0].total <= self._tie_s:
            equal += 1
        if equal > 1:
            draw = {
                i: zlib.crc32(f"{self._seed}/{request}/{quotes[i].lane.candidate.id}".encode())
                for i in range(equal)
            }
            quotes.insert(0, quotes.pop(min(draw, key=draw.__getitem__)))

    def decision(
        self, entry: Entry, quotes: Iterable[Quote], decode: DecodeId | None = None
    ) -> Decision:
        """The record of a choice: every candidate with its terms, everyone else with a reason."""
        beta = self._policy.beta
        return Decision(
            request_id=entry.id,
            policy=self._policy.name,
            candidates=tuple(
                CostTerms(
                    worker=quote.lane.candidate.id,
                    degree=quote.lane.candidate.degree,
                    cached_tokens=quote.cached_tokens,
                    reconcile_tokens=quote.reconcile_tokens,
                    queue_s=quote.queue_s,
                    service_s=quote.service_s,
                    extra_gpu_s=quote.extra_gpu_s,
                    beta=beta,
                    lam=quote.lam,
                    total=quote.total,
                    pull_tokens=0 if quote.pull is None else quote.pull.tokens,
                    pull_s=0.0 if quote.pull is None else quote.pull.seconds,
                    extrapolated=self._model.profile.extrapolates(
                        quote.lane.candidate.degree, quote.uncached_tokens, quote.cached_tokens
                    ),
                )
                for quote in quotes
            ),
            excluded=self._excluded(entry),
            decode=decode,
            decodes=self._decodes.terms(),
        )

    def _excluded(self, entry: Entry) -> tuple[tuple[WorkerId, str], ...]:
        excluded = []
        for worker in self._membership.workers:
            if not worker.serving:
                reason: str | None = f"{worker.state.value}: {worker.reason}"
            else:
                reason = self._fault(entry, worker.candidate)
            if reason is not None:
                excluded.append((worker.id, reason))
        return tuple(excluded)


def _total(quote: Quote) -> float:
    return quote.total
