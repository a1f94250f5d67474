"""The pass over the central queue: plan in order, bind what may bind now."""

from vertumnus_router.core.effects import Decision, Dispatch, Effect
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.placement import Placement, Quote, too_large
from vertumnus_router.core.policy import Lane, Policy
from vertumnus_router.core.requests import Entry, RequestTable
from vertumnus_router.core.types import Rank, Request


class Binding:
    """Takes requests from the queue to candidates, by one path for every policy."""

    def __init__(
        self,
        policy: Policy,
        placement: Placement,
        membership: Membership,
        ledger: Ledger,
        table: RequestTable,
    ) -> None:
        self._policy = policy
        self._placement = placement
        self._membership = membership
        self._ledger = ledger
        self._table = table

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
        lanes = self._lanes(now)
        if any(map(self._policy.may_bind, lanes)):
            # What is cached by now may have made another one the cheapest.
            for entry in self._table.queue()[: self._policy.window]:
                self._table.reorder(entry, self._urgency(entry))
        planned = 0
        for entry in self._table.queue():
            if planned == self._policy.window or not any(map(self._policy.may_bind, lanes)):
                break
            quotes = self._placement.quotes(entry, lanes)
            if not quotes:
                continue
            planned += 1
            # A request may prefer to wait for a busy worker; those behind it see it there.
            if self._plan(quotes[0]):
                effects.append(self._dispatch(entry, quotes, now))
        return effects

    def explain(self, request: Request, now: float) -> Decision:
        """The decision that ``bind`` would come to for the request, behind the queue as it is."""
        entry = self.draft(request, now)
        lanes = self._lanes(now)
        for other in self._table.ahead_of(entry)[: self._policy.window]:
            quotes = self._placement.quotes(other, lanes)
            if quotes:
                self._plan(quotes[0])
        return self._placement.decision(entry, self._placement.quotes(entry, lanes))

    def mark_stranded(self, entry: Entry, now: float) -> None:
        """Note since when no serving worker could take the queued request."""
        candidates = self._policy.candidates(self._membership)
        if any(self._placement.can_take(entry, candidate) for candidate in candidates):
            entry.stranded_s = None
        elif entry.stranded_s is None:
            entry.stranded_s = now

    def exhausted(self, entry: Entry) -> bool:
        """Whether earlier attempts rule out every serving worker that the request fits.

        With none serving, or none that it fits, there is still something to wait for.
        """
        fitting = [
            candidate
            for candidate in self._policy.candidates(self._membership)
            if too_large(entry.request, candidate.pool) is None
        ]
        return bool(fitting) and None not in map(entry.rules_out, fitting)

    def _plan(self, choice: Quote) -> bool:
        """Put the request on the timeline that it chose; whether it may also bind."""
        binds = self._policy.may_bind(choice.lane)
        choice.lane.plan(choice.service_s, choice.uncached_tokens, binds)
        return binds

    def _dispatch(self, entry: Entry, quotes: list[Quote], now: float) -> Dispatch:
        choice, candidate = quotes[0], quotes[0].lane.candidate
        decision = self._placement.decision(entry, quotes)
        blocks = entry.request.blocks if self._policy.counts_in_flight else ()
        self._table.bind(entry, candidate, choice.service_s, choice.uncached_tokens, blocks, now)
        return Dispatch(
            request_id=entry.id,
            pool=candidate.pool.pool,
            leader=Rank(candidate.pool.pool, candidate.block.leader),
            worker=candidate.id,
            decision=decision,
            attempt=len(entry.tried),
        )

    def _lanes(self, now: float) -> list[Lane]:
        return [
            Lane(c, self._ledger.queue_s(c.id, now), *self._ledger.load(c.id))
            for c in self._policy.candidates(self._membership)
        ]

    def _urgency(self, entry: Entry) -> float:
        return self._policy.urgency(entry.arrived_s, lambda: self._placement.least_gpu_s(entry))
