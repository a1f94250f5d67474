from typing import Any

import pytest
from vertumnus_router.core.config import (
    ConfigError,
    ControllerConfig,
    LateConfig,
    PolicyConfig,
    PrefixConfig,
)


def test_requests_bind_late_unless_told_otherwise_and_the_weights_are_the_papers() -> None:
    config = PolicyConfig()
    assert (config.policy, config.beta, config.lam, config.attempts) == ("late", 3.0, 0.3, 3)


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
        ({"index_mib": 0.0}, "index_mib 0.0"),
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


def test_the_controller_only_observes_unless_told_otherwise() -> None:
    config = PolicyConfig().controller
    assert (config.mode, config.window_s, config.upper, config.lower) == ("observe", 20, 0.75, 0.35)
    assert (config.persistence, config.long_tokens, config.long_change) == (2, 32_768, 0.3)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"mode": "auto"}, "controller.mode 'auto': choose one of off, observe, on"),
        ({"window_s": 0.0}, "controller.window_s 0.0: must be above 0"),
        ({"window_s": float("inf")}, "controller.window_s inf"),
        ({"upper": float("nan")}, "controller.upper nan"),
        ({"long_change": 0.0}, "controller.long_change 0.0"),
        ({"rho": -1.0}, "controller.rho -1.0"),
        ({"lower": -0.1}, "controller.lower -0.1: must be 0 or more"),
        ({"margin": -0.1}, "controller.margin -0.1"),
        ({"sigmas": float("nan")}, "controller.sigmas nan"),
        ({"long_floor": -0.1}, "controller.long_floor -0.1"),
        ({"persistence": 0}, "controller.persistence 0: must be 1 or more"),
        ({"cooldown": 0}, "controller.cooldown 0"),
        ({"long_tokens": 0}, "controller.long_tokens 0"),
        ({"remember": 0}, "controller.remember 0"),
        ({"lower": 0.7}, "lower 0.7 and upper 0.75 leave no band"),
        ({"lower": 0.8}, "leave no band"),
    ],
)
def test_controller_settings_are_checked(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ControllerConfig(**bad)


def test_prefixes_are_pulled_and_the_manager_only_observes_unless_told_otherwise() -> None:
    config = PolicyConfig().prefix
    assert (config.mode, config.pull, config.scan_s) == ("observe", True, 20)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"mode": "auto"}, "prefix.mode 'auto': choose one of off, observe, on"),
        ({"scan_s": 0.0}, "prefix.scan_s 0.0: must be above 0"),
        ({"timeout_s": float("inf")}, "prefix.timeout_s inf"),
        ({"local_bytes_per_s": 0.0}, "prefix.local_bytes_per_s"),
        ({"remote_bytes_per_s": -1.0}, "prefix.remote_bytes_per_s"),
        ({"theta_inter_s": -1.0}, "prefix.theta_inter_s -1.0: must be 0 or more"),
        ({"theta_reclaim": float("nan")}, "prefix.theta_reclaim nan"),
        ({"theta_reclaim": 8.0}, "must be below theta_intra 8.0"),
        ({"retry_s": -1.0}, "prefix.retry_s"),
        ({"latency_s": -1.0}, "prefix.latency_s"),
        ({"decay": 1.0}, "prefix.decay 1.0: must lie between 0 and 1"),
        ({"gain": 0.0}, "prefix.gain 0.0"),
        ({"slice_blocks": 0}, "prefix.slice_blocks 0: must be 1 or more"),
        ({"per_scan": 0}, "prefix.per_scan"),
        ({"copies_in_flight": 0}, "prefix.copies_in_flight"),
        ({"pulls_per_rank": 0}, "prefix.pulls_per_rank"),
        ({"remember": 0}, "prefix.remember"),
        ({"hot": 0}, "prefix.hot"),
    ],
)
def test_prefix_settings_are_checked(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PrefixConfig(**bad)
