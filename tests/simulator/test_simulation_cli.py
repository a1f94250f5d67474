"""``python -m vertumnus_sim``."""

import json
from pathlib import Path

import pytest
from vertumnus_sim import __main__ as cli
from vertumnus_sim.metrics import Row
from vertumnus_sim.workloads.traces import write_mooncake

from tests.simulator.scene import conversations


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    write_mooncake(path, conversations(60, 10))
    return str(path)


def small(trace: str, *more: str) -> list[str]:
    return ["--trace", trace, "--block-tokens", "100", "--gpus", "4", "--node-gpus", "4", *more]


def row(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main([*arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_json_is_one_row_with_the_documented_keys(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = row(capsys, *small(trace, "--composition", "2x1,1x2", "--rate", "20", "--seed", "3"))
    assert list(found) == list(Row.__struct_fields__)
    assert found["simulated"] is True and found["workload"] == trace
    assert (found["policy"], found["composition"], found["gpus"]) == ("late", "2x1,1x2", 4)
    assert (found["rate"], found["seed"], found["requests"]) == (20.0, 3, 54)
    by_degree = found["by_degree"]
    assert isinstance(by_degree, dict) and sum(by_degree.values()) == 54


def test_settings_reach_the_hardware_and_the_policy(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("--set", "hardware.noise=0", "--set", "late.window=3", "--set", "delays.dispatch_s=0.5")
    found = row(capsys, *small(trace, "--pull", *sets))
    assert found["settings"] == {"late.window": "3", "prefix.pull": "true"}
    plain = row(capsys, *small(trace, "--set", "hardware.noise=0"))
    assert float(str(found["mean_ms"])) > float(str(plain["mean_ms"])) + 499
    again = row(capsys, *small(trace, "--set", "hardware.noise=0"))
    assert {**plain, "sim_requests_per_s": 0} == {**again, "sim_requests_per_s": 0}


def test_the_text_has_the_same_figures(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = row(capsys, *small(trace))
    assert cli.main(small(trace)) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(Row.__struct_fields__)
    assert lines["mean_ms"] == f"{found['mean_ms']:,.1f}" and lines["simulated"] == "True"


def test_a_workload_can_be_cut_and_ranks_can_die(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = row(capsys, *small(trace, "--requests", "30", "--warm-up", "0", "--kill", "2:0/1"))
    assert found["requests"] == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "invalid choice: 'best'"),
        (["--set", "late.ageing"], "'late.ageing' is not NAME=VALUE"),
        (["--requests", "0"], "0 is not above 0"),
        (["--rate", "0"], "0 is not above 0"),
        (["--gpus", "four"], "--gpus"),
        (["--warm-up", "1"], "1 is not a share from 0 to below 1"),
        (["--slo", "1,2"], "'1,2' is not three numbers of seconds"),
        (["--kill", "soon"], "'soon' is not SECONDS:NODE/RANK, as in 120:0/3"),
        (["--degrees", "0,1"], "0 is not above 0"),
        (["--format", "csv"], "invalid choice: 'csv'"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(
    arguments: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(small(trace, *arguments))
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "late.agein=1"], "no setting 'late.agein'. Its settings are"),
        (["--set", "hardware.gpus=1"], "no setting 'hardware.gpus'"),
        (["--set", "policy=paper"], "policy is not a setting of a policy: give it as --policy"),
        (["--set", "late.window=0"], "late.window 0: must be 1 or more"),
        (["--set", "late.window=many"], "late.window=many: not a value of type int"),
        (["--set", "hardware.kv_blocks=0"], "kv_blocks 0: must be above 0"),
        (
            ["--set", "hardware.kv_partitioned=true", "--policy", "fluid"],
            "policy fluid regroups ranks, which would have to move partitioned KV",
        ),
        (["--composition", "3x1"], "composition '3x1' has 3 GPUs, not 4"),
        (["--composition", "1x8"], "'1x8' is not COUNTxDEGREE with a degree of 1, 2, 4"),
        (["--degrees", "3"], "a degree is a power of two"),
        (["--gpus", "6"], "6 GPUs are no whole number of nodes of 4"),
        (["--kill", "5:1/0"], "no rank 1/0 to die: there are 1 nodes of 4, counted from 0"),
        (["--profile", "none.json"], "none.json"),
        (["--block-tokens", "512"], "was the trace made with another block size"),
        (["--format", "flexlb"], "is the trace in another --format?"),
        (
            ["--set", "hardware.kv_blocks=1"],
            "no request was served that counts (60 refused: context_length_exceeded)",
        ),
    ],
)
def test_what_cannot_be_simulated_is_a_line_and_a_status(
    arguments: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(small(trace, *arguments)) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and message in line and not captured.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; scripts/fetch_traces gets the public traces"),
        ("", "no requests in it"),
        ("hello\n", "line 1: JSON is malformed"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "line 1"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content)
    assert cli.main(small(str(path))) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {path}") and message in line and not captured.out


def test_a_folder_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(small(str(tmp_path))) == 1
    assert f"error: {tmp_path}: cannot be read" in capsys.readouterr().err
