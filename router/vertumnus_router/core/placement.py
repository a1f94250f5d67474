"""From candidates to a choice: eligible, then price, then pick. Asking changes nothing."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.effects import CostTerms, Decision
from vertumnus_router.core.events import PoolJoined
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.policy import Lane, Policy
from vertumnus_router.core.requests import Entry
from vertumnus_router.core.trie import PrefixIndex, PrefixMatch
from vertumnus_router.core.types import Request, RequestId, WorkerId
from vertumnus_router.core.workers import Candidate


@dataclass(slots=True)
class Quote:
    """What one candidate would cost, seconds; ``total`` is J."""

    lane: Lane
    cached_tokens: int
    uncached_tokens: int
    queue_s: float
    service_s: float
    extra_gpu_s: float
    total: float


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
    ) -> None:
        self._tie_s = config.tie_s
        self._seed = config.seed
        self._policy = policy
        self._model = model
        self._index = index
        self._membership = membership
        self._ledger = ledger

    def can_take(self, entry: Entry, candidate: Candidate) -> bool:
        """Whether the request fits the candidate and no earlier attempt rules it out."""
        return entry.rules_out(candidate) is None and (
            too_large(entry.request, candidate.pool) is None
        )

    def least_gpu_s(self, entry: Entry) -> float:
        """g: GPU-seconds at C_min with the longest prefix that any candidate has."""
        least = self._membership.least_degree
        if least is None:
            return 0.0
        candidates = self._policy.candidates(self._membership)
        cached = max(self._cached_tokens(entry, candidates), default=0)
        uncached = max(1, entry.request.input_tokens - cached)
        return least * self._model.service_s(least, uncached, cached)

    def _match(self, entry: Entry) -> PrefixMatch:
        """The request's prefix in the index, walked again only after the index changed."""
        if entry.match is None or entry.match_version != self._index.version:
            entry.match = self._index.match(entry.request.blocks)
            entry.match_version = self._index.version
        return entry.match

    def _cached_tokens(self, entry: Entry, candidates: Iterable[Candidate]) -> list[int]:
        """P at each candidate: whole blocks that all its ranks hold, or will where the policy
        counts those, short of the last token, which is always computed."""
        match, blocks = self._match(entry), entry.request.blocks
        before_last = max(0, entry.request.input_tokens - 1)
        counts_in_flight = self._policy.counts_in_flight
        found = []
        for candidate in candidates:
            block_tokens = candidate.pool.block_tokens
            depth = match.depth(candidate.ranks)
            if counts_in_flight and depth < len(blocks):
                in_flight = self._ledger.in_flight(candidate.id)
                while depth < len(blocks) and blocks[depth] in in_flight:
                    depth += 1
            found.append(min(depth, before_last // block_tokens) * block_tokens)
        return found

    def quotes(self, entry: Entry, lanes: Sequence[Lane]) -> list[Quote]:
        """A price from every eligible lane, the choice first, the others by rising price."""
        least = self._membership.least_degree
        if least is None:
            return []
        request = entry.request
        beta, lam = self._policy.beta, self._policy.lam
        service_s = self._model.service_s
        terms: dict[tuple[int, int], tuple[float, float]] = {}
        quotes = []
        cached_at = self._cached_tokens(entry, (lane.candidate for lane in lanes))
        for lane, cached in zip(lanes, cached_at, strict=True):
            candidate = lane.candidate
            if not self.can_take(entry, candidate):
                continue
            degree = candidate.degree
            uncached = max(1, request.input_tokens - cached)
            known = terms.get((degree, cached))
            if known is None:
                own_s = service_s(degree, uncached, cached)
                extra_s = degree * own_s - least * service_s(least, uncached, cached)
                terms[degree, cached] = own_s, extra_s
            else:
                own_s, extra_s = known
            queue_s = lane.queue_s
            total = queue_s + beta * own_s + lam * extra_s
            quotes.append(Quote(lane, cached, uncached, queue_s, own_s, extra_s, total))
        quotes.sort(key=_total)
        self._break_tie(request.id, quotes)
        return quotes

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

    def decision(self, entry: Entry, quotes: Iterable[Quote]) -> Decision:
        """The record of a choice: every candidate with its terms, everyone else with a reason."""
        beta, lam = self._policy.beta, self._policy.lam
        return Decision(
            request_id=entry.id,
            policy=self._policy.name,
            candidates=tuple(
                CostTerms(
                    worker=quote.lane.candidate.id,
                    degree=quote.lane.candidate.degree,
                    cached_tokens=quote.cached_tokens,
                    queue_s=quote.queue_s,
                    service_s=quote.service_s,
                    extra_gpu_s=quote.extra_gpu_s,
                    beta=beta,
                    lam=lam,
                    total=quote.total,
                )
                for quote in quotes
            ),
            excluded=self._excluded(entry),
        )

    def _excluded(self, entry: Entry) -> tuple[tuple[WorkerId, str], ...]:
        excluded = []
        for worker in self._membership.workers:
            if not worker.serving:
                reason: str | None = f"{worker.state.value}: {worker.reason}"
            else:
                reason = entry.rules_out(worker.candidate) or too_large(
                    entry.request, worker.candidate.pool
                )
            if reason is not None:
                excluded.append((worker.id, reason))
        return tuple(excluded)


def _total(quote: Quote) -> float:
    return quote.total
