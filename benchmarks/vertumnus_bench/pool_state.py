"""What a pool holds: requests, KV, memory."""

import time
import urllib.request
from collections.abc import Callable
from typing import Any

from sgl_vertumnus import processes
from sgl_vertumnus.demo.servers import Server

_POLL_S = 0.1


def until(what: str, true: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Return once it is so; ``TimeoutError`` names what did not come."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(_POLL_S)


def drain(server: Server) -> int:
    """Wait until no rank has a request; how many tokens of KV they still hold then.

    What the prefix cache could evict does not count: the rest belongs to requests, and there
    are none. Waits a few seconds for the last of it, since ranks report now and then.
    """
    until("no request on the ranks", lambda: not _requests(server))
    try:
        until("no KV held", lambda: not _held_tokens(server), limit_s=10.0)
    except TimeoutError:
        return _held_tokens(server)
    return 0


def flush(server: Server) -> None:
    """Empty the prefix caches of all ranks of an idle pool."""
    with urllib.request.urlopen(f"{server.url}/flush_cache?timeout=30", timeout=60) as answer:
        answer.read()


def rank_rss_bytes(server: Server) -> int:
    """Resident memory of all ranks."""
    return processes.rss_bytes(server.ranks())


def _requests(server: Server) -> int:
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in _loads(server))


def _held_tokens(server: Server) -> int:
    return sum(load["num_used_tokens"] for load in _loads(server))


def _loads(server: Server) -> list[dict[str, Any]]:
    loads: list[dict[str, Any]] = server.get("/v1/loads?include=core")["loads"]
    return loads
