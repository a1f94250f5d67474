"""Each worker in turn, whatever it has to do and whatever it holds.

SGLang's router: ``sgl-model-gateway/src/policies/round_robin.rs``, a counter modulo the healthy
workers.
"""

import msgspec
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.question import Question
from vertumnus_sim.baselines.rule import Grid, Rule


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None: there is nothing to set."""


GRID: Grid = ({},)


class RoundRobin(Rule):
    name = "round_robin"

    def __init__(self, knobs: Knobs, seed: int) -> None:
        self._dispatched = 0

    def pick(self, question: Question) -> Candidate:
        worker = question.workers[self._dispatched % len(question.workers)]
        self._dispatched += 1
        return worker
