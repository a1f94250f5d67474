"""One point, really simulated."""

from pathlib import Path

import pytest
from vertumnus_bench.study import loads
from vertumnus_bench.study.loads import VARYING, Load, load_requests, origins, present
from vertumnus_bench.study.point import Point, Setup, StudyError
from vertumnus_bench.study.running import run_point
from vertumnus_sim.workloads.named import Sources
from vertumnus_sim.workloads.traces import TraceRequest
from vertumnus_sim.workloads.varying import PHASES, Phase


def run(tmp_path: Path, settings: dict[str, str], **rest: object):  # type: ignore[no-untyped-def]
    wanted: dict[str, object] = {
        "requests": 40,
        "seed": 1,
        "policy": "late",
        "composition": "40x1",
    }
    point = Point.of("l-eval", 24.0, settings, **(wanted | rest))
    return run_point(point, Setup(tmp_path, "qwen3-30b-a3b-h20"))


def test_ttft_over_time_is_that_of_the_row(tmp_path: Path) -> None:
    found = run(tmp_path, {"delays.report_s": "0.05"}, over_time=True)
    assert sum(b.requests for b in found.bins) == found.row.requests == 36
    assert 1000 * sum(b.total_s for b in found.bins) / 36 == pytest.approx(found.row.mean_ms)
    # 40 requests at 24 per second.
    assert all(b.start_s < 2 and b.seconds == 10 for b in found.bins)
    assert run(tmp_path, {}).bins is None


def test_settings_reach_the_hardware_the_delays_and_the_policy(tmp_path: Path) -> None:
    plain = run(tmp_path, {}).row
    changed = {
        name: run(tmp_path, {name: value}).row.mean_ms
        for name, value in (
            ("hardware.noise", "0.5"),
            ("delays.dispatch_s", "0.5"),
            ("late.in_flight", "false"),
        )
    }
    assert plain.mean_ms not in changed.values()
    assert changed["delays.dispatch_s"] > plain.mean_ms + 400


@pytest.mark.parametrize("name", ["hardware.nonsense", "delays.nonsense", "nonsense"])
def test_a_setting_that_there_is_not(tmp_path: Path, name: str) -> None:
    with pytest.raises(StudyError, match=r"l-eval 24/s, late on 40x1, seed 1: .*nonsense"):
        run(tmp_path, {name: "1"})


def test_a_public_trace_that_is_not_here_is_left_out_and_said(tmp_path: Path) -> None:
    wanted = (Load("synthetic", (20,)), Load("production", (26,)))
    kept, skipped = present(wanted, tmp_path)
    assert [load.workload for load in kept] == ["production"]
    assert "scripts/fetch_traces" in skipped["synthetic"]
    with pytest.raises(StudyError, match="scripts/fetch_traces"):
        load_requests("synthetic", 1, tmp_path, 1.0)
    assert present(wanted[1:], tmp_path) == ([wanted[1]], {})


def test_where_requests_come_from_is_said(tmp_path: Path) -> None:
    wanted = (Load("conversation", (20,)), Load("tool-agent", (45,)), Load("l-eval", (24,)))
    found = origins(wanted, tmp_path)
    assert found["conversation"] == found["l-eval"] == "generated"
    assert "surrogate" in found["tool-agent"]


def test_a_varying_workload_can_be_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Phase, ...]] = []

    def note(name: str, seed: int, sources: Sources, of: tuple[Phase, ...]) -> list[TraceRequest]:
        asked.append(of)
        return []

    monkeypatch.setattr(loads, "workload", note)
    loads.load_requests.cache_clear()
    load_requests(VARYING, 1, tmp_path, 0.5)
    loads.load_requests.cache_clear()
    assert [phase.seconds for phase in asked[0]] == [phase.seconds / 2 for phase in PHASES]
    assert [phase.rate_per_s for phase in asked[0]] == [phase.rate_per_s for phase in PHASES]
