"""Cached prefixes are copied and deleted between real ranks, by a router, while they serve."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from vertumnus_bench.prefix_copies import Prefixes
from vertumnus_router.io.hashing import block_hashes

from sgl_vertumnus.demo.servers import Server, fetch, pool
from tests.e2e.moving import COMPOSITIONS, FLAGS, PAGE_TOKENS, cached, generate, move, prompt_of
from tests.e2e.routers import until

CAPACITY = 6000
ALONE = ("0x1", "1x1")
PAIR = "2x2"


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    """Two workers of one rank and one of two; a rank has room for six long prompts."""
    flags = (*FLAGS, "--max-total-tokens", str(CAPACITY))
    with pool(
        random_model, size=4, degrees=(1, 2, 4), composition="2x1,1x2", flags=flags
    ) as running:
        yield running


@pytest.fixture(scope="module")
def prefixes(server: Server) -> Prefixes:
    return Prefixes(server)


def tip(prompt: list[int]) -> int:
    return block_hashes(prompt, PAGE_TOKENS)[-1]


def ask(server: Server, what: str, prompt: list[int], block: str) -> dict[str, Any]:
    """The router's answer to ``/vertumnus/replicate`` or ``/reclaim``, refusals included."""
    worker = f"{server.get('/vertumnus/pool')['pool_id']}/{block}"
    body = {"tip": str(tip(prompt)), "worker": worker}
    try:
        answer: dict[str, Any] = fetch(f"{server.router_url}/vertumnus/{what}", body)
    except HTTPError as exc:
        return {"outcome": "refused", "reason": exc.read().decode()}
    return answer


def known(server: Server, prompt: list[int], block: str) -> bool:
    """Whether the router knows that the worker has all whole pages of the prompt."""
    explained = fetch(
        f"{server.router_url}/explain",
        {"input_ids": [*prompt, 7], "sampling_params": {"max_new_tokens": 1}},
    )
    found = {
        c["worker"].split("/")[1]: c["cached_tokens"] - c["pull_tokens"]
        for c in explained["candidates"]
    }
    return bool(found[block] >= len(prompt) // PAGE_TOKENS * PAGE_TOKENS)


@pytest.mark.parametrize(("home", "to", "there"), [(0, "1x1", 1), (0, PAIR, 3), (2, "1x1", 1)])
def test_a_prefix_is_copied_between_workers_of_any_degree(
    server: Server, prefixes: Prefixes, home: int, to: str, there: int
) -> None:
    prompt = prompt_of(100 + home + there, 704)
    first = generate(server, prompt[:352], there)
    expected = generate(server, [*prompt, 7], home, logprobs=True)
    until("the router knows", lambda: known(server, prompt, f"{home}x{2 if home == 2 else 1}"))
    done = ask(server, "replicate", prompt, to)
    assert done["outcome"] == "done", done
    assert done["blocks"] == 352 // PAGE_TOKENS
    assert done["bytes"] == 352 * prefixes.token_bytes, "the half that was missing, once"
    copied = generate(server, [*prompt, 7], there, logprobs=True)
    assert cached(copied) == 704 and cached(first) == 0
    assert copied["output_ids"] == expected["output_ids"]
    again = ask(server, "replicate", prompt, to)
    assert again.get("bytes", 0) == 0


def test_tenants_do_not_get_each_others_prefixes(server: Server) -> None:
    prompt = prompt_of(120, 320)
    mine = generate(server, [*prompt, 7], 0, extra_key="mine")
    salted = generate(server, [*prompt, 7], 0, cache_salt="salt")
    refused = ask(server, "replicate", prompt, "1x1")
    assert refused["outcome"] == "refused", "under this hash nobody has it"
    assert cached(generate(server, [*prompt, 7], 1)) == 0
    assert cached(mine) == cached(salted) == 0
    assert cached(generate(server, [*prompt, 7], 1, extra_key="mine")) == 0


def test_a_copy_is_deleted_where_an_operator_says_so(server: Server) -> None:
    prompt = prompt_of(130, 640)
    generate(server, prompt, 0)
    until("the router knows", lambda: known(server, prompt, "0x1"))
    assert ask(server, "replicate", prompt, "1x1")["outcome"] == "done"
    until("the router knows", lambda: known(server, prompt, "1x1"))
    assert ask(server, "reclaim", prompt, "0x1")["outcome"] == "done"
    until("the router knows", lambda: not known(server, prompt, "0x1"))
    assert ask(server, "reclaim", prompt, "0x1")["outcome"] == "refused", "it is gone"
    assert cached(generate(server, prompt, 0)) < 640
    assert cached(generate(server, [*prompt, 7], 1)) == 640


def test_copies_deletions_and_moves_under_memory_pressure_change_no_answer(
    server: Server,
) -> None:
    """Twelve clients ask about documents that do not fit into a rank together."""
    source = random.Random(17)
    documents = [prompt_of(140 + n, 1100) for n in range(10)]
    prompts = [
        source.choice(documents)[: source.choice((320, 700, 1100))] + prompt_of(160 + n, 20)
        for n in range(20)
    ]
    expected = [generate(server, prompt, 0, tokens=12)["output_ids"] for prompt in prompts]
    outcomes: list[str] = []
    with ThreadPoolExecutor(12) as clients:
        answers: list[tuple[int, Future[dict[str, Any]]]] = [
            (n, clients.submit(generate, server, prompts[n], source.randrange(4), tokens=12))
            for _ in range(5)
            for n in range(len(prompts))
        ]
        turn, late_s = 0, time.monotonic() + 180
        # On a slow machine most copies are refused as long as the clients need the memory.
        while not all(one.done() for _, one in answers) or (
            outcomes.count("replicate done") < 5 and time.monotonic() < late_s
        ):
            turn += 1
            if turn % 8 == 0:
                move(server, source.choice(COMPOSITIONS))
                continue
            workers = fetch(f"{server.router_url}/workers")["workers"]
            block = source.choice(workers)["id"].split("/")[1]
            document = source.choice(documents)
            part = document[: source.choice((320, 704, 1088))]
            what = source.choice(("replicate", "replicate", "replicate", "reclaim"))
            outcomes.append(f"{what} {ask(server, what, part, block)['outcome']}")
    for n, one in answers:
        assert one.result()["output_ids"] == expected[n], f"prompt {n}"
    assert outcomes.count("replicate done") >= 5, outcomes
    assert all(load["num_running_reqs"] == 0 for load in server.get("/v1/loads")["loads"])
    idle = [rank["num_used_tokens"] for rank in server.get("/v1/loads?include=core")["loads"]]
    assert idle == [0, 0, 0, 0], "nothing stays pinned or reserved"


def test_a_source_that_dies_costs_the_copy_and_nothing_else(server: Server) -> None:
    """The last test of its module: rank 0 is gone afterwards."""
    move(server, "2x1,1x2")
    until("ready", lambda: len(fetch(f"{server.router_url}/workers")["workers"]) == 3)
    prompts = [prompt_of(180 + n, 1088) for n in range(3)]
    expected = [generate(server, [*prompt, 7], 0)["output_ids"] for prompt in prompts]
    until("the router knows", lambda: known(server, prompts[-1], "0x1"))
    victim = next(rank for rank in server.ranks() if _title(rank).endswith("DP0"))
    with ThreadPoolExecutor(3) as operators:
        asked = [operators.submit(ask, server, "replicate", p, "1x1") for p in prompts]
        os.kill(victim.pid, signal.SIGKILL)
        for one in asked:
            assert one.result(30)["outcome"] in ("done", "failed", "refused")
    for prompt, output in zip(prompts, expected, strict=True):
        assert generate(server, [*prompt, 7], 1)["output_ids"] == output
    assert threading.active_count() < 50


def _title(rank: Any) -> str:
    from sgl_vertumnus import processes

    return processes.title(rank)
