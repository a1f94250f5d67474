"""The profiler from its command line, on a pool whose timing is known."""

import _thread
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.profile import Profile
from vertumnus_router.profiles import load_profile
from vertumnus_sim.workloads.traces import TraceRequest, write_mooncake

from sgl_vertumnus import cli, profile
from sgl_vertumnus.profiling import live_pool, reports
from sgl_vertumnus.profiling import run as profile_run
from tests.profiling.model_pool import KV_CAPACITY_TOKENS, ModelPool, true_seconds

pytest.importorskip("scipy", reason="needs scipy")

GRID = ("--lengths", "32,256,1024,4096", "--hit-ratios", "0,0.5", "--repetitions", "3")
CELLS = 3 * 7  # of 4096 tokens behind as many, a prompt would be too long


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelPool]:
    monkeypatch.setattr(reports, "HEARD_S", 0.5)
    monkeypatch.setattr(profile_run, "IDLE_S", 0.1)
    monkeypatch.setattr(live_pool, "POLL_S", 0.01)
    with ModelPool().serving() as serving:
        yield serving


def run(pool: ModelPool, folder: Path, *flags: str) -> int:
    """The exit status; the profile is ``folder/p.json``."""
    out = ("--url", pool.url, "--out", str(folder / "p.json"))
    try:
        profile.main([*out, *GRID, *flags])
    except SystemExit as stop:
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)  # as Python does
        return 1
    return 0


def samples(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "p.samples.jsonl").read_text().splitlines()[1:]
    return [json.loads(line) for line in lines]


def written(folder: Path) -> Profile:
    return load_profile(str(folder / "p.json"))


def test_a_known_model_is_found_again(
    pool: ModelPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pool, tmp_path, "--no-kappa") == 0
    found = written(tmp_path)
    model = PrefillModel(found)
    for degree in (1, 2, 4):
        for uncached, cached in ((64, 0), (700, 320), (3000, 3000)):
            expected = true_seconds(degree, uncached, cached)
            assert model.profiled_s(degree, uncached, cached) == pytest.approx(expected, rel=0.03)
        one = found.measurements[degree]
        assert one.uncached_tokens == (32, 4096) and one.samples == 21
        assert one.error.max < 0.05 and one.held_out is not None and one.held_out.max < 0.06
    assert (found.measured, found.sglang_version, found.kappa) == (True, "0.5.23", {})
    assert found.measured_on is not None and found.measured_on.device == "a device"
    said = capsys.readouterr().err
    assert "left out" in said and "4096 behind 4096" in said
    assert "63 prefills to measure by leader time: about" in said
    assert f"[{3 * CELLS}/{3 * CELLS}]" in said


def test_the_pool_goes_through_its_degrees_and_back(pool: ModelPool, tmp_path: Path) -> None:
    pool.busy_flushes = 2
    assert run(pool, tmp_path, "--no-kappa") == 0
    assert {"4x1", "2x2", "1x4"} <= set(pool.composed)
    assert pool.composition == "2x1,1x2"
    assert pool.most_stored_tokens <= KV_CAPACITY_TOKENS, "ranks would have had to evict"


def test_without_reports_the_client_times(pool: ModelPool, tmp_path: Path) -> None:
    pool.reports = False
    flags = ("--degrees", "1", "--repetitions", "1", "--no-kappa")
    assert run(pool, tmp_path, *flags, "--time", "leader") == 2
    run(pool, tmp_path, *flags)  # what a loopback takes need not make a model
    header = (tmp_path / "p.samples.jsonl").read_text().splitlines()[0]
    assert json.loads(header)["time"] == "ttft"


def test_a_pool_that_serves_is_left_alone(
    pool: ModelPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.running = 1
    assert run(pool, tmp_path) == 1
    assert "1 request(s) run or wait on the pool" in capsys.readouterr().err
    assert pool.composed == [] and pool.prompts == 0


def test_failure_puts_the_composition_back_and_resume_goes_on(
    pool: ModelPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(pool: ModelPool, number: int) -> None:
        if number == 40:
            raise RuntimeError("out of memory")

    pool.before_answer = fail
    assert run(pool, tmp_path, "--no-kappa") == 1
    assert "answers 500" in capsys.readouterr().err
    assert pool.composition == "2x1,1x2"
    before = samples(tmp_path)
    assert 20 < len(before) < 40
    assert run(pool, tmp_path, "--no-kappa") == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    with (tmp_path / "p.samples.jsonl").open("a") as file:
        file.write('{"type":"sample","ce')  # of a run that was killed
    pool.before_answer = lambda pool, number: None
    assert run(pool, tmp_path, "--no-kappa", "--resume") == 0
    after = samples(tmp_path)
    assert after[: len(before)] == before and len(after) == 3 * CELLS
    asked = pool.prompts
    assert run(pool, tmp_path, "--no-kappa", "--resume") == 0
    assert pool.prompts == asked, "all was measured"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal: what is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_puts_the_composition_back(pool: ModelPool, tmp_path: Path) -> None:
    def interrupt(pool: ModelPool, number: int) -> None:
        if number == 30:
            _thread.interrupt_main()

    pool.before_answer = interrupt
    assert run(pool, tmp_path, "--no-kappa") == 130
    assert len(pool.composed) > 1 and pool.composition == "2x1,1x2"
    assert samples(tmp_path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [(("--seed", "7"), "plan was"), ((), "kind was"), (("--time", "ttft"), "ttft")],
)
def test_resume_refuses_another_run(
    pool: ModelPool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    says: str,
) -> None:
    quick = ("--no-kappa", "--degrees", "1", "--repetitions", "1")
    assert run(pool, tmp_path, *quick) == 0
    if not flags:
        pool.shape = "another model"
    assert run(pool, tmp_path, *quick, "--resume", *flags) == 2
    said = capsys.readouterr().err
    assert "is of another run" in said and says in said


def test_what_was_not_as_asked_is_dropped_and_said(
    pool: ModelPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def disturb(pool: ModelPool, number: int) -> None:
        if number % 7 == 0:
            pool.finish("somebody-else", 10, 0, 1.0)
        elif number % 9 == 0:
            pool.flush()

    pool.before_answer = disturb
    assert run(pool, tmp_path, "--no-kappa", "--degrees", "1") == 0
    dropped = [one["fault"] for one in samples(tmp_path) if one.get("fault")]
    assert "0 tokens were cached" in dropped
    assert "somebody else's request was prefilled meanwhile" in dropped
    said = capsys.readouterr().err
    assert said.count("dropped: ") == len(dropped)
    assert f"{len(dropped)} dropped" in written(tmp_path).note


def test_a_prefill_that_cannot_be_had_is_left_out_and_said(
    pool: ModelPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.most_cached = 256
    assert run(pool, tmp_path, "--no-kappa", "--degrees", "1") == 0
    assert capsys.readouterr().err.count("left out: degree 1, 1024 behind 1024 tokens") == 3
    assert written(tmp_path).measurements[1].cached_tokens == (0, 256)
    pool.most_cached = 0
    out = ("--out", str(tmp_path / "q.json"), "--cached-tokens", "16,32")
    assert run(pool, tmp_path, "--no-kappa", "--degrees", "1", *out, "--hit-ratios", "0.5") == 1
    assert "the last 3 prefills could not be measured in 4 attempts" in capsys.readouterr().err


def test_kappa_is_a_load_that_meets_the_deadlines(
    pool: ModelPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.real_time = True
    flags = ("--degrees", "2", "--lengths", "32,128,256", "--repetitions", "1")
    search = ("--slo-s", "0.3", "--kappa-trial-s", "0.8", "--kappa-steps", "2")
    assert run(pool, tmp_path, *flags, *search) == 0
    found = written(tmp_path)
    assert 0.3 < found.kappa[2] < 1.1
    assert "κ: 90% of tokens within 0.3, 0.3, 0.3 s" in found.note
    assert pool.composition == "2x1,1x2"
    asked = pool.prompts
    assert run(pool, tmp_path, *flags, *search, "--resume") == 0
    assert pool.prompts == asked and written(tmp_path).kappa == found.kappa
    impossible = ("--slo-s", "0.001", "--out", str(tmp_path / "q.json"), "--kappa-steps", "1")
    past = [TraceRequest(0.0, tokens, 1, (), 512) for tokens in (100, 200, 9000)]
    trace = tmp_path / "trace.jsonl"
    write_mooncake(trace, past)
    assert run(pool, tmp_path, *flags, *search, *impossible, "--history", str(trace)) == 0
    said = capsys.readouterr().err
    assert "1 of the 3 prompts of the history are too long for the pool" in said
    assert "degree 2: no κ" in said
    other = load_profile(str(tmp_path / "q.json"))
    assert other.kappa == {} and "cold prompts of the lengths of trace.jsonl" in other.note


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--degrees", "8"), "the pool has 1,2,4"),
        (("--lengths", "32,64"), "three --lengths"),
        (("--hit-ratios", "0"), "only one prefix"),
        (("--hit-ratios", "1"), "below 1"),
        (("--slo-s", "1,2"), "one deadline, or three"),
        (("--repetitions", "0"), "must be above 0"),
        (("--history", "/nowhere"), "no such file"),
    ],
)
def test_what_cannot_work_is_refused_first(
    pool: ModelPool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    says: str,
) -> None:
    assert run(pool, tmp_path, *flags) == 2
    assert says in capsys.readouterr().err
    assert pool.prompts == 0 and not list(tmp_path.iterdir())


def test_it_is_a_command_of_sgl_vertumnus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["profile", "--url", "http://127.0.0.1:9"])
    assert "http://127.0.0.1:9/vertumnus/pool does not answer" in str(stop.value.code)
