"""A prefill pool and a decode server of plain SGLang, which fetches KV with Mooncake over TCP.

The pool splits and merges; the decode server is never told.
"""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_vertumnus.demo.servers import decode, pool
from tests.e2e import pairing
from tests.e2e.greedy import Output, assert_equal, transformers_output
from tests.e2e.moving import COMPOSITIONS, FLAGS, PAGE_TOKENS, cached, move, prompt_of
from tests.e2e.pairing import Pair
from tests.e2e.routers import until

LENGTHS = (5, 50, 700, 1500)

pytestmark = pytest.mark.usefixtures("transfer_engine")


@pytest.fixture(scope="module")
def pair(random_model: Path) -> Iterator[Pair]:
    with (
        pool(
            random_model,
            size=4,
            degrees=(1, 2, 4),
            composition="4x1",
            router=False,
            flags=(*FLAGS, *pairing.FLAGS),
        ) as prefill,
        decode(random_model, flags=FLAGS) as decoder,
    ):
        yield Pair(prefill, decoder)


@pytest.fixture(scope="module")
def expected(random_model: Path) -> dict[int, Output]:
    """What transformers says, and colocated SGLang with it (``test_equality``)."""
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()
    return {n: transformers_output(model, tuple(prompt_of(n, n))) for n in LENGTHS}


def test_the_answer_is_the_colocated_one_whatever_the_composition(
    pair: Pair, expected: dict[int, Output]
) -> None:
    registered = pair.registered()
    assert registered[0]["dp_size"] == 4 and registered[0]["attn_cp_size"] == 1
    for number, composition in enumerate(("4x1", "2x2", "1x4", "1x2,2x1", "4x1")):
        move_if_needed(pair, composition)
        for home in range(4):
            for length in LENGTHS:
                legs = pair.begin(prompt_of(length, length), home, return_logprob=True)
                answer = legs.answer()
                hits = (length - 1) // PAGE_TOKENS * PAGE_TOKENS if number else 0
                assert cached(legs.prefill.result()) == hits
                logprobs = answer["meta_info"]["output_token_logprobs"]
                output = Output(tuple(answer["output_ids"]), tuple(one[0] for one in logprobs))
                where = f"{composition}, home {home}, {length} tokens"
                assert_equal(output, expected[length], where)
    assert pair.registered() == registered, "what decode servers have looked up stays true"
    idle(pair)


def idle(pair: Pair) -> None:
    """Nothing runs or waits any more, on either side."""

    def nothing_left() -> bool:
        loads = [
            load for server in (pair.pool, pair.decode) for load in server.get("/v1/loads")["loads"]
        ]
        return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)

    until("both sides are idle", nothing_left)


def test_moves_under_load_are_invisible_to_decode(pair: Pair) -> None:
    """Handshakes, chunked prefills and transfers in every phase, some of them aborted."""
    source = random.Random(5)
    documents = [prompt_of(60 + n, 1100) for n in range(3)]
    prompts = [
        source.choice(documents)[: source.choice((90, 600, 1100))] + prompt_of(80 + n, n % 40 + 3)
        for n in range(24)
    ]
    move_if_needed(pair, "4x1")
    expected = [pair.generate(prompt, n % 4)["output_ids"] for n, prompt in enumerate(prompts)]
    stop = threading.Event()
    outcomes: list[tuple[int, object]] = []

    def client(number: int) -> None:
        chance = random.Random(number)
        while not stop.is_set():
            n = chance.randrange(len(prompts))
            legs = pair.begin(prompts[n], chance.randrange(4))
            if chance.random() < 0.2:
                threading.Event().wait(chance.uniform(0, 0.3))
                outcomes.append((n, aborted(pair, legs)))
            else:
                outcomes.append((n, legs.answer()["output_ids"]))

    with ThreadPoolExecutor(12) as clients:
        running = [clients.submit(client, number) for number in range(12)]
        moves = 0
        while moves < 25:
            composition = source.choice(COMPOSITIONS)
            if composition != pair.pool.get("/vertumnus/composition")["composition"]:
                move(pair.pool, composition)
                moves += 1
            threading.Event().wait(source.uniform(0.05, 0.6))
        stop.set()
        for one in running:
            one.result()
    served = [(n, output) for n, output in outcomes if output is not None]
    assert len(served) > 50
    assert [(n, output) for n, output in served if output != expected[n]] == []
    idle(pair)


def aborted(pair: Pair, legs: pairing.Legs) -> object:
    """End a request: its output if it was faster; both legs end anyhow."""
    both = (legs.prefill, legs.decode)
    deadline_s = time.monotonic() + pairing.TIMEOUT_S
    while True:
        # Told again, as by the router: an engine ignores an abort that overtakes its request.
        pair.abort(legs.rid)
        if not wait(both, timeout=0.5).not_done:
            break
        assert time.monotonic() < deadline_s, f"{legs.rid} was aborted and does not end"
    try:
        return legs.answer()["output_ids"]
    except (HTTPError, AssertionError):
        return None


def move_if_needed(pair: Pair, composition: str) -> None:
    if pair.pool.get("/vertumnus/composition")["composition"] != composition:
        move(pair.pool, composition)
