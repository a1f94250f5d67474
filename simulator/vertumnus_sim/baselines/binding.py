"""From a rule's pick to a dispatch: who can take a request, its reservation, its decision."""

from vertumnus_router.core.decodes import Decodes, room
from vertumnus_router.core.effects import Chosen, CostTerms, Decision, Dispatch, Effect, Pairing
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.placement import too_large
from vertumnus_router.core.requests import Entry, RequestTable
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import DecodeId, Rank
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.rule import Rule


class EarlyBinding:
    """Takes requests from the queue to workers as soon as one can take them."""

    def __init__(
        self,
        rule: Rule,
        model: PrefillModel,
        index: PrefixIndex,
        membership: Membership,
        ledger: Ledger,
        decodes: Decodes,
        table: RequestTable,
    ) -> None:
        self._rule = rule
        self._model = model
        self._index = index
        self._membership = membership
        self._ledger = ledger
        self._decodes = decodes
        self._table = table

    def bind(self, now: float) -> list[Effect]:
        """Dispatch what waits and can go, first come, first served."""
        effects: list[Effect] = []
        if not self._table.queued or not self._membership.serving:
            return effects
        needs_room = all(worker.pool.prefill_only for worker in self._membership.serving)
        for entry in self._table.queue():
            if needs_room and not self._decodes.has_room:
                break
            takers = self.takers(entry)
            decode: DecodeId | None = None
            if any(worker.pool.prefill_only for worker in takers):
                decode = self._decodes.choose(entry.request.prompts, avoid=entry.failed_decodes)
            if decode is None:
                takers = [worker for worker in takers if not worker.pool.prefill_only]
            if takers:
                effects.append(self._dispatch(entry, takers, decode, now))
        return effects

    def takers(self, entry: Entry) -> list[Candidate]:
        """The workers that serve, fit the request, and at which it has not failed."""
        return [
            worker
            for worker in self._membership.serving
            if entry.rules_out(worker) is None and too_large(entry.request, worker.pool) is None
        ]

    def _dispatch(
        self, entry: Entry, takers: list[Candidate], decode: DecodeId | None, now: float
    ) -> Dispatch:
        question = Question(
            entry.request, takers, now, self._table, self._ledger, self._index, self._model
        )
        worker = self._rule.pick(question)
        terms = self._terms(question, worker)
        if not worker.pool.prefill_only:
            decode = None
        home = min(
            (Rank(worker.pool.pool, index) for index in worker.block.ranks),
            key=self._table.homed,
        )
        uncached = question.uncached_tokens(worker)
        self._table.bind(entry, worker, home, terms.service_s, uncached, (), decode, now)
        attempt = len(entry.tried)
        pair = None
        if decode is not None:
            pair = Pairing(decode, room(entry.id, attempt, home.index, worker.pool.size))
        return Dispatch(
            request_id=entry.id,
            pool=worker.pool.pool,
            home=home,
            worker=worker.id,
            decision=Decision(entry.id, self._rule.name, Chosen(terms), decode=decode),
            attempt=attempt,
            pair=pair,
        )

    def _terms(self, question: Question, worker: Candidate) -> CostTerms:
        queue_s, service_s = question.queue_s(worker), question.service_s(worker)
        cached, uncached = question.cached_tokens(worker), question.uncached_tokens(worker)
        return CostTerms(
            worker=worker.id,
            degree=worker.degree,
            cached_tokens=cached,
            reconcile_tokens=question.reconcile_tokens(worker),
            queue_s=queue_s,
            service_s=service_s,
            extra_gpu_s=0.0,
            beta=self._rule.beta,
            lam=0.0,
            total=queue_s + self._rule.beta * service_s,
            extrapolated=self._model.profile.extrapolates(worker.degree, uncached, cached),
        )
