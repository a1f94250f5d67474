"""Dynamo's KV router: the worker where prompt blocks to compute and active blocks are fewest.

``docs/components/router/router-concepts.md`` and ``router-configuration.md``, and the selector in
``lib/kv-router/src/scheduling/``:

    prefill_blocks = uncached blocks of the prefills that have not ended + those of the request
    decode_blocks  = blocks of the requests at the worker, with those of the request, each once
    cost           = overlap_score_weight · prefill_blocks + decode_blocks

What is cached comes from the workers' KV events, what is active from the router's own account.
A prefill counts in full until its first token, and output is not counted (both are Dynamo's
defaults). A pool that prefills only has no decode_blocks, as ``--no-router-track-active-blocks``
does there. ``overlap_score_weight`` is called ``prefill_load_scale`` in later releases. Degrees
do not count.

With a ``temperature`` workers are drawn: cost is scaled to 0 to 1 over the workers, and one of
cost c has the weight exp(−c / temperature). Without, equal ones draw.
"""

import math
import random
from typing import Annotated

import msgspec
from vertumnus_router.core.types import RequestId
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.active_blocks import ActiveBlocks
from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.rule import Grid, Rule, least


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    overlap_score_weight: Annotated[
        float,
        msgspec.Meta(ge=0, description="blocks to compute over active blocks, 0 or more"),
    ] = 1.0
    temperature: Annotated[
        float, msgspec.Meta(ge=0, description="0 takes the least cost, more draws more evenly")
    ] = 0.0


GRID: Grid = tuple(
    # Where decode is elsewhere the weight scales every cost alike.
    {"temperature": temperature}
    for temperature in (0.0, 0.02, 0.1, 0.5)
)


class DynamoLike(Rule):
    name = "dynamo_like"

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self._weight = knobs.overlap_score_weight
        self._temperature = knobs.temperature
        self._rng = random.Random(seed)
        self._active = ActiveBlocks()

    def pick(self, question: Question) -> Candidate:
        worker = self._draw(question)
        self._active.add(question.request.id, worker.id, question.request.blocks)
        return worker

    def freed(self, request: RequestId) -> None:
        self._active.free(request)

    def cost(self, question: Question, worker: Candidate) -> float:
        """The cost of the request at the worker, in blocks."""
        tokens = question.waiting_tokens(worker) + question.uncached_tokens(worker)
        cost = self._weight * tokens / worker.pool.block_tokens
        if worker.pool.prefill_only:
            return cost
        return cost + self._active.with_request(worker.id, question.request.blocks)

    def _draw(self, question: Question) -> Candidate:
        workers = question.workers
        if not self._temperature:
            return least(workers, lambda worker: self.cost(question, worker), self._rng)
        costs = [self.cost(question, worker) for worker in workers]
        lowest = min(costs)
        spread = (max(costs) - lowest) or 1.0
        weights = [math.exp(-(cost - lowest) / spread / self._temperature) for cost in costs]
        return self._rng.choices(workers, weights)[0]
