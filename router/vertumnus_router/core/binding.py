"""The pass over the central queue: plan in order, bind what may bind now."""

from itertools import islice

from vertumnus_router.core.chains import usable_blocks
from vertumnus_router.core.decodes import Decodes, room
from vertumnus_router.core.effects import Decision, Dispatch, Effect, Pairing
from vertumnus_router.core.lanes import Lanes, LaneSource
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.placement import Placement, too_large
from vertumnus_router.core.policy import Policy
from vertumnus_router.core.pricing import Quotes
from vertumnus_router.core.pulls import Pulls
from vertumnus_router.core.requests import Entry, RequestTable
from vertumnus_router.core.statistics import PrefixStatistics
from vertumnus_router.core.types import DecodeId, Rank, Request
from vertumnus_router.core.workers import Candidate


class Binding:
    """Takes requests from the queue to candidates, by one path for every policy."""

    def __init__(
        self,
        policy: Policy,
        lanes: LaneSource,
        placement: Placement,
        membership: Membership,
        table: RequestTable,
        decodes: Decodes,
        pulls: Pulls,
        statistics: PrefixStatistics | None,
    ) -> None:
        self._policy = policy
        self._placement = placement
        self._membership = membership
        self._lanes = lanes
        self._table = table
        self._decodes = decodes
        self._pulls = pulls
        self._statistics = statistics

    def observe(self, now: float) -> None:
        """Tell the policy how the queue has stood until now."""
        self._policy.observe(self._table.queued, self._membership.serving_ranks, now)

    def draft(self, request: Request, now: float) -> Entry:
        """The request as it would enter the queue."""
        entry = self._table.draft(request, 0.0, now)
        entry.urgency = self._urgency(entry)
        return entry

    def bind(self, now: float, drafted: Entry | None = None) -> list[Effect]:
        """Plan the queue in its order onto the candidates' timelines; dispatch what may go.
        ``drafted`` is in its place in the queue as of now."""
        effects: list[Effect] = []
        if not self._table.queued:
            return effects
        lanes = self._lanes.now(now)
        if not self._any_may_go(lanes):
            return effects
        # What is cached by now may have made another one the cheapest.
        for entry in list(islice(self._table.turns(), self._policy.window)):
            if entry is not drafted:
                self._table.reorder(entry, self._urgency(entry))
        planned = 0
        for entry in self._table.turns():
            if planned == self._policy.window:
                break
            quotes = self._placement.quotes(entry, lanes, now)
            if quotes is None:
                continue
            planned += 1
            decode = self._pair(entry, quotes)
            if quotes.candidate.pool.prefill_only and decode is None and self._decodes.has_room:
                break  # a batch, for which there never are rooms enough if others go first
            # A request may prefer to wait for a busy worker; those behind it see it there.
            forms = lanes.forms(quotes.lane) and self._has_room(quotes.candidate)
            if self._plan(lanes, entry, quotes):
                effects.append(self._dispatch(entry, quotes, decode, now))
            elif forms:
                effects += self._lanes.form(lanes, quotes.lane, now)
            else:
                continue
            if not self._any_may_go(lanes):
                break
        return effects

    def explain(self, request: Request, now: float) -> Decision:
        """The decision that ``bind`` would come to for the request, behind the queue as it is."""
        entry = self.draft(request, now)
        lanes = self._lanes.now(now)
        for other in self._table.ahead_of(entry)[: self._policy.window]:
            quotes = self._placement.quotes(other, lanes, now)
            if quotes is not None:
                self._plan(lanes, other, quotes)
        quotes = self._placement.quotes(entry, lanes, now)
        decode = None if quotes is None else self._pair(entry, quotes)
        return self._placement.decision(entry, quotes, decode)

    def mark_stranded(self, entry: Entry, now: float) -> None:
        """Note since when no serving worker could take the queued request."""
        if self._placement.can_take(entry):
            entry.stranded_s = None
        elif entry.stranded_s is None:
            entry.stranded_s = now

    def exhausted(self, entry: Entry) -> bool:
        """Whether earlier attempts rule out every worker that the request fits.

        With none serving, or none that it fits, there is still something to wait for; what
        drains comes back, or others in its place.
        """
        candidates = self._policy.candidates(self._membership).each + self._membership.draining
        fitting = [
            candidate
            for candidate in candidates
            if too_large(entry.request, candidate.pool) is None
        ]
        return bool(fitting) and None not in map(entry.rules_out, fitting)

    def _plan(self, lanes: Lanes, entry: Entry, quotes: Quotes) -> bool:
        """Put the request on the timeline that it chose; whether it may also bind."""
        at, offer = quotes.lane, quotes.offer
        binds = self._may_bind(lanes, at) and self._has_room(quotes.candidate)
        tokens = offer.uncached_tokens if entry.is_told(quotes.candidate) else 0
        lanes.plan(at, offer.service_s, tokens, binds)
        return binds

    def _any_may_go(self, lanes: Lanes) -> bool:
        """Whether a request may go to some candidate now, or have one made, and to a decode
        server if it must."""
        return any(
            self._may_bind(lanes, at) or lanes.forms(at)
            for at, candidate in enumerate(lanes.candidates.each)
            if self._has_room(candidate)
        )

    def _may_bind(self, lanes: Lanes, at: int) -> bool:
        return lanes.serves(at) and self._policy.may_bind(
            lanes.candidates.each[at].pool, lanes.loads[at]
        )

    def _has_room(self, candidate: Candidate) -> bool:
        return not candidate.pool.prefill_only or self._decodes.has_room

    def _pair(self, entry: Entry, quotes: Quotes) -> DecodeId | None:
        """The decode server for the request, None if it needs none or none has the rooms."""
        if not quotes.candidate.pool.prefill_only:
            return None
        return self._decodes.choose(entry.request.prompts, avoid=entry.failed_decodes)

    def _dispatch(
        self, entry: Entry, quotes: Quotes, decode: DecodeId | None, now: float
    ) -> Dispatch:
        offer, candidate = quotes.offer, quotes.candidate
        home = self._home(candidate)
        decision = self._placement.decision(entry, quotes, decode)
        if self._statistics is not None and not entry.tried:
            self._count(self._statistics, entry, quotes)
        # What will be there once it has been computed or pulled; not if nobody asks.
        asked = self._policy.counts_in_flight or self._pulls.enabled
        blocks = entry.request.blocks if asked else ()
        wanted = None
        if offer.pull_tokens:
            wanted = self._pulls.find(entry.request, quotes.match, candidate, now)
        self._table.bind(
            entry, candidate, home, offer.service_s, offer.uncached_tokens, blocks, decode, now
        )
        attempt = len(entry.tried)
        pair = None
        if decode is not None:
            pair = Pairing(decode, room(entry.id, attempt, home.index, candidate.pool.size))
        pull = None
        if wanted is not None:
            pull = self._pulls.begin(wanted, entry.request, now)
        elif asked:
            # What it counts on is not there before the copy that brings it has ended.
            usable = usable_blocks(entry.request, candidate.pool.block_tokens)
            pull = self._pulls.on_its_way(entry.request, quotes.match, candidate, usable)
        return Dispatch(
            request_id=entry.id,
            pool=candidate.pool.pool,
            home=home,
            worker=candidate.id,
            decision=decision,
            attempt=attempt,
            pair=pair,
            pull=pull,
        )

    def _count(self, statistics: PrefixStatistics, entry: Entry, quotes: Quotes) -> None:
        """Count what the request finds where it goes, and what it would have found at the degree
        that it would have gone to without a queue."""
        block_tokens = quotes.candidate.pool.block_tokens
        statistics.dispatched(
            entry.request,
            quotes.match,
            quotes.candidate.degree,
            quotes.offer.cached_tokens // block_tokens,
            quotes.preferred().degree,
            usable_blocks(entry.request, block_tokens),
        )

    def _home(self, candidate: Candidate) -> Rank:
        """The rank with the fewest requests: a split then divides them evenly."""
        if candidate.degree == 1:
            return Rank(candidate.pool.pool, candidate.block.first)
        ranks = (Rank(candidate.pool.pool, index) for index in candidate.block.ranks)
        return min(ranks, key=self._table.homed)

    def _urgency(self, entry: Entry) -> float:
        return self._policy.urgency(entry.arrived_s, lambda: self._placement.least_gpu_s(entry))
