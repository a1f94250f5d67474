"""The arithmetic of the comparison between the simulator and a real pool."""

import pytest
from vertumnus_bench.validity import MOST_TOKENS, SIZE, TrialPlan, row, small_trace, summary
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.profiles import load_profile
from vertumnus_sim.workloads.arrivals import mean_rate
from vertumnus_sim.workloads.statistics import reused_tokens


def test_errors_are_of_the_measured() -> None:
    found = row("paper", "2x1", [0.1] * 9 + [0.2], {"mean": 99.0, "p90": 130.0})
    assert found["measured_ms"] == {"mean": 110.0, "p90": 100.0}
    assert (found["mean_err_pct"], found["p90_err_pct"]) == (-10.0, 30.0)


def test_the_largest_error_counts_whatever_its_sign() -> None:
    rows = [
        row("paper", "2x1", [0.1], {"mean": 90.0, "p90": 100.0}),
        row("late", "2x1", [0.2], {"mean": 202.0, "p90": 260.0}),
    ]
    found = summary(rows)
    assert (found["mean_err_pct"], found["p90_err_pct"]) == (10.0, 30.0)
    assert found["same_ranking"]
    assert found["ranking"] == ["paper 2x1", "late 2x1"]


def test_another_order_is_told() -> None:
    rows = [
        row("paper", "2x1", [0.1], {"mean": 300.0, "p90": 100.0}),
        row("late", "2x1", [0.2], {"mean": 202.0, "p90": 260.0}),
    ]
    assert not summary(rows)["same_ranking"]


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
