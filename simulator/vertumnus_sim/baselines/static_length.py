"""A fixed mix of degrees and a fixed border: long prompts to the large workers, short ones to the
small.

What one sets up by hand with two deployments and a rule in front of them; SGLang's router has
such a border in its ``bucket`` policy (``sgl-model-gateway/src/policies/bucket.rs``). Within a
class the worker with the least q + β·s is taken, the paper's price (section 5) without the term
that weighs degrees against each other, as the border has done that.
"""

import random
from typing import Annotated

import msgspec
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.rule import Grid, Rule, least


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threshold_tokens: Annotated[
        int,
        msgspec.Meta(ge=1, description="T: prompts of this input length and above are long"),
    ] = 8192
    beta: Annotated[
        float,
        msgspec.Meta(gt=0, description="β: weight of the request's own prefill time, above 0"),
    ] = 3.0


GRID: Grid = tuple(
    {"threshold_tokens": tokens, "beta": beta}
    for tokens in (2048, 4096, 8192, 16_384, 32_768)
    for beta in (1.0, 3.0)
)


class StaticLength(Rule):
    """The input length counts, cached or not, as a border in front of deployments that are
    apart knows nothing of their caches.

    The large workers are those of the highest degree that the request can go to, the small ones
    all others. With one degree alone there is no border: both classes are all workers.
    """

    name = "static_length"

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self.beta = knobs.beta
        self._threshold_tokens = knobs.threshold_tokens
        self._rng = random.Random(seed)

    def pick(self, question: Question) -> Candidate:
        highest = max(worker.degree for worker in question.workers)
        is_long = question.request.input_tokens >= self._threshold_tokens
        mine = [w for w in question.workers if (w.degree == highest) == is_long]
        return least(
            mine or question.workers,
            lambda w: question.queue_s(w) + self.beta * question.service_s(w),
            self._rng,
        )
