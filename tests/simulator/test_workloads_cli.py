"""``python -m vertumnus_sim.workloads``."""

import hashlib
import json
from pathlib import Path

import pytest
from vertumnus_sim.workloads import __main__ as cli
from vertumnus_sim.workloads.arrivals import mean_rate
from vertumnus_sim.workloads.conversation import conversation_like
from vertumnus_sim.workloads.fetch import TRACES, PublicTrace
from vertumnus_sim.workloads.traces import TraceRequest, read_mooncake, write_mooncake


def test_statistics_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"ts": 5, "il": 10, "ol": 2, "bh": []}) + "\n")
    assert cli.main(["statistics", str(path), "--format", "flexlb", "--like", "l-eval"]) == 0
    out = capsys.readouterr().out
    assert "t.jsonl" in out and "13,728" in out and "difference" in out


def test_an_error_is_a_line_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["statistics", str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/none.jsonl: no such file")


def test_a_generated_workload_is_written_at_its_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "w.jsonl.gz"
    assert cli.main(["generate", "l-eval", "--rate", "7", "-o", str(output)]) == 0
    requests = read_mooncake(output)
    assert len(requests) == 2_369 and mean_rate(requests) == pytest.approx(7)
    assert "the paper's" in capsys.readouterr().out


def test_without_traces_everything_is_generated_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = ("--phase", "20:5:tool-agent=1", "--phase", "10:9:l-eval=1")
    output = tmp_path / "w.jsonl"
    arguments = ["generate", "varying", *phases, "--traces", str(tmp_path), "-o", str(output)]
    assert cli.main(arguments) == 0
    assert "conversation: generated, as the public trace is not here" in capsys.readouterr().err
    assert 100 < len(read_mooncake(output)) < 300


def test_the_public_traces_are_preferred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = tmp_path / "conversation_trace.jsonl"
    write_mooncake(conversation, conversation_like(9, 300))
    assert cli.main(["generate", "tool-agent", "--conversation", str(conversation)]) == 0
    captured = capsys.readouterr()
    assert "a surrogate" in captured.err and str(conversation) in captured.err

    real = tmp_path / "toolagent_trace.jsonl"
    write_mooncake(real, [TraceRequest(0.0, 5, 1, (1,), 512)] * 2)
    pinned = PublicTrace("toolagent", hashlib.sha256(real.read_bytes()).hexdigest())
    monkeypatch.setitem(TRACES, "toolagent", pinned)
    output = tmp_path / "w.jsonl"
    arguments = ["generate", "tool-agent", "--traces", str(tmp_path), "-o", str(output)]
    assert cli.main(arguments) == 0
    assert str(real) in capsys.readouterr().err
    # Equal time stamps are spread, unless they are to be kept.
    assert len({request.arrival_s for request in read_mooncake(output)}) == 2
    assert cli.main([*arguments, "--keep-ticks"]) == 0
    assert len({request.arrival_s for request in read_mooncake(output)}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("l-eval", "--rate", "0"),
        ("varying", "--phase", "1:2"),
        ("l-eval", "--rate", "1", "--speed", "1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", *arguments])


def test_an_unknown_workload_in_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "varying", "--phase", "1:2:chat=1"]) == 1
    assert "no workload chat; there are" in capsys.readouterr().err
