"""A prefill pool with one decode server of plain SGLang, which can be killed and started again."""

import asyncio
import os
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vertumnus_router.clock import WallClock

from sgl_vertumnus import processes
from sgl_vertumnus.demo.servers import (
    DECODE_FLAGS,
    PLAIN_ENVIRONMENT,
    READY_TIMEOUT_S,
    STOP_GRACE_S,
    Server,
    plain_command,
    pool,
    router,
)
from sgl_vertumnus.ports import free_range
from vertumnus_bench.figures import say
from vertumnus_bench.pool_state import until
from vertumnus_bench.switching import DEGREES, SIZE

#: Started on two busy cores, a decode server needs more than the router's default of 30 s.
QUEUE_TIMEOUT_S = 120.0
#: Above those that ``demo.servers`` takes.
_FIRST_PORT = 31400


class DecodeServer:
    """Its lives, one after the other, on one port."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        self._port = free_range("127.0.0.1", 1, start=_FIRST_PORT)
        self._command = plain_command(model, self._port, (*DECODE_FLAGS, *flags))
        self._process: subprocess.Popen[bytes] | None = None
        handle, name = tempfile.mkstemp(prefix="sgl-decode-", suffix=".log")
        os.close(handle)
        self.log = Path(name)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns once it is ready."""
        self.launch()
        until("the decode server is ready", self.is_ready, READY_TIMEOUT_S)

    def launch(self) -> None:
        """From a thread that stays: the server ends with it."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
                env={**os.environ, **PLAIN_ENVIRONMENT},
            )

    def is_ready(self) -> bool:
        """``RuntimeError`` when it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the decode server has ended, see {self.log}")
        try:
            urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        assert self._process is not None
        for process in processes.family(self._process.pid):
            processes.send_signal(process, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            asyncio.run(processes.stop_family(self._process.pid, WallClock(), STOP_GRACE_S))
            self._process.wait()


@contextmanager
def decode_server(model: Path, flags: Sequence[str]) -> Iterator[DecodeServer]:
    server = DecodeServer(model, flags)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def prefill_pool(model: Path, flags: Sequence[str]) -> Iterator[tuple[Server, DecodeServer]]:
    """Four ranks that prefill, a router before them, and the decode server that it pairs them
    with. Requests wait at the router for longer than a decode server takes to start."""
    with (
        decode_server(model, flags) as decode,
        pool(
            model,
            size=SIZE,
            degrees=DEGREES,
            composition=f"{SIZE}x1",
            router=False,
            flags=(*flags, "--disaggregation-mode", "prefill"),
        ) as ranks,
        router(
            ranks.url, ("--decode", decode.url, "--queue-timeout-s", f"{QUEUE_TIMEOUT_S:g}")
        ) as before,
    ):
        say(f"a prefill pool of {SIZE} ranks and a decode server, after {ranks.ready_s:.0f} s")
        yield replace(ranks, router_url=before.router_url), decode
