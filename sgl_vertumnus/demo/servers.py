"""Real servers as child processes, for tests and benchmarks: a pool, or plain SGLang.

with pool(model, size=4, degrees=(1, 2), composition="2x1,1x2") as server:
    server.post("/generate", {...})
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vertumnus_router.clock import WallClock

from sgl_vertumnus import processes
from sgl_vertumnus.errors import PoolStartError
from sgl_vertumnus.ports import free_range

READY_TIMEOUT_S = 300.0
STOP_GRACE_S = 20.0
_POLL_S = 0.05
#: The cause, a rank's traceback, stands before those of the processes that it takes along.
_LOG_TAIL_LINES = 150
#: SGLang's name for a scheduler process of data-parallel rank N ends in N.
_RANK_TITLE = "sglang::scheduler_DP"
#: Above the ports that ``launch_server`` takes for itself.
_FIRST_PORT = 31000
#: One core for a server without ranks of its own, and loopback for the KV that it fetches.
PLAIN_ENVIRONMENT = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
}
DECODE_FLAGS = (
    *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp"),
    *("--disaggregation-decode-retraction-backup", "none"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ``url`` is the SGLang front, ``router_url`` the router before it.

    ``ready_s`` counts from the start of its first process until it answered.
    """

    pid: int
    url: str
    router_url: str | None
    log: Path
    ready_s: float

    @property
    def family(self) -> list[processes.Process]:
        """All its processes."""
        return processes.family(self.pid)

    def ranks(self) -> list[processes.Process]:
        """The scheduler processes of a pool."""
        return [p for p in self.family if processes.title(p).startswith(_RANK_TITLE)]

    def get(self, path: str, *, router: bool = False) -> Any:
        """Decoded JSON of a GET. Raises ``urllib.error.HTTPError``."""
        return fetch(self._base(router) + path)

    def post(self, path: str, body: Mapping[str, Any], *, router: bool = False) -> Any:
        """Decoded JSON of a POST. Raises ``urllib.error.HTTPError``."""
        return fetch(self._base(router) + path, body)

    def _base(self, router: bool) -> str:
        if not router:
            return self.url
        if self.router_url is None:
            raise ValueError("this server was started without a router")
        return self.router_url


def fetch(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = 600.0) -> Any:
    """One request; the decoded JSON answer. Raises ``urllib.error.HTTPError``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        payload = answer.read()
    return json.loads(payload) if payload else None


@contextmanager
def pool(
    model: str | Path,
    *,
    size: int,
    degrees: Sequence[int],
    composition: str,
    router: bool = True,
    flags: Sequence[str] = (),
    log: Path | None = None,
) -> Iterator[Server]:
    """A pool of ``size`` ranks, with a router before it unless told otherwise."""
    front, router_port = free_range("127.0.0.1", 2, start=_FIRST_PORT), None
    command = [
        *(sys.executable, "-m", "sgl_vertumnus.launch_server", "--model-path", str(model)),
        *("--pool-size", str(size), "--cp-degrees", ",".join(map(str, degrees))),
        *("--composition", composition, "--port", str(front)),
    ]
    if router:
        router_port = front + 1
        command += ["--router-port", str(router_port)]
    else:
        command.append("--no-router")
    with _running([*command, *flags], front, router_port, {}, log) as server:
        yield server


@contextmanager
def router(
    pool_url: str, flags: Sequence[str] = (), *, log: Path | None = None
) -> Iterator[Server]:
    """A router of its own before a running pool; ``pid`` and ``family`` are the router's."""
    front = urlsplit(pool_url).port
    if front is None:
        raise ValueError(f"{pool_url!r} names no port")
    port = free_range("127.0.0.1", 1, start=_FIRST_PORT)
    command = [
        *(sys.executable, "-m", "sgl_vertumnus.launch_router", "--pool-urls", pool_url),
        *("--port", str(port)),
    ]
    with _running([*command, *flags], front, port, {}, log) as server:
        yield server


@contextmanager
def plain(
    model: str | Path, *, flags: Sequence[str] = (), log: Path | None = None
) -> Iterator[Server]:
    """Unmodified SGLang on the platform of this machine, one rank, no patch installed.

    On a CPU it gets the flags that a pool's ranks get, so that the two can be compared.
    """
    front = free_range("127.0.0.1", 1, start=_FIRST_PORT)
    with _running(
        plain_command(model, front, flags), front, None, PLAIN_ENVIRONMENT, log
    ) as server:
        yield server


@contextmanager
def decode(
    model: str | Path,
    *,
    port: int | None = None,
    flags: Sequence[str] = (),
    log: Path | None = None,
) -> Iterator[Server]:
    """A decode server: unmodified SGLang, as ``plain``; on any port unless it is given one."""
    front = port or free_range("127.0.0.1", 1, start=_FIRST_PORT)
    command = plain_command(model, front, (*DECODE_FLAGS, *flags))
    with _running(command, front, None, PLAIN_ENVIRONMENT, log) as server:
        yield server


def plain_command(model: str | Path, port: int, flags: Sequence[str]) -> list[str]:
    """The command line of unmodified SGLang on a CPU."""
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
        *("--attention-backend", "torch_native", "--page-size", "16", "--dtype", "float32"),
        *("--disable-overlap-schedule", "--sleep-on-idle"),
        *flags,
    ]


@contextmanager
def _running(
    command: Sequence[str],
    front: int,
    router_port: int | None,
    environment: Mapping[str, str],
    log: Path | None,
) -> Iterator[Server]:
    if log is None:
        handle, name = tempfile.mkstemp(prefix="sgl-vertumnus-", suffix=".log")
        os.close(handle)
        log = Path(name)
    clock = WallClock()
    started = clock.now()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
            env={**os.environ, **environment},
        )
    url = f"http://127.0.0.1:{front}"
    router_url = None if router_port is None else f"http://127.0.0.1:{router_port}"
    try:
        _wait_ready(process, f"{router_url}/readiness" if router_url else f"{url}/ready", log)
        yield Server(process.pid, url, router_url, log, clock.now() - started)
    finally:
        asyncio.run(processes.stop_family(process.pid, clock, STOP_GRACE_S))
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    clock = WallClock()
    deadline = clock.now() + READY_TIMEOUT_S
    while clock.now() < deadline:
        if process.poll() is not None:
            raise _failure(f"it exited with status {process.returncode}", log)
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            clock.pause(_POLL_S)
    raise _failure(f"it was not ready after {READY_TIMEOUT_S:.0f} s", log)


def _failure(what: str, log: Path) -> PoolStartError:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    return PoolStartError(f"{what}; the end of {log}:\n{tail}")
