"""Fetching against a server of this machine that breaks off, forgets ranges, lies."""

import hashlib
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from vertumnus_sim.workloads.fetch import (
    TRACES,
    FetchError,
    PublicTrace,
    fetch,
    fetched,
    traces_folder,
)

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 1024
TRACE = PublicTrace("some", hashlib.sha256(CONTENT).hexdigest())


class Mirror(ThreadingHTTPServer):
    """``break_at``: where it hangs up; ``ranges``: whether it can go on from there."""

    content = CONTENT
    break_at: int | None = None
    ranges = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.path != f"/{TRACE.file}":
            self.send_error(404)
            return
        first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if not self.server.ranges:
            first = 0
        content = self.server.content
        if first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        self.wfile.write(content[first : self.server.break_at])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    server = Mirror()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_trace_is_fetched_once(mirror: Mirror, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert fetched(TRACE, folder) is None
    path = fetch(TRACE, folder, mirror.url)
    assert path.read_bytes() == CONTENT
    assert fetch(TRACE, folder, mirror.url) == fetched(TRACE, folder) == path
    assert mirror.asked == [None]
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("ranges", [True, False])
def test_what_broke_off_goes_on(mirror: Mirror, tmp_path: Path, ranges: bool) -> None:
    mirror.break_at = 100_000
    with pytest.raises(FetchError, match=r"broke off .*100,000 bytes are here"):
        fetch(TRACE, tmp_path, mirror.url)
    assert fetched(TRACE, tmp_path) is None
    mirror.break_at, mirror.ranges = None, ranges
    assert fetch(TRACE, tmp_path, mirror.url).read_bytes() == CONTENT
    assert mirror.asked == [None, "bytes=100000-"]


def test_a_whole_part_needs_nothing_more(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f"{TRACE.file}.part").write_bytes(CONTENT)
    assert fetch(TRACE, tmp_path, mirror.url).read_bytes() == CONTENT


def test_other_content_is_refused_and_removed(mirror: Mirror, tmp_path: Path) -> None:
    mirror.content = CONTENT[:-1] + b"x"
    with pytest.raises(FetchError, match=r"sha256 is .* not"):
        fetch(TRACE, tmp_path, mirror.url)
    assert list(tmp_path.iterdir()) == []
    mirror.content = CONTENT
    assert fetch(TRACE, tmp_path, mirror.url).read_bytes() == CONTENT


def test_a_file_that_was_changed_is_fetched_again(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / TRACE.file).write_bytes(b"cut short")
    assert fetch(TRACE, tmp_path, mirror.url).read_bytes() == CONTENT


def test_a_server_without_the_file_and_no_server(mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="404"):
        fetch(PublicTrace("other", "0"), tmp_path, mirror.url)
    with pytest.raises(FetchError, match=r"no connection .*put the file into"):
        fetch(TRACE, tmp_path, "http://127.0.0.1:9")


def test_the_script_says_what_failed(mirror: Mirror, tmp_path: Path) -> None:
    command = [ROOT / "scripts/fetch_traces", "synthetic", "--base-url", mirror.url]
    done = subprocess.run(
        [*command, "--into", tmp_path], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert (
        "error: " in done.stderr and "synthetic_trace.jsonl: the server answers 404" in done.stderr
    )


def test_what_is_pinned() -> None:
    assert set(TRACES) == {"conversation", "synthetic", "toolagent"}
    assert all(len(trace.sha256) == 64 for trace in TRACES.values())


def test_where_traces_go() -> None:
    assert traces_folder({"VERTUMNUS_CACHE": "/c"}) == Path("/c/traces")
    assert traces_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/sgl-vertumnus/traces")
    assert traces_folder({"XDG_CACHE_HOME": "x"}) == Path.home() / ".cache/sgl-vertumnus/traces"
