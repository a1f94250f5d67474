"""The arithmetic of the goals, by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
from vertumnus_bench.study.aggregate import Figures
from vertumnus_bench.study.contenders import (
    CONTROLLER,
    FCFS,
    FIXED,
    FLUID,
    LATE,
    ORACLE,
    PAPER,
    Role,
)
from vertumnus_bench.study.goals import Goal, goals, highest_loads

from tests.benchmarks.study.study_scene import figures


def point(rate: float | None = 26, **ours: Any) -> list[Figures]:
    """Fluid at 60 ms among others, at one load."""
    return [
        figures("weak", 150, role=Role.BASELINE, rate=rate),
        figures("strong", 100, role=Role.BASELINE, rate=rate, p90_ms=400.0),
        figures(PAPER, 80, role=Role.PAPER, rate=rate),
        figures(FLUID, ours.pop("mean_ms", 60), rate=rate, **({"slo_pct": 95.0} | ours)),
        figures(FCFS[FLUID], 60, role=Role.CONTROL, rate=rate, p99_ms=200.0),
        figures(ORACLE, 50, role=Role.BOUND, rate=rate),
    ]


def found(rows: Sequence[Figures], title: str) -> Goal:
    (goal,) = (g for g in of_fluid(goals(rows, {}, "varying")) if title in g.goal and g.rate == 26)
    return goal


def of_fluid(of: Sequence[Goal]) -> list[Goal]:
    return [goal for goal in of if goal.policy == FLUID]


def test_each_of_ours_has_the_same_goals() -> None:
    rows = [*point(), figures(LATE, 70, rate=26)]
    by_policy = {
        policy: [g for g in goals(rows, {}, "varying") if g.policy == policy and g.rate]
        for policy in (LATE, FLUID)
    }
    assert [g.goal for g in by_policy[LATE]] == [g.goal for g in by_policy[FLUID]]
    assert by_policy[LATE][0].found == pytest.approx(30)
    assert by_policy[LATE][-1].found is None  # its own order of arrival was not run


@pytest.mark.parametrize(
    ("title", "against", "value", "met"),
    [
        ("mean TTFT below the strongest", "strong", 40.0, True),
        ("P90 TTFT below the strongest", "strong", 70.0, True),  # 120 of 400
        ("SLO attainment above", "strong", 5.0, True),
        ("below the paper's", PAPER, 25.0, True),
        ("above the best of all", PAPER, -25.0, True),
        ("above the oracle's", ORACLE, 20.0, False),
        ("above first come", FCFS[FLUID], 20.0, True),  # 240 of 200
    ],
)
def test_each_goal(title: str, against: str, value: float, met: bool) -> None:
    goal = found(point(), title)
    assert (goal.against, goal.met, goal.workload) == (against, met, "production")
    assert goal.found == pytest.approx(value)


@pytest.mark.parametrize(
    ("title", "ours"),
    [
        ("mean TTFT below the strongest", {"mean_ms": 60.1}),
        ("P90 TTFT below the strongest", {"p90_ms": 201.0}),
        ("SLO attainment above", {"slo_pct": 90.0}),
        ("below the paper's", {"mean_ms": 60.1}),
        ("above the best of all", {"mean_ms": 81.7}),
        ("above the oracle's", {"mean_ms": 55.1}),
        ("above first come", {"p99_ms": 240.1}),
    ],
)
def test_each_goal_can_be_missed(title: str, ours: dict[str, float]) -> None:
    assert found(point(**ours), title).met is False


def test_full_attainment_cannot_be_improved_on() -> None:
    rows = [figures("b", 100, role=Role.BASELINE, slo_pct=100.0), figures(FLUID, 1, slo_pct=100.0)]
    assert found(rows, "SLO attainment").met is True
    rows[1] = figures(FLUID, 1, slo_pct=99.9)
    assert found(rows, "SLO attainment").met is False


def test_the_highest_load_is_the_highest_that_is_not_saturated() -> None:
    beyond = [figures(r.policy, 1, role=r.role, rate=32, saturated=True) for r in point()]
    all_goals = of_fluid(goals([*point(20), *beyond, *point(26)], {}, "varying"))
    below = [g for g in all_goals if "below the strongest" in g.goal]
    assert {g.rate for g in below} == {26} and len(below) == 2
    oracle = [g for g in all_goals if "oracle" in g.goal]
    assert [g.rate for g in oracle] == [20, 26]
    assert highest_loads([("a", 3), ("b", None), ("a", 5), ("a", 4)]) == [("a", 5), ("b", None)]


def test_what_was_not_run_is_neither_met_nor_missed() -> None:
    goal = found([figures(FLUID, 60)], "above the oracle's")
    assert (goal.found, goal.met, goal.against) == (None, None, None)


def in_phases(phases: dict[str, list[float | None]]) -> Goal:
    (goal,) = of_fluid(goals([], phases, "varying"))
    return goal


def test_a_phase_is_held_against_the_mix_that_is_best_in_it() -> None:
    fixed: dict[str, list[float | None]] = {FIXED + "40x1": [100, 300], FIXED + "20x2": [200, 200]}
    goal = in_phases({FLUID: [90, 205], **fixed})
    assert goal.found == pytest.approx(2.5) and goal.met
    goal = in_phases({FLUID: [110, 100], **fixed})
    assert goal.found == pytest.approx(10) and goal.met is False
    # Other policies are no fixed mix.
    assert in_phases({FLUID: [90, 200], **fixed, CONTROLLER: [1, 1]}).met


@pytest.mark.parametrize(
    "phases",
    [{}, {FLUID: [1.0, 2.0]}, {FLUID: [1.0, None], FIXED + "40x1": [1.0, 2.0]}],
)
def test_a_phase_without_figures_is_left_open(phases: dict[str, list[float | None]]) -> None:
    assert (in_phases(phases).found, in_phases(phases).met) == (None, None)
