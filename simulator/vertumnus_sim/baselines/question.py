"""One request that is to be placed, and what the router can know of its workers at that moment."""

from collections.abc import Sequence

from vertumnus_router.core.chains import usable_blocks
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.requests import RequestTable
from vertumnus_router.core.trie import PrefixIndex, PrefixMatch
from vertumnus_router.core.types import Request
from vertumnus_router.core.workers import Candidate


class Question:
    """Where should ``request`` go? ``workers`` are those that can take it, one at least, by pool
    and rank. Answers are computed when they are asked for, and asking changes nothing."""

    __slots__ = ("_index", "_ledger", "_match", "_model", "_table", "now", "request", "workers")

    def __init__(
        self,
        request: Request,
        workers: Sequence[Candidate],
        now: float,
        table: RequestTable,
        ledger: Ledger,
        index: PrefixIndex,
        model: PrefillModel,
    ) -> None:
        self.request = request
        self.workers = workers
        self.now = now
        self._table = table
        self._ledger = ledger
        self._index = index
        self._model = model
        self._match: PrefixMatch | None = None

    def requests(self, worker: Candidate) -> int:
        """Requests that the worker has, in prefill or past it: the load that SGLang's router
        counts, from the dispatch until the answer is complete."""
        return len(self._table.assigned(worker.id))

    def waiting_tokens(self, worker: Candidate) -> int:
        """Uncached tokens of the worker's prefills that have not ended. One that runs counts in
        full until it ends."""
        return self._ledger.load(worker.id)[0]

    def queue_s(self, worker: Candidate) -> float:
        """q_w of the paper: predicted seconds of those prefills, aged by the running one."""
        return self._ledger.queue_s(worker.id, self.now)

    def cached_tokens(self, worker: Candidate) -> int:
        """P: what the worker holds of the prompt by its ranks' own events, in whole blocks and
        without the last token, which is always computed."""
        if self._match is None:
            self._match = self._index.match(self.request.blocks)
        block_tokens = worker.pool.block_tokens
        usable = usable_blocks(self.request, block_tokens)
        return min(self._match.longest(worker.ranks), usable) * block_tokens

    def reconcile_tokens(self, worker: Candidate) -> int:
        """How much of that some ranks of the worker lack and copy from the others first."""
        cached = self.cached_tokens(worker)
        assert self._match is not None
        return max(0, cached - self._match.common(worker.ranks) * worker.pool.block_tokens)

    def uncached_tokens(self, worker: Candidate) -> int:
        """R: what is left of the prompt, one token at least."""
        return max(1, self.request.input_tokens - self.cached_tokens(worker))

    def service_s(self, worker: Candidate) -> float:
        """Ê_C(R, P) at the worker, seconds."""
        uncached, cached = self.uncached_tokens(worker), self.cached_tokens(worker)
        return self._model.service_s(worker.degree, uncached, cached)
