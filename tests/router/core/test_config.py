from typing import Any

import pytest
from vertumnus_router.core.config import ConfigError, LateConfig, PolicyConfig


def test_the_defaults_are_the_papers() -> None:
    config = PolicyConfig()
    assert (config.policy, config.beta, config.lam, config.attempts) == ("paper", 3.0, 0.3, 3)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"policy": "random"}, "policy 'random': choose one of paper, late"),
        ({"beta": 0.0}, "beta 0.0: must be above 0"),
        ({"beta": float("nan")}, "beta nan"),
        ({"lam": -0.1}, "lam -0.1: must be 0 or more"),
        ({"attempts": 0}, "attempts 0: must be 1 or more"),
        ({"queue_limit": 0}, "queue_limit 0"),
        ({"queue_timeout_s": -1.0}, "queue_timeout_s -1.0"),
        ({"tie_s": float("nan")}, "tie_s nan"),
        ({"index_nodes": 0}, "index_nodes 0"),
        ({"expected_manifest": ""}, "leave it out to accept any"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyConfig(**bad)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"lam_gain": -1.0}, "late.lam_gain"),
        ({"lam_cap": -1.0}, "late.lam_cap"),
        ({"ageing": -1.0}, "late.ageing"),
        ({"window": 0}, "late.window"),
        ({"backlog_tau_s": 0.0}, "late.backlog_tau_s"),
    ],
)
def test_late_settings_are_checked(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LateConfig(**bad)
