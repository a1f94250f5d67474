"""The mock worker, the load client and what is measured between them."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from vertumnus_bench.overhead.comparison import SHORT, STREAM
from vertumnus_bench.overhead.load import Load, run
from vertumnus_bench.overhead.mock_pool import MockPool, mock_pool
from vertumnus_bench.overhead.programs import CompilerError, program
from vertumnus_bench.overhead.tokenizers import bytes_only

_ROOT = Path(__file__).parents[2]
_FEW = Load(connections=4, seconds=20.0, requests=40)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockPool]:
    folder = tmp_path_factory.mktemp("mock")
    with mock_pool(folder, bytes_only(folder)) as found:
        yield found


def test_a_request_is_answered_once(pool: MockPool) -> None:
    seen = run(pool.port, SHORT, _FEW)
    assert (seen.requests, seen.errors, seen.event) == (40, 0, None)
    assert seen.whole is not None and seen.whole.count == 40


def test_a_stream_has_all_its_events_at_their_pace(pool: MockPool) -> None:
    pool.stream(events=5, gap_us=20_000)
    seen = run(pool.port, STREAM, _FEW)
    assert (seen.requests, seen.errors) == (40, 0)
    assert seen.event is not None and seen.event.count == 40 * 5
    assert seen.whole is not None and seen.whole.p50_us >= 4 * 20_000


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",  # and closed
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b"9\r\ndata: 1\n\n\r\n0\r\n\r\n",  # no [DONE]
    ],
)
def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(3):
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        seen = run(listener.getsockname()[1], STREAM, Load(1, 20.0, requests=3))
        thread.join()
    assert (seen.requests, seen.errors) == (0, 3)


def test_a_program_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = program("load_client", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert program("load_client", tmp_path) == built
    with pytest.raises(CompilerError, match="apt-get install gcc"):
        program("load_client", tmp_path / "elsewhere")


def test_the_comparison_has_every_figure_and_says_who_is_missing(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, str(_ROOT / "benchmarks" / "router_overhead.py")),
            *("--json", "--quick", "--peers", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["sglang_router"] is None and figures["smg"] is None
    assert "pip install sglang-router==0.3.2" in ran.stderr
    for name in ("vertumnus", "direct"):
        for kind in ("short", "prompt64k"):
            keys = {"cpu_us", "p50_us", "rps_c16", "rps_c128"}
            assert set(figures[name][kind]) == keys and figures[name][kind]["rps_c128"] > 0
        assert set(figures[name]["stream"]) == {"cpu_us", "first_event_ms", "rps_c16"}
    assert figures["vertumnus"]["short"]["cpu_us"] > 0
    assert figures["vertumnus"]["kib_per_stream"] is not None


def test_many_streams_lose_nothing_and_leave_nothing_open() -> None:
    ran = subprocess.run(
        [sys.executable, str(_ROOT / "benchmarks" / "router_load.py"), "--json", "--quick"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["requests"] >= 100
    assert (figures["errors"], figures["lost_events"]) == (0, 0)
    # 100 connections of clients and as many to the engine, and what a router has open by itself.
    assert figures["descriptors"]["late"] <= figures["descriptors"]["before"] + 210
