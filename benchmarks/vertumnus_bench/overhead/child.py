"""A server as a child process, and what it uses."""

import asyncio
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vertumnus_router.clock import WallClock

from sgl_vertumnus import processes

_READY_S = 60.0
_GRACE_S = 5.0
_POLL_S = 0.05
_LOG_TAIL_LINES = 20


class StartError(Exception):
    """It did not start; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running server on ``127.0.0.1:port``, with its descendants."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """User and system seconds so far."""
        return processes.cpu_s(processes.family(self.pid))

    def rss_bytes(self) -> int:
        return processes.rss_bytes(processes.family(self.pid))

    def descriptors(self) -> int:
        """Open files."""
        family = processes.family(self.pid)
        return sum(len(list(Path(f"/proc/{one.pid}/fd").iterdir())) for one in family)


@contextmanager
def child(command: Sequence[str], port: int, ready: str, log: Path) -> Iterator[Child]:
    """``command``, once ``ready``, a path below its port, answers 2xx. Raises ``StartError``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
            # Proxies of the environment are not for loopback.
            env={**os.environ, "NO_PROXY": "*", "no_proxy": "*"},
        )
    clock = WallClock()
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}{ready}", clock, log)
        yield Child(process.pid, port)
    finally:
        asyncio.run(processes.stop_family(process.pid, clock, _GRACE_S))
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, clock: WallClock, log: Path) -> None:
    why = f"{url} did not answer within {_READY_S:g} s"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = clock.now() + _READY_S
    while clock.now() < deadline_s:
        if process.poll() is not None:
            why = f"it exited with status {process.returncode}"
            break
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            clock.pause(_POLL_S)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    raise StartError(f"{why}\n{tail}")
