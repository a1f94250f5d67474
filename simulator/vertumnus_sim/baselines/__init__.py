"""What users would pick instead of this router, as routers that the simulator can drive.

    router = make_baseline("cache_aware", {"cache_threshold": 0.5}, profile, seed=1)
    effects = router.on_event(event, now)

``BASELINES`` has them all, each with its knobs and the grid of settings to tune it over. A
homogeneous deployment is none of them: that is the control plane on such a composition.
"""

from vertumnus_sim.baselines.registry import (
    BASELINES,
    Baseline,
    BaselineError,
    make_baseline,
    parse_knobs,
)
from vertumnus_sim.baselines.router import BaselineRouter
from vertumnus_sim.baselines.rule import Rule

__all__ = [
    "BASELINES",
    "Baseline",
    "BaselineError",
    "BaselineRouter",
    "Rule",
    "make_baseline",
    "parse_knobs",
]
