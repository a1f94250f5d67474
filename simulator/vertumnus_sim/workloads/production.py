"""A workload like the paper's Production: heavy tails, many applications, little reuse."""

from random import Random

from vertumnus_sim.workloads.arrivals import poisson
from vertumnus_sim.workloads.lengths import LogNormal, sample
from vertumnus_sim.workloads.prefixes import Application, Shape, Sharing, share_prefixes
from vertumnus_sim.workloads.statistics import PAPER
from vertumnus_sim.workloads.traces import TraceRequest

RATE_PER_S = PAPER["production"].requests / 3600

#: The paper gives mean and P99, and both are met by a logarithm that is normal.
_INPUT = LogNormal(median=1_900, sigma=1.625, most=262_144)
_OUTPUT = LogNormal(median=141, sigma=1.461, most=32_768)
#: Weights by Zipf's law; system prompts of no to seven blocks. Nothing is known of the paper's:
#: they and the share of continued conversations are a fit to its reuse.
_APPLICATIONS = tuple(Application(1 / (rank + 1), rank * 5 % 8) for rank in range(40))
_SHARING = Sharing(applications=_APPLICATIONS, continued=0.28, tries=16)


def production_like(seed: int, requests: int = PAPER["production"].requests) -> list[TraceRequest]:
    """Independent arrivals over about an hour."""
    source = Random(f"production {seed}")
    shapes = map(
        Shape,
        poisson(requests, RATE_PER_S, source),
        sample(_INPUT, requests, source),
        sample(_OUTPUT, requests, source),
    )
    return share_prefixes(list(shapes), _SHARING, source)
