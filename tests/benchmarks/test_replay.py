"""The command line of the replay, from a trace to the last line."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import replay
from vertumnus_sim.workloads.traces import TraceRequest, write_mooncake

from tests.benchmarks.fake_endpoint import REFUSE, FakeEndpoint, serving


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests in three ticks of 3 s, all with one first block of two."""
    path = tmp_path / "trace.jsonl"
    write_mooncake(path, [TraceRequest(n // 4 * 3.0, 700, 64, (0, n + 1), 512) for n in range(12)])
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = replay.main([str(argument) for argument in arguments])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_scaled_faster_and_behind_a_warm_up(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plots" / "replay.svg"
    with serving(FakeEndpoint()) as fake:
        status, found = run(
            capsys,
            *("--trace", trace, "--url", f"{fake.url}/", "--rate", 20),
            *("--scale-lengths", 1 / 16, "--warmup-s", 0.1, "--plot", plot, "--max-lag-ms", 5000),
        )
    assert status == 0 and found["refused"] is None
    assert len(fake.bodies) == 12
    assert {len(body["input_ids"]) for body in fake.bodies} == {44}
    assert {body["sampling_params"]["max_new_tokens"] for body in fake.bodies} == {4}
    assert found["requests"] + found["warm_up"]["requests"] == 12
    assert 0 < found["warm_up"]["requests"] < 12
    assert found["served"] == found["requests"] == found["ttft_s"]["n"]
    assert found["hit_rate"] >= 32 / 44 - 0.01
    assert found["sent"]["mean_input"] == 44
    assert plot.exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_ticks_are_spread_unless_they_are_to_be_kept(trace: Path) -> None:
    def due_s(*arguments: str) -> set[float]:
        options = replay._parser().parse_args(["--trace", str(trace), "--url", "-", *arguments])
        return {request.arrival_s for request in replay._requests(options)}

    assert len(due_s()) == 12
    assert due_s("--keep-ticks") == {0, 3, 6}
    assert due_s("--keep-ticks", "--speed", "3") == {0, 1, 2}
    assert due_s("--keep-ticks", "--rate", "5.5") == {0, 1, 2}
    assert due_s("--keep-ticks", "--limit", "5") == {0, 3}


def test_a_client_that_cannot_keep_up_says_so_and_fails(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeEndpoint(slow_s=0.05)) as fake:
        status, found = run(
            capsys,
            *("--trace", trace, "--url", fake.url, "--speed", 1000, "--max-open", 1),
            *("--max-lag-ms", 100),
        )
    assert status == replay.CLIENT_LATE
    assert "late" in found["refused"] and "ttft_s" not in found
    assert found["served"] == 12


def test_nothing_served(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint(behaviour=dict.fromkeys(range(12), REFUSE))) as fake:
        status, found = run(
            capsys,
            *("--trace", trace, "--url", fake.url, "--speed", 100, "--limit", 3),
            *("--api", "openai-completions", "--model", "m", "--max-lag-ms", 5000),
        )
    assert status == replay.NOTHING_SERVED
    assert found["failed"] == {"status 503": 3} and found["ttft_s"] == {"n": 0}
    assert found["slo"]["attainment"] == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--api", "openai-chat"), "needs --model"),
        (("--rate", "0"), "not above 0"),
        (("--block-tokens", "256"), "was the trace made with another block size"),
        (("--format", "flexlb"), "line 1"),
        (("--token-ids", "9:9"), "no token id"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        replay.main(["--trace", str(trace), "--url", "http://127.0.0.1:9", *arguments])
    assert complaint in capsys.readouterr().err
