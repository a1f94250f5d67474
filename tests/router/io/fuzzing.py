"""How tests of generated input run: the same examples every time, as many as FUZZ_EXAMPLES says."""

import os

from hypothesis import HealthCheck, Phase, settings


def examples(usual: int) -> int:
    return int(os.environ.get("FUZZ_EXAMPLES", str(usual)))


def fuzzing(usual: int) -> settings:
    return settings(
        max_examples=examples(usual),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
