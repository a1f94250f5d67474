"""A stand-in for Mooncake's conversation trace: its lengths, rate and reuse, not its requests."""

from random import Random

from vertumnus_sim.workloads.arrivals import poisson
from vertumnus_sim.workloads.lengths import Quantiles, sample
from vertumnus_sim.workloads.prefixes import Application, Shape, Sharing, share_prefixes
from vertumnus_sim.workloads.statistics import Statistics
from vertumnus_sim.workloads.traces import TraceRequest

#: Of ``conversation_trace.jsonl``.
TRACE = Statistics(12_031, 12_035, 85_401, 342.6, 1_120, 0.3736)
RATE_PER_S = TRACE.requests / 3_537

_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.9, 100)
_INPUT = Quantiles(
    _PERCENTS,
    (891, 894, 901, 964, 2306, 6909, 15368, 27367, 39552, 66484, 85401, 121301, 126195),
)
_OUTPUT = Quantiles(_PERCENTS, (1, 3, 10, 24, 156, 350, 472, 597, 698, 893, 1120, 1700, 2000))
#: All requests of the trace begin with the same block. How many are continued is a fit to its
#: reuse.
_SHARING = Sharing(applications=(Application(1.0, 1),), continued=0.5, tries=16)


def conversation_like(seed: int, requests: int = TRACE.requests) -> list[TraceRequest]:
    """Independent arrivals over about an hour; prompts of one application, continued."""
    source = Random(f"conversation {seed}")
    shapes = map(
        Shape,
        poisson(requests, RATE_PER_S, source),
        sample(_INPUT, requests, source),
        sample(_OUTPUT, requests, source),
    )
    return share_prefixes(list(shapes), _SHARING, source)
