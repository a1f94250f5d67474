"""A whole study, tiny: from the plan to what is written."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import figures as command
import msgspec
import pytest
from vertumnus_bench.study.contenders import CONTENDERS, FLUID, PAPER
from vertumnus_bench.study.executing import Executor
from vertumnus_bench.study.goals import Goal
from vertumnus_bench.study.loads import Load
from vertumnus_bench.study.plan import Plan, quick_plan
from vertumnus_bench.study.plots import plot_study
from vertumnus_bench.study.point import Setup, StudyError
from vertumnus_bench.study.sensitivity import NOISE
from vertumnus_bench.study.store import Store
from vertumnus_bench.study.study import make_study
from vertumnus_bench.study.summary import Summary, read_validity
from vertumnus_bench.study.tables import tables

_NAMES = ("homogeneous_2", "least_loaded", PAPER, "paper_pull", FLUID)
_HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def plan() -> Plan:
    small = quick_plan(requests=30, tuning_requests=20, seeds=(1, 2))
    trial = replace(small.trial, grid_limit=1)
    contenders = tuple(
        # Planning over the whole lattice takes long, and is not what is tested.
        replace(of, compositions=of.compositions[:2], policy=of.policy.replace("fluid", "late"))
        for of in CONTENDERS
        if of.name in _NAMES
    )
    variants = tuple(v for v in small.variants if v.assumption == NOISE)
    loads = (Load("l-eval", (24, 30)), Load("synthetic", (20,)))
    return replace(
        small,
        loads=loads,
        trial=trial,
        contenders=contenders,
        variants=variants,
        variant_case=("l-eval", 30),
    )


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    folder = tmp_path_factory.mktemp("study")
    setup = Setup(folder, "qwen3-30b-a3b-h20")
    executor = Executor(setup, Store(folder / "points", setup, "code"), 1)
    return make_study(plan(), setup, executor, "code", {"mean_err_pct": 3.0, "p90_err_pct": 4.5})


def test_every_contender_has_a_row_in_every_case(summary: Summary) -> None:
    found = [(row.rate, row.policy) for row in summary.rows]
    assert found == [(rate, name) for rate in (24, 30) for name in _NAMES]
    assert {row.seeds for row in summary.rows} == {2}
    assert all(row.ci_ms is not None for row in summary.rows)
    assert set(summary.skipped) == {"synthetic"}
    assert set(summary.origins) == {"l-eval"}


def test_choices_are_made_once_and_taken_over(summary: Summary) -> None:
    by_name = {(row.rate, row.policy): row for row in summary.rows}
    for name in _NAMES:
        low, high = by_name[24, name], by_name[30, name]
        assert (low.composition, low.settings) == (high.composition, high.settings)
    paper, pull = by_name[30, PAPER], by_name[30, "paper_pull"]
    assert pull.composition == paper.composition
    assert pull.settings == {**paper.settings, "prefix.pull": "true"}
    assert paper.tuned_ms is not None and by_name[30, FLUID].tuned_ms is None


def test_assumptions_are_changed_one_at_a_time(summary: Summary) -> None:
    found = {(one.series, one.value): one.mean_ms for one in summary.sensitivity}
    assert set(found) == {(name, value) for name in (FLUID, PAPER) for value in (8, 25)}
    (plain,) = (r.mean_ms for r in summary.rows if (r.rate, r.policy) == (30, FLUID))
    # 8 % is what all others have.
    assert found[FLUID, 8] == pytest.approx(plain) != found[FLUID, 25]


def test_the_summary_says_that_it_is_simulated(summary: Summary) -> None:
    found = json.loads(msgspec.json.encode(summary))
    assert found["simulated"] and all(row["simulated"] for row in found["rows"])
    keys = "workload rate policy mean_ms p50_ms p90_ms p99_ms slo_pct hit_pct gpu_s ci_ms seeds"
    assert set(keys.split()) <= found["rows"][0].keys()
    assert found["validity"] == {"mean_err_pct": 3.0, "p90_err_pct": 4.5}
    assert found["sim_requests_per_s"] > 0


def test_tables_have_every_case_and_say_what_they_are(summary: Summary) -> None:
    text = tables(summary)
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert all("simulated" in line for line in headings)
    assert any("l-eval, 24/s" in line for line in headings)
    assert "A quick run" in text and "off by 3.0 %" in text and "synthetic was left out" in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1
    without = msgspec.structs.replace(summary, validity=None)
    assert "was not given" in tables(without)


def test_goals_name_all_that_ours_are_compared_with(summary: Summary) -> None:
    def goal(policy: str, against: str | None) -> Goal:
        return Goal(
            goal="P99",
            policy=policy,
            workload="l-eval",
            rate=24,
            against=against,
            target="<= 20",
            found=None if against is None else 1.0,
            met=None if against is None else True,
        )

    def row(*of: Goal) -> str:
        text = tables(msgspec.structs.replace(summary, goals=list(of)))
        return next(line for line in text.splitlines() if line.startswith("| P99 |"))

    late, fluid = goal("late", "late_fcfs"), goal("fluid", "fluid_fcfs")
    assert "| late_fcfs, fluid_fcfs |" in row(late, fluid)
    assert "| fluid_fcfs |" in row(goal("late", None), fluid)


def test_what_is_finished_counts_whichever_workloads_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[str] = []
    monkeypatch.setattr(command, "make_study", lambda *given: codes.append(given[3]))
    for more in ([], ["--workloads", "l-eval"]):
        options = ["--out", str(tmp_path), "--traces", str(tmp_path), *more]
        command._study(command._parser().parse_args(options))
    assert codes[0] == codes[1]


@pytest.mark.skipif(not _HAS_MATPLOTLIB, reason="matplotlib, the bench extra, is not installed")
def test_plots_have_simulated_in_their_titles(summary: Summary, tmp_path: Path) -> None:
    paths = plot_study(summary, tmp_path)
    assert {path.name for path in paths} == {"ttft.svg", "slo.svg", "hits.svg", "sensitivity.svg"}
    assert all("(simulated, a quick run)" in path.read_text() for path in paths)


def test_no_plot_without_matplotlib(
    summary: Summary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plot_study(summary, tmp_path) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is no JSON"),
        ("[1]", "mean_err_pct"),
        ('{"mean_err_pct": 1}', "p90_err_pct"),
        ('{"mean_err_pct": true, "p90_err_pct": 1}', "mean_err_pct"),
    ],
)
def test_a_validity_that_cannot_be_read(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "validity.json"
    path.write_text(text)
    with pytest.raises(StudyError, match=fault):
        read_validity(path)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--validity", "/nonexistent.json"], "--validity /nonexistent.json"),
        (["--profile", "nonsense"], "no profile 'nonsense'"),
        (["--seeds", "1000"], "seed 1000"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    assert command.main(["--out", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and fault in error
