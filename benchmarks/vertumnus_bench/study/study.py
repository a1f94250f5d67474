"""The study itself: tune, evaluate, sum up."""

from collections.abc import Mapping
from typing import Any

from vertumnus_sim.metrics import Row

from vertumnus_bench.study.aggregate import (
    Runs,
    aggregate,
    half_width,
    merge_bins,
    phase_means_ms,
    speeds,
)
from vertumnus_bench.study.components import components
from vertumnus_bench.study.contenders import Contender
from vertumnus_bench.study.executing import Executor
from vertumnus_bench.study.goals import goals
from vertumnus_bench.study.loads import VARYING, origins, phases, present
from vertumnus_bench.study.plan import Plan
from vertumnus_bench.study.point import GPUS, Point, Result, Setup
from vertumnus_bench.study.sensitivity import Variant
from vertumnus_bench.study.summary import Sensitivity, Series, Summary
from vertumnus_bench.study.tuning import Case, Choice, tune

Choices = Mapping[tuple[str, Case], Choice]


def make_study(
    plan: Plan, setup: Setup, executor: Executor, code: str, validity: dict[str, Any] | None
) -> Summary:
    """Raises ``StudyError`` for what cannot be simulated."""
    _, skipped = present(plan.loads, setup.traces)
    cases = [case for case in plan.cases if case[0] not in skipped]
    tuning_cases = list(dict.fromkeys(plan.tuning_case(case) for case in cases))
    choices = tune(plan.contenders, tuning_cases, plan.trial, executor.run)

    entries = _entries(plan, cases, choices)
    varied = _varied(plan, choices) if plan.variant_case in cases else {}
    points = [point for _, _, _, of in entries for point in of]
    results = executor.run("evaluation", [*points, *(p for of in varied.values() for p in of)])

    runs = [
        Runs(contender, case, choice, [results[point].row for point in of])
        for contender, case, choice, of in entries
        if contender not in plan.over_time
    ]
    rows = aggregate(runs)
    series = _over_time(plan, entries, results)
    speed = speeds(_named_rows(entries, results))
    return Summary(
        quick=plan.quick,
        profile=setup.profile,
        gpus=GPUS,
        code=code,
        seeds=list(plan.seeds),
        tuning_seed=plan.trial.seed,
        requests=plan.requests,
        tuning_requests=plan.trial.requests,
        origins=origins(
            [load for load in plan.loads if load.workload not in skipped], setup.traces
        ),
        skipped=skipped,
        sim_requests_per_s=speed["all"],
        sim_requests_per_s_by_policy={n: s for n, s in speed.items() if n != "all"},
        validity=validity,
        goals=goals(rows, {one.policy: one.phases_ms for one in series}, VARYING),
        components=components(rows),
        rows=rows,
        over_time=series,
        sensitivity_at=_named(plan.variant_case),
        sensitivity=[_sensitivity(variant, of, results) for variant, of in varied.items()],
    )


_Entry = tuple[Contender, Case, Choice, list[Point]]


def _entries(plan: Plan, cases: list[Case], choices: Choices) -> list[_Entry]:
    """Who is evaluated where, with what."""
    found: list[_Entry] = []
    for case in cases:
        pairs = [(of, choices[of.name, plan.tuning_case(case)]) for of in plan.contenders]
        if case[0] == VARYING:
            pairs += [(of, Choice(of.compositions[0], of.settings)) for of in plan.over_time]
        for contender, choice in pairs:
            points = [plan.point(contender, case, choice, seed) for seed in plan.seeds]
            found.append((contender, case, choice, points))
    return found


def _varied(plan: Plan, choices: Choices) -> dict[Variant, list[Point]]:
    by_name = {contender.name: contender for contender in plan.contenders}
    found: dict[Variant, list[Point]] = {}
    for variant in plan.variants:
        choice = choices[variant.contender, plan.tuning_case(plan.variant_case)]
        choice = Choice(choice.composition, {**choice.settings, **variant.settings})
        contender = by_name[variant.contender]
        found[variant] = [
            plan.point(contender, plan.variant_case, choice, seed) for seed in plan.seeds
        ]
    return found


def _over_time(plan: Plan, entries: list[_Entry], results: Mapping[Point, Result]) -> list[Series]:
    phase_s = [phase.seconds for phase in phases(plan.trial.phase_share)]
    found: list[Series] = []
    for contender, case, _, points in entries:
        if case[0] == VARYING:
            bins = merge_bins(results[point].bins or [] for point in points)
            found.append(Series(contender.name, bins, phase_means_ms(bins, phase_s)))
    return found


def _sensitivity(
    variant: Variant, points: list[Point], results: Mapping[Point, Result]
) -> Sensitivity:
    rows = [results[point].row for point in points]
    return Sensitivity(
        assumption=variant.assumption,
        value=variant.value,
        series=variant.series,
        mean_ms=sum(row.mean_ms for row in rows) / len(rows),
        p90_ms=sum(row.p90_ms for row in rows) / len(rows),
        ci_ms=half_width([row.mean_ms for row in rows]),
    )


def _named_rows(entries: list[_Entry], results: Mapping[Point, Result]) -> list[tuple[str, Row]]:
    return [(of.name, results[point].row) for of, _, _, points in entries for point in points]


def _named(case: Case) -> str:
    return case[0] if case[1] is None else f"{case[0]} at {case[1]:g} requests/s"
