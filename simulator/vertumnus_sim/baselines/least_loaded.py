"""The worker with the least to do: what load balancers do that know nothing of caches.

Dynamo offers it by requests (``--router-mode least-loaded``, docs/components/router/
router-concepts.md). By tokens it is what a router can know that tokenises and follows the
workers' KV events: the uncached tokens of the prefills that have not ended.
"""

import random
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.rule import Grid, Rule, least

Measure = Annotated[
    Literal["requests", "tokens"],
    msgspec.Meta(
        description="what load is: 'requests' that have not ended, or uncached 'tokens' of "
        "prefills that have not"
    ),
]


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    measure: Measure = "tokens"


GRID: Grid = ({"measure": "requests"}, {"measure": "tokens"})


def load_measure(measure: str, question: Question) -> Callable[[Candidate], int]:
    """The load of a worker in the unit that ``measure`` names."""
    return question.requests if measure == "requests" else question.waiting_tokens


class LeastLoaded(Rule):
    """Load counts per rank, as a worker of degree C does C times as much. Equal ones draw."""

    name = "least_loaded"

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self._measure = knobs.measure
        self._rng = random.Random(seed)

    def pick(self, question: Question) -> Candidate:
        load = load_measure(self._measure, question)
        return least(question.workers, lambda worker: load(worker) / worker.degree, self._rng)
