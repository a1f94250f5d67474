"""The arithmetic of the comparison between the simulator and a real pool."""

import pytest
from vertumnus_bench.validity import (
    MOST_TOKENS,
    SIZE,
    Trial,
    TrialPlan,
    at_pace,
    row,
    small_trace,
    summary,
)
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.profiles import load_profile
from vertumnus_sim.workloads.arrivals import mean_rate
from vertumnus_sim.workloads.statistics import reused_tokens


def of(policy: str, measured_ms: float, simulated_ms: float) -> dict[str, object]:
    return row(policy, "2x1", [Trial([measured_ms / 1000], [simulated_ms / 1000], 1.0)])


def test_errors_are_of_the_measured_over_all_rounds() -> None:
    trials = [Trial([0.1] * 5, [0.09] * 5, 1.0), Trial([0.1] * 4 + [0.2], [0.13] * 5, 1.2)]
    found = row("paper", "2x1", trials)
    assert found["measured_ms"] == {"mean": 110.0, "p90": 100.0}
    assert found["simulated_ms"] == {"mean": 110.0, "p90": 130.0}
    assert (found["mean_err_pct"], found["p90_err_pct"]) == (0.0, 30.0)
    assert found["pace"] == [1.0, 1.2]


def test_the_largest_error_counts_whatever_its_sign() -> None:
    found = summary([of("paper", 100, 90), of("late", 200, 202)])
    assert (found["mean_err_pct"], found["p90_err_pct"]) == (10.0, 10.0)
    assert found["same_ranking"]
    assert found["ranking"] == ["paper 2x1", "late 2x1"]


def test_another_order_is_told() -> None:
    assert not summary([of("paper", 100, 300), of("late", 200, 202)])["same_ranking"]


def test_every_prefill_follows_the_pace() -> None:
    profile = load_profile("qwen3-30b-a3b-h20")
    slow = PrefillModel(at_pace(profile, 1.25))
    for degree in profile.degrees:
        for uncached, cached in ((1, 0), (700, 4000), (60_000, 0)):
            usual_s = PrefillModel(profile).service_s(degree, uncached, cached)
            assert slow.service_s(degree, uncached, cached) == pytest.approx(1.25 * usual_s)


def test_the_rate_keeps_the_ranks_as_busy_as_planned() -> None:
    profile, plan = load_profile("qwen3-30b-a3b-h20"), TrialPlan(requests=100, utilisation=0.4)
    requests = small_trace(profile, plan)
    assert len(requests) == 100
    assert all(r.input_tokens <= MOST_TOKENS and r.output_tokens == 1 for r in requests)
    model = PrefillModel(profile)
    cached = reused_tokens(requests)
    busy_s = sum(
        model.service_s(1, max(1, request.input_tokens - hit), hit)
        for request, hit in zip(requests, cached, strict=True)
    )
    seconds = len(requests) / mean_rate(requests)
    assert busy_s / (SIZE * seconds) == pytest.approx(0.4, rel=0.02)
