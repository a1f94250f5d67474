"""What tells one baseline from another: which worker a request goes to.

The rest (who serves, what they hold, the requests and their ends) is ``BaselineRouter``'s.
"""

import random
from collections.abc import Callable, Iterable, Mapping

from vertumnus_router.core.types import RequestId, WorkerId
from vertumnus_router.core.workers import Candidate

from vertumnus_sim.baselines.question import Question

#: What a knob can be set to, and the settings of its knobs that a tuner tries for a baseline.
Setting = float | str
Grid = tuple[Mapping[str, Setting], ...]


class Rule:
    """A baseline's rule. ``pick`` is called once for each dispatch and may remember it."""

    name: str
    #: weight of the request's own service time in the total of its ``Decision``
    beta: float = 1.0

    def pick(self, question: Question) -> Candidate:
        """One of the question's workers, which the request is now dispatched to."""
        raise NotImplementedError

    def freed(self, request: RequestId) -> None:
        """No worker has the request any more. Told once or more often for every dispatch."""
        return

    def left(self, worker: WorkerId) -> None:
        """The worker serves no more; one of the same name that comes later is another one."""
        return


def least(
    workers: Iterable[Candidate], price: Callable[[Candidate], float], rng: random.Random
) -> Candidate:
    """A worker of the lowest price, drawn from those that have it: the first one would get all
    requests of an idle cluster, and fill its cache alone."""
    prices = [(price(worker), worker) for worker in workers]
    lowest = min(value for value, _ in prices)
    equal = [worker for value, worker in prices if value == lowest]
    return equal[0] if len(equal) == 1 else rng.choice(equal)
