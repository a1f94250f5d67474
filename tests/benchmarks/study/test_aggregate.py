"""One row from several seeds, and which loads are beyond the knee."""

import math

import pytest
from vertumnus_bench.study.aggregate import (
    Runs,
    aggregate,
    geometric_mean,
    half_width,
    merge_bins,
    phase_means_ms,
    saturated_cases,
    speeds,
)
from vertumnus_bench.study.contenders import Contender, Role
from vertumnus_bench.study.tuning import Choice

from tests.benchmarks.study.study_scene import bins, figures, row


def test_the_interval_is_students() -> None:
    # Standard deviation 1, t(2) = 4.303.
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    # Of two: s = |a − b| / √2, so t·s/√2 = t·|a − b| / 2.
    assert half_width([10.0, 14.0]) == pytest.approx(12.706 * 2)
    assert half_width([5.0] * 31) == 0.0
    assert half_width([5.0]) is None


@pytest.mark.parametrize("count", [0, 32])
def test_an_interval_that_is_not_known_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} seeds"):
        half_width([1.0] * count)


def test_a_row_is_the_mean_over_seeds_with_its_choice() -> None:
    contender = Contender("ours", Role.OURS, "fluid")
    choice = Choice("20x2", {"beta": "2"}, 77.0)
    runs = [row(100, refused=1, slo_pct=80.0), row(140, refused=2, slo_pct=90.0)]
    (found,) = aggregate([Runs(contender, ("production", None), choice, runs)])
    assert (found.policy, found.workload, found.rate) == ("ours", "production", None)
    assert (found.mean_ms, found.p90_ms, found.slo_pct) == (120, 240, 85)
    assert (found.refused, found.requests, found.seeds) == (3, 180, 2)
    assert found.ci_ms == pytest.approx(12.706 * 20)
    assert (found.composition, found.settings, found.tuned_ms) == ("20x2", {"beta": "2"}, 77.0)
    assert found.simulated and not found.saturated


def test_saturated_is_ten_times_the_best_baselines_own_lowest_load() -> None:
    def of(name: str, *means: float, role: Role = Role.BASELINE) -> list:  # type: ignore[type-arg]
        loads = zip((20, 26, 32), means, strict=True)
        return [figures(name, mean, rate=rate, role=role) for rate, mean in loads]

    steep, flat = of("steep", 10, 90, 900), of("flat", 50, 100, 501)
    assert saturated_cases([*steep, *flat]) == {("production", 32)}
    assert saturated_cases([*steep, *of("flat", 50, 100, 500)]) == set()
    # Ours does not decide where the knee is.
    assert saturated_cases([*steep, *flat, *of("ours", 1, 1, 1, role=Role.OURS)]) == {
        ("production", 32)
    }
    assert saturated_cases(of("ours", 1, 1, 100, role=Role.OURS)) == set()


def test_every_row_of_a_saturated_case_says_so() -> None:
    baseline = Contender("b", Role.BASELINE, "b")
    ours = Contender("ours", Role.OURS, "fluid")
    choice = Choice("40x1", {})
    found = aggregate(
        Runs(of, ("production", rate), choice, [row(mean)])
        for of, rate, mean in [
            (baseline, 20, 10),
            (baseline, 26, 101),
            (ours, 20, 10),
            (ours, 26, 10),
        ]
    )
    assert [one.saturated for one in found] == [False, True, False, True]


def test_bins_of_several_seeds_are_one_series_in_order_of_time() -> None:
    first, second = bins((1, 1.0), (2, 4.0)), bins((3, 3.0), (0, 0.0), (1, 9.0))
    merged = merge_bins([first, second])
    assert [(b.start_s, b.requests, b.total_s) for b in merged] == [
        (0, 4, 4.0),
        (10, 2, 4.0),
        (20, 1, 9.0),
    ]


def test_a_phase_is_weighed_by_requests() -> None:
    found = phase_means_ms(bins((1, 1.0), (3, 9.0), (2, 1.0)), [20.0, 10.0, 10.0])
    assert found == [2500.0, 500.0, None]


def test_a_bin_that_starts_a_rounding_error_early_stays_in_its_phase() -> None:
    third = 0.1 + 0.2  # above 0.3
    (a, b) = bins((1, 1.0), (1, 3.0))
    a = type(a)(0.0, 0.3, 1, 1.0)
    b = type(b)(0.3, 0.3, 1, 3.0)
    assert phase_means_ms([a, b], [third, third]) == [1000.0, 3000.0]


def test_a_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 8.0, 8.0]) == pytest.approx(4.0)
    for wrong in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="above 0"):
            geometric_mean(wrong)


def test_speed_is_all_requests_over_all_time() -> None:
    slow, fast = row(sim_requests_per_s=100.0), row(sim_requests_per_s=900.0)
    found = speeds([("a", slow), ("b", fast)])
    # 180 requests in 0.9 s and 0.1 s.
    assert found == {"a": pytest.approx(100), "b": pytest.approx(900), "all": pytest.approx(180)}
