"""Clients, routers and ranks that go away while real ranks serve."""

import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from sgl_vertumnus.demo.servers import Server, fetch, pool
from tests.e2e.routers import router_before, until

NOTICE_S = 8.0


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    with pool(
        random_model,
        size=4,
        degrees=(1, 2),
        composition="2x1,1x2",
        router=False,
        flags=("--max-total-tokens", "32768"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def router(server: Server) -> Iterator[str]:
    with router_before(server.url) as (url, _):
        yield url


def workers(router: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fetch(f"{router}/workers")["workers"]
    return found


def running_requests(server: Server) -> int:
    loads = server.get("/v1/loads")["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def generate(router: str, seed: int, tokens: int, new_tokens: int = 4) -> dict[str, Any]:
    source = random.Random(seed)
    body = {
        "input_ids": [source.randrange(5, 250) for _ in range(tokens)],
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
    }
    answer: dict[str, Any] = fetch(f"{router}/generate", body)
    return answer


def stream(router: str, seed: int, hang_up_after: float | None) -> str:
    """One streamed request; the client leaves after ``hang_up_after`` seconds."""
    source = random.Random(seed)
    body = {
        "input_ids": [source.randrange(5, 250) for _ in range(source.choice((20, 200, 600)))],
        "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    address = urlsplit(router)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    leaver: threading.Timer | None = None
    try:
        connection.connect()
        if hang_up_after is not None:
            leaver = threading.Timer(hang_up_after, lambda: connection.sock.shutdown(2))
            leaver.start()
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection.getresponse().read().decode()
    except OSError:
        return "left"
    except http.client.HTTPException:
        return "left"
    finally:
        if leaver is not None:
            leaver.cancel()
        connection.close()


def storm(server: Server, router: str, streams: int) -> None:
    """Concurrent streams, a third of whose clients leave in whatever phase; then: nothing."""
    source = random.Random(7)
    plans = [(n, source.uniform(0.0, 4.0) if n % 3 == 0 else None) for n in range(streams)]
    with ThreadPoolExecutor(streams) as clients:
        answers = list(clients.map(lambda plan: stream(router, *plan), plans))
    stayed = [answer for answer, (_, leave) in zip(answers, plans, strict=True) if leave is None]
    assert all(answer.rstrip().endswith("data: [DONE]") for answer in stayed)
    until("no reservation left", lambda: fetch(f"{router}/workers")["pending"] == 0)
    assert all(w["requests"] == 0 and w["queue_s"] == 0 for w in workers(router))
    until("no request left on the ranks", lambda: running_requests(server) == 0)


def test_64_streams_with_disconnects_leave_nothing_behind(server: Server, router: str) -> None:
    storm(server, router, streams=64)


def test_late_binding_serves_and_leaves_nothing_behind(server: Server) -> None:
    with router_before(server.url, "--policy", "late") as (late, _):
        storm(server, late, streams=24)


def test_a_new_router_learns_the_index_by_replay(server: Server, router: str) -> None:
    generate(router, seed=42, tokens=320)
    known = {w["id"]: w["cached_blocks"] for w in workers(router)}
    assert sum(known.values()) >= 20
    with router_before(server.url) as (second, _):
        until(
            "the second router knows as much",
            lambda: {w["id"]: w["cached_blocks"] for w in workers(second)} == known,
        )


def test_a_killed_rank_leaves_and_the_others_serve(server: Server, router: str) -> None:
    """Kills a member of a worker in the middle of a prefill of that worker.

    Of two equal workers both get requests, however fast the router holds a degree to be.
    """
    moved = server.post("/vertumnus/regroup", {"composition": "2x2"})
    assert moved["outcome"] == "committed", moved
    until("the router sees two workers", lambda: set(states(router)) == {(0, 1), (2, 3)})
    victim = rank_pid(server, 3)
    outcomes: list[object] = []

    def ask(seed: int) -> None:
        try:
            outcomes.append(generate(router, seed, tokens=3000))
        except HTTPError as exc:
            outcomes.append(exc)

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for asker in askers:
        asker.start()
    until("both workers are busy", lambda: all(w["requests"] for w in workers(router)))
    os.kill(victim, signal.SIGKILL)
    until("the worker left", lambda: states(router)[2, 3] != "serving", NOTICE_S)
    for asker in askers:
        asker.join(120)
    assert len(outcomes) == 6
    # Nothing had been streamed, so every request was served elsewhere.
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
    assert generate(router, seed=99, tokens=100)["meta_info"]["completion_tokens"] == 4
    assert states(router) == {(0, 1): "serving", (2, 3): "lost"}
    assert fetch(f"{router}/workers")["pending"] == 0


def test_control_requests_do_not_wait_for_dead_ranks(server: Server) -> None:
    """Runs after the kill above: SGLang's front collects one answer per rank."""
    assert len(server.get("/server_info")["internal_states"]) == 2


def test_a_request_for_a_failed_worker_is_refused_at_the_front(server: Server) -> None:
    """Runs after the kill above: the front must not queue for ever for a dead rank."""
    with pytest.raises(HTTPError) as caught:
        server.post("/generate", {"text": "hi", "routed_dp_rank": 2})
    assert caught.value.code == 503
    assert b"has failed" in caught.value.read()


def test_a_dead_front_is_an_error_and_not_a_hang(server: Server, router: str) -> None:
    os.kill(server.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(HTTPError) as caught:
        generate(router, seed=1, tokens=20)
    assert caught.value.code in (502, 503)
    assert json.loads(caught.value.read())["error"]["message"]
    assert time.monotonic() - started < 45

    def not_ready() -> bool:
        try:
            fetch(f"{router}/readiness", timeout_s=5)
        except HTTPError as exc:
            return exc.code == 503
        return False

    until("the router says that it is not ready", not_ready)


def rank_pid(server: Server, rank: int) -> int:
    for process in server.family:
        title = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0")
        if title.endswith(f"sglang::scheduler_DP{rank}".encode()):
            return process.pid
    raise AssertionError(f"no process of rank {rank}")


def states(router: str) -> dict[tuple[int, ...], str]:
    """The state of each worker, by its ranks."""
    return {tuple(w["ranks"]): w["state"] for w in workers(router)}
