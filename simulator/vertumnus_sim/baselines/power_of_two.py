"""The less loaded of two workers that are drawn at random.

SGLang's router: ``sgl-model-gateway/src/policies/power_of_two.rs``. It compares the tokens that
the workers report if both have reported, else the requests that it has sent them; the first one
drawn wins where they are equal. It takes no account of degrees.
"""

import random

import msgspec
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.least_loaded import Measure, load_measure
from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.rule import Grid, Rule


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    measure: Measure = "requests"


GRID: Grid = ({"measure": "requests"}, {"measure": "tokens"})


class PowerOfTwo(Rule):
    name = "power_of_two"

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self._measure = knobs.measure
        self._rng = random.Random(seed)

    def pick(self, question: Question) -> Candidate:
        if len(question.workers) == 1:
            return question.workers[0]
        first, second = self._rng.sample(question.workers, 2)
        load = load_measure(self._measure, question)
        return first if load(first) <= load(second) else second
