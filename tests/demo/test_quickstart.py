"""The quickstart's own duties, against a fake pool: what it prints, and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgl_vertumnus.demo.quickstart import launch_command, parse_options

DRIVER = Path(__file__).with_name("quickstart_with_fake_pool.py")
KEYS = {
    *("answer", "worker", "cp_degree", "ready_s", "ttft_s", "url", "composition", "pss_gib"),
}


class Run:
    """One quickstart as a process, and the pool's processes that it must not leave behind."""

    def __init__(self, tmp_path: Path, *argv: str) -> None:
        self._pids = tmp_path / "pids"
        self._output = tmp_path / "stdout"
        self._errors = tmp_path / "stderr"
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), str(self._pids), *argv],
            stdout=self._output.open("wb"),
            stderr=self._errors.open("wb"),
            env={**os.environ, "VERTUMNUS_CACHE": str(tmp_path / "cache")},
        )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in self.output + self.errors:
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.05)

    def wait(self) -> int:
        status = self.process.wait(40)
        self.nothing_is_left()
        return status

    def nothing_is_left(self) -> None:
        pids = [int(pid) for pid in self._pids.read_text().split()]
        assert len(pids) == 3
        deadline = time.monotonic() + 15
        while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"left behind: {left}\n{self.errors}"
            time.sleep(0.05)

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self._pids.read_text().split() if self._pids.exists() else ():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*argv: str) -> Run:
        runs.append(Run(tmp_path, *argv))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


def test_once_json_prints_one_object_last(start: Start) -> None:
    run = start("--once", "--json")
    assert run.wait() == 0
    result = json.loads(run.output.splitlines()[-1])
    assert result.keys() == KEYS
    assert result["answer"] == "Paris."
    assert (result["worker"], result["cp_degree"]) == ("pool/2x2", 2)
    # As the router reports it, in rank order and without the lost worker.
    assert result["composition"] == "2x1,1x2"
    assert 0 < result["ttft_s"] < result["ready_s"] < 30
    assert 0 < result["pss_gib"] < 1
    assert result["url"].startswith("http://127.0.0.1:")


def test_once_says_what_happened(start: Start) -> None:
    run = start("--once")
    assert run.wait() == 0
    for said in ("Paris.", "pool/2x2", "degree 2", "http://127.0.0.1:", "2x1,1x2"):
        assert said in run.output
    for said in ("rank 1: loading the weights", "rank 1: loaded in 1.25 s", "stopping the pool"):
        assert said in run.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serves_until_it_is_told_to_stop(start: Start, number: signal.Signals) -> None:
    run = start()
    run.wait_for("serving until Ctrl-C")
    assert run.process.poll() is None
    run.process.send_signal(number)
    run.wait_for("stopping the pool")
    run.process.send_signal(number)  # impatience is understood, not obeyed halfway
    assert run.wait() == 0


def test_ctrl_c_while_starting(start: Start) -> None:
    run = start("--once", "--", "--never-ready")
    run.wait_for("rank 1: loaded")
    time.sleep(1)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping the pool")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert run.output == ""


def test_a_pool_that_dies_is_reported_with_its_last_words(start: Start) -> None:
    run = start("--once", "--", "--dies")
    assert run.wait() == 1
    assert "the pool ended with exit status 1" in run.errors
    assert "ValueError: this model does not fit" in run.errors
    assert run.output == ""


def test_a_killed_quickstart_takes_the_pools_root_along(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait_for("serving until Ctrl-C")
    run.process.kill()
    run.process.wait()
    # Nobody is left to end the children of a root that does not do it: only the root is told.
    root = int((tmp_path / "pids").read_text().split()[0])
    deadline = time.monotonic() + 15
    while Path(f"/proc/{root}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_command_line_becomes_the_launchers() -> None:
    options = parse_options(["--composition", "1x4,2x1,1x2", "--", "--mem-fraction-static", "0.2"])
    assert (options.pool_size, options.degrees) == (8, (1, 2, 4))
    command = launch_command(options, Path("/model"))
    text = " ".join(command)
    assert "-m sgl_vertumnus.launch_server --model-path /model" in text
    assert "--pool-size 8 --cp-degrees 1,2,4 --composition 1x4,2x1,1x2" in text
    assert text.endswith("--mem-fraction-static 0.2")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--composition", "1x2,x"], "is not COUNTxDEGREE"),
        (["--composition", "1x1,1x2"], "would start at rank 1"),
        (["--composition", "1x3"], "degree 3 is not among"),
        (["--port", "99999"], "--port 99999 cannot be used"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(argv)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_taken_port_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit):
            parse_options(["--port", str(taken.getsockname()[1])])
    assert "cannot be used" in capsys.readouterr().err
