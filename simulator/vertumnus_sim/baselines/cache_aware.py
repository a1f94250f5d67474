"""SGLang's router: to the worker that was sent the longest prefix, or to the least loaded one
when the load is out of balance.

``sgl-model-gateway/src/policies/cache_aware.rs`` and ``mod.rs``; the defaults are those of its
command line, ``bindings/python/src/sglang_router/router_args.py``. Load is the number of
requests under way, and degrees do not count. The load is out of balance if
max − min > ``balance_abs_threshold`` and max > ``balance_rel_threshold`` · min.

What differs: the tree is of block hashes, not of text, so a share of the prompt is one of its
tokens, and the size of a tree is given in tokens. Of several workers with the same match or the
same load the router takes the one that happens to come first; here it is one with the least load,
then one with the smallest tree.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from vertumnus_router.core.types import WorkerId
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.request_tree import RequestTree
from vertumnus_sim.baselines.rule import Grid, Rule


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cache_threshold: Annotated[
        float,
        msgspec.Meta(
            ge=0, le=1, description="a match of more than this share of the prompt decides, 0 to 1"
        ),
    ] = 0.3
    balance_abs_threshold: Annotated[
        int, msgspec.Meta(ge=0, description="requests that loads may differ by, 0 or more")
    ] = 64
    balance_rel_threshold: Annotated[
        float, msgspec.Meta(ge=1, description="times that loads may differ by, 1 or more")
    ] = 1.5
    eviction_interval_s: Annotated[
        float, msgspec.Meta(gt=0, description="seconds between evictions from trees, above 0")
    ] = 60.0
    # 2**26 characters, at four to a token.
    max_tree_tokens: Annotated[
        int, msgspec.Meta(ge=1, description="what an eviction leaves of a worker's tree")
    ] = 2**24
    fallback: Annotated[
        Literal["min_load", "smallest_tree"],
        msgspec.Meta(
            description="who gets a prompt that matches too little: the worker with the least "
            "load, 'min_load', as the code has it, or that with the 'smallest_tree', as its "
            "documentation says"
        ),
    ] = "min_load"


GRID: Grid = tuple(
    {
        "cache_threshold": share,
        "balance_abs_threshold": requests,
        "balance_rel_threshold": times,
    }
    for share in (0.1, 0.3, 0.5)
    for requests, times in ((1, 1.0), (4, 1.1), (16, 1.2), (32, 1.1), (64, 1.5))
)


class CacheAware(Rule):
    name = "cache_aware"

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self._knobs = knobs
        self._trees: dict[WorkerId, RequestTree] = {}
        self._evict_s: float | None = None

    def pick(self, question: Question) -> Candidate:
        block_tokens = question.workers[0].pool.block_tokens
        self._evict(question.now, block_tokens)
        trees = {worker.id: self._tree(worker.id) for worker in question.workers}
        worker = self._choose(question, trees, block_tokens)
        trees[worker.id].insert(question.request.blocks)
        return worker

    def left(self, worker: WorkerId) -> None:
        self._trees.pop(worker, None)

    def _tree(self, worker: WorkerId) -> RequestTree:
        return self._trees.setdefault(worker, RequestTree())

    def _choose(
        self, question: Question, trees: Mapping[WorkerId, RequestTree], block_tokens: int
    ) -> Candidate:
        knobs, workers = self._knobs, question.workers
        loads = {worker.id: question.requests(worker) for worker in workers}

        def idlest(among: Iterable[Candidate]) -> Candidate:
            return min(among, key=lambda worker: (loads[worker.id], len(trees[worker.id])))

        most, fewest = max(loads.values()), min(loads.values())
        if (
            most - fewest > knobs.balance_abs_threshold
            and most > knobs.balance_rel_threshold * fewest
        ):
            return idlest(workers)
        matched = {worker.id: trees[worker.id].match(question.request.blocks) for worker in workers}
        longest = max(matched.values())
        if longest * block_tokens > knobs.cache_threshold * question.request.input_tokens:
            return idlest(worker for worker in workers if matched[worker.id] == longest)
        if knobs.fallback == "smallest_tree":
            return min(workers, key=lambda worker: (len(trees[worker.id]), loads[worker.id]))
        return idlest(workers)

    def _evict(self, now: float, block_tokens: int) -> None:
        """Evict if that is due. A tree only changes and counts when it is asked, so there is no
        difference to a timer."""
        if self._evict_s is None:
            self._evict_s = now + self._knobs.eviction_interval_s
        elif now >= self._evict_s:
            overdue_s = now - self._evict_s
            interval_s = self._knobs.eviction_interval_s
            self._evict_s = now + interval_s - overdue_s % interval_s
            for tree in self._trees.values():
                tree.evict(self._knobs.max_tree_tokens // block_tokens)
