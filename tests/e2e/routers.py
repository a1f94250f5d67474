"""Routers as processes of their own, before a pool that was started without one."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from urllib.error import HTTPError, URLError

from sgl_vertumnus.demo.servers import fetch
from sgl_vertumnus.ports import free_range


def until(what: str, true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def router_before(pool_url: str, *flags: str) -> Iterator[tuple[str, int]]:
    """A router process of its own: (URL, pid)."""
    with router_of("--pool-urls", pool_url, *flags) as router:
        yield router


@contextlib.contextmanager
def router_of(*flags: str) -> Iterator[tuple[str, int]]:
    """A router process that serves what the flags name: (URL, pid)."""
    port = free_range("127.0.0.1", 1, start=31500)
    command = [sys.executable, "-m", "sgl_vertumnus.launch_router"]
    process = subprocess.Popen([*command, "--port", str(port), *flags])
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, "the router exited"
        with contextlib.suppress(URLError, HTTPError, OSError):
            fetch(f"{url}/readiness", timeout_s=5)
            return True
        return False

    try:
        until("router ready", ready)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(20)
