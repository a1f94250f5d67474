"""The pass over the central queue: plan in order, bind what may bind now."""

from vertumnus_router.core.decodes import Decodes, room
from vertumnus_router.core.effects import Decision, Dispatch, Effect, Pairing
from vertumnus_router.core.lanes import Lane, Lanes
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.placement import Placement, Quote, too_large, usable_blocks
from vertumnus_router.core.policy import Policy
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
        lanes: Lanes,
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

    def bind(self, now: float) -> list[Effect]:
        """Plan the queue in its order onto the candidates' timelines; dispatch what may go."""
        effects: list[Effect] = []
        if not self._table.queued:
            return effects
        lanes = self._lanes.now(now)
        if any(map(self._may_go, lanes)):
            # What is cached by now may have made another one the cheapest.
            for entry in self._table.queue()[: self._policy.window]:
                self._table.reorder(entry, self._urgency(entry))
        planned = 0
        for entry in self._table.queue():
            if planned == self._policy.window or not any(map(self._may_go, lanes)):
                break
            quotes = self._placement.quotes(entry, lanes, now)
            if not quotes:
                continue
            planned += 1
            decode = self._pair(entry, quotes[0])
            if (
                quotes[0].lane.candidate.pool.prefill_only
                and decode is None
                and self._decodes.has_room
            ):
                break  # a batch, for which there never are rooms enough if others go first
            # A request may prefer to wait for a busy worker; those behind it see it there.
            forms = quotes[0].lane.forms and self._may_go(quotes[0].lane)
            if self._plan(quotes[0]):
                effects.append(self._dispatch(entry, quotes, decode, now))
            elif forms:
                effects += self._lanes.form(quotes[0].lane, lanes, now)
        return effects

    def explain(self, request: Request, now: float) -> Decision:
        """The decision that ``bind`` would come to for the request, behind the queue as it is."""
        entry = self.draft(request, now)
        lanes = self._lanes.now(now)
        for other in self._table.ahead_of(entry)[: self._policy.window]:
            quotes = self._placement.quotes(other, lanes, now)
            if quotes:
                self._plan(quotes[0])
        quotes = self._placement.quotes(entry, lanes, now)
        decode = self._pair(entry, quotes[0]) if quotes else None
        return self._placement.decision(entry, quotes, decode)

    def mark_stranded(self, entry: Entry, now: float) -> None:
        """Note since when no serving worker could take the queued request."""
        candidates = self._policy.candidates(self._membership)
        if any(self._placement.can_take(entry, candidate) for candidate in candidates):
            entry.stranded_s = None
        elif entry.stranded_s is None:
            entry.stranded_s = now

    def exhausted(self, entry: Entry) -> bool:
        """Whether earlier attempts rule out every worker that the request fits.

        With none serving, or none that it fits, there is still something to wait for; what
        drains comes back, or others in its place.
        """
        candidates = self._policy.candidates(self._membership) + self._membership.draining
        fitting = [
            candidate
            for candidate in candidates
            if too_large(entry.request, candidate.pool) is None
        ]
        return bool(fitting) and None not in map(entry.rules_out, fitting)

    def _plan(self, choice: Quote) -> bool:
        """Put the request on the timeline that it chose; whether it may also bind."""
        binds = self._may_bind(choice.lane)
        choice.lane.plan(choice.service_s, choice.uncached_tokens, binds)
        return binds

    def _may_bind(self, lane: Lane) -> bool:
        """Whether a request may go to the lane's block now, and to a decode server if it must."""
        return self._policy.may_bind(lane) and self._has_room(lane)

    def _may_go(self, lane: Lane) -> bool:
        """Whether it may, or the block may be made for it."""
        return (lane.forms or self._policy.may_bind(lane)) and self._has_room(lane)

    def _has_room(self, lane: Lane) -> bool:
        return not lane.candidate.pool.prefill_only or self._decodes.has_room

    def _pair(self, entry: Entry, choice: Quote) -> DecodeId | None:
        """The decode server for the request, None if it needs none or none has the rooms."""
        if not choice.lane.candidate.pool.prefill_only:
            return None
        return self._decodes.choose(entry.request.prompts, avoid=entry.failed_decodes)

    def _dispatch(
        self, entry: Entry, quotes: list[Quote], decode: DecodeId | None, now: float
    ) -> Dispatch:
        choice, candidate = quotes[0], quotes[0].lane.candidate
        home = self._home(candidate)
        decision = self._placement.decision(entry, quotes, decode)
        if self._statistics is not None and not entry.tried:
            self._count(self._statistics, entry, quotes)
        # What will be there once it has been computed or pulled; not if nobody asks.
        asked = self._policy.counts_in_flight or self._pulls.enabled
        blocks = entry.request.blocks if asked else ()
        self._table.bind(
            entry, candidate, home, choice.service_s, choice.uncached_tokens, blocks, decode, now
        )
        attempt = len(entry.tried)
        pair = None
        if decode is not None:
            pair = Pairing(decode, room(entry.id, attempt, home.index, candidate.pool.size))
        pull = None
        if choice.pull is not None:
            pull = self._pulls.begin(choice.pull, entry.request, now)
        elif asked:
            # What it counts on is not there before the copy that brings it has ended.
            usable = usable_blocks(entry.request, candidate.pool.block_tokens)
            match = self._placement.match(entry)
            pull = self._pulls.on_its_way(entry.request, match, candidate, usable)
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

    def _count(self, statistics: PrefixStatistics, entry: Entry, quotes: list[Quote]) -> None:
        """Count what the request finds where it goes, and what it would have found at the degree
        that it would have gone to without a queue."""
        candidate, block_tokens = (
            quotes[0].lane.candidate,
            quotes[0].lane.candidate.pool.block_tokens,
        )
        preferred = min(quotes, key=lambda quote: quote.total - quote.queue_s)
        statistics.dispatched(
            entry.request,
            self._placement.match(entry),
            candidate.degree,
            quotes[0].cached_tokens // block_tokens,
            preferred.lane.candidate.degree,
            usable_blocks(entry.request, block_tokens),
        )

    def _home(self, candidate: Candidate) -> Rank:
        """The rank with the fewest requests: a split then divides them evenly."""
        ranks = (Rank(candidate.pool.pool, index) for index in candidate.block.ranks)
        return min(ranks, key=self._table.homed)

    def _urgency(self, entry: Entry) -> float:
        return self._policy.urgency(entry.arrived_s, lambda: self._placement.least_gpu_s(entry))
