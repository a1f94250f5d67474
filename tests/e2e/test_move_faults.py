"""Ranks that die, stop, dawdle or miss a command in the middle of a move.

Whatever happens, the pool ends in a committed epoch or with a failed block, the other blocks
serve on, and every request ends.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from sgl_vertumnus.demo.servers import Server, fetch, pool
from sgl_vertumnus.environment import CHAOS_VARIABLE
from tests.e2e.routers import router_before, until

#: From a fault to the pool's verdict.
VERDICT_S = 10.0


@contextmanager
def pool_with(monkeypatch: pytest.MonkeyPatch, model: Path, *faults: str) -> Iterator[Server]:
    """Four ranks alone; ``faults`` are EPOCH:RANK:STAGE:ACTION, epoch 1 the first move."""
    monkeypatch.setenv(CHAOS_VARIABLE, ",".join(faults))
    flags = ("--max-total-tokens", "16384", "--dtype", "float32", "--chunked-prefill-size", "256")
    with pool(
        model, size=4, degrees=(1, 2, 4), composition="4x1", router=False, flags=flags
    ) as server:
        yield server


class Traffic:
    """Clients that ask, each at one home, until told to stop; what became of every request."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self.ended: list[tuple[int, object]] = []
        self._pool = ThreadPoolExecutor(8)

    def __enter__(self) -> "Traffic":
        self._clients = [self._pool.submit(self._ask, n % 4, n) for n in range(8)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(60)  # a request that hangs fails here
        self._pool.shutdown()

    def _ask(self, home: int, seed: int) -> None:
        source = random.Random(seed)
        while not self._stop.is_set():
            prompt = [source.randrange(5, 250) for _ in range(source.choice((20, 300, 900)))]
            try:
                answer = generate(self._server, prompt, home)
                self.ended.append((home, len(answer["output_ids"])))
            except HTTPError as exc:
                self.ended.append((home, (exc.code, exc.read())))
                self._stop.wait(0.1)  # for a failed block: do not spin


def generate(server: Server, prompt: list[int], home: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    request = {"input_ids": prompt, "sampling_params": sampling, "routed_dp_rank": home}
    answer: dict[str, Any] = fetch(f"{server.url}/generate", request, timeout_s=60)
    return answer


def move(server: Server, composition: str) -> dict[str, Any]:
    """The report, with the seconds that it took to come."""
    began = time.monotonic()
    command = {"composition": composition}
    report: dict[str, Any] = fetch(f"{server.url}/vertumnus/regroup", command, timeout_s=40)
    return report | {"took_s": time.monotonic() - began}


def blocks(server: Server) -> dict[tuple[int, int], str]:
    found = server.get("/vertumnus/composition")["blocks"]
    return {(block["first"], block["degree"]): block["state"] for block in found}


def assert_serves(server: Server, *homes: int) -> None:
    for home in homes:
        assert len(generate(server, [7] * 40, home)["output_ids"]) == 12


def assert_refused(server: Server, *homes: int) -> None:
    for home in homes:
        with pytest.raises(HTTPError) as caught:
            generate(server, [7] * 40, home)
        assert caught.value.code == 503 and b"has failed" in caught.value.read()


def assert_ended_well(traffic: Traffic, failed_homes: set[int]) -> None:
    """All tokens, or a cause; and no cause where nothing has failed."""
    assert traffic.ended
    for home, outcome in traffic.ended:
        if outcome != 12:
            assert home in failed_homes, (home, outcome)
            assert isinstance(outcome, tuple) and outcome[0] == 503, outcome
            assert b"failed" in outcome[1], outcome


def test_late_and_lost_commands_delay_a_move_and_nothing_else(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ("1:1:commit:drop", "2:0:suspended:slow2", "3:2:prepare:slow1", "4:3:serving:slow1.5")
    with pool_with(monkeypatch, random_model, *faults) as server:
        with Traffic(server) as traffic:
            for composition in ("1x2,2x1", "1x4", "2x2", "4x1", "1x4"):
                report = move(server, composition)
                assert report["outcome"] == "committed", report
                assert report["took_s"] < VERDICT_S
        assert_ended_well(traffic, set())
        assert blocks(server) == {(0, 4): "serving"}
        assert_serves(server, 0, 1, 2, 3)


def test_a_lost_prepare_abandons_the_move_and_the_next_one_goes_through(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_with(monkeypatch, random_model, "1:2:prepare:drop") as server:
        with Traffic(server) as traffic:
            report = move(server, "2x2")
            assert report["outcome"] == "abandoned" and "[2]" in report["reason"]
            assert set(blocks(server).values()) == {"serving"} and len(blocks(server)) == 4
            assert move(server, "2x2")["outcome"] == "committed"
        assert_ended_well(traffic, set())
        assert_serves(server, 0, 1, 2, 3)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_rank_that_ends_before_it_switches_fails_with_its_old_block(
    random_model: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    with pool_with(monkeypatch, random_model, f"1:1:ready:{action}") as server:
        # Rank 0 is not ready until its prefill has run, so that the fault comes first.
        with Traffic(server) as traffic:
            report = move(server, "1x2,2x1")
            assert report["took_s"] < VERDICT_S
        failed = {0, 1} if report["outcome"] == "failed" else {1}
        assert report["outcome"] in ("abandoned", "failed"), report
        assert_ended_well(traffic, failed)
        assert_serves(server, 2, 3)
        assert_refused(server, *failed)
        assert move(server, "1x2,1x2" if failed == {0, 1} else "2x1,1x2")["outcome"] == "committed"
        assert_serves(server, 2, 3)


@pytest.mark.parametrize(
    "fault", ["suspended:kill", "suspended:stop", "serving:kill", "commit:stop"]
)
def test_a_rank_that_ends_while_it_switches_fails_with_its_new_block(
    random_model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with pool_with(monkeypatch, random_model, f"1:1:{fault}") as server:
        with Traffic(server) as traffic:
            report = move(server, "2x2")
            assert report["took_s"] < VERDICT_S
        assert report["outcome"] == "failed" and report["failed"] == [[0, 2]], report
        assert_ended_well(traffic, {0, 1})
        assert blocks(server) == {(0, 2): "failed", (2, 2): "serving"}
        assert_serves(server, 2, 3)
        assert_refused(server, 0, 1)
        assert move(server, "1x2,2x1")["outcome"] == "committed", "the others can still move"
        assert_serves(server, 2, 3)


def test_a_router_that_dies_in_the_middle_of_a_move_leaves_a_pool_that_moved(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pool_with(monkeypatch, random_model, "1:1:suspended:slow2") as server,
        ThreadPoolExecutor(1) as operator,
    ):
        with router_before(server.url) as (first, pid):
            url = f"{first}/vertumnus/reconfigure"
            asked = operator.submit(fetch, url, {"composition": "1x2,2x1"}, 40)
            until("the pool moves", lambda: bool(server.get("/vertumnus/composition")["moving"]))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(OSError):
                asked.result(20)
        with router_before(server.url) as (second, _):
            until(
                "the next router sees the merged worker",
                lambda: serving(second) == {(0, 1), (2,), (3,)},
                VERDICT_S,
            )
            answer = fetch(f"{second}/generate", {"input_ids": [7] * 300, "sampling_params": {}})
            assert answer["output_ids"]
            moved = fetch(f"{second}/vertumnus/reconfigure", {"composition": "2x2"}, 40)
            assert [one["outcome"] for one in moved["moves"]] == ["committed"]


def serving(router: str) -> set[tuple[int, ...]]:
    """The ranks of each worker that serves."""
    workers = fetch(f"{router}/workers")["workers"]
    return {tuple(w["ranks"]) for w in workers if w["state"] == "serving"}


def test_requests_of_a_failed_block_are_served_elsewhere_or_end_with_a_cause(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the router: what had not begun to stream is retried."""
    with (
        pool_with(monkeypatch, random_model, "1:1:suspended:kill") as server,
        router_before(server.url) as (router, _),
        ThreadPoolExecutor(24) as clients,
    ):
        source = random.Random(11)
        prompts = [[source.randrange(5, 250) for _ in range(1200)] for _ in range(24)]
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        answers = [
            clients.submit(
                fetch,
                f"{router}/generate",
                {"input_ids": prompt, "sampling_params": sampling},
                120,
            )
            for prompt in prompts
        ]
        until("every worker is busy", lambda: all_busy(router))
        with pytest.raises(HTTPError) as caught:
            fetch(f"{router}/vertumnus/reconfigure", {"composition": "1x2,2x1"}, 40)
        assert caught.value.code == 409 and b"failed" in caught.value.read()
        # None of them streams, so none has been told anything when its block fails.
        assert [len(one.result()["output_ids"]) for one in answers] == [12] * 24
        assert serving(router) == {(2,), (3,)}
        until("nothing is left behind", lambda: fetch(f"{router}/workers")["pending"] == 0)


def all_busy(router: str) -> bool:
    workers = fetch(f"{router}/workers")["workers"]
    return len(workers) == 4 and all(worker["requests"] for worker in workers)
