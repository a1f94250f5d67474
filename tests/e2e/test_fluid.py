"""A prefill pool with a fluid composition: the router moves real ranks to suit each request."""

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_vertumnus.demo.servers import Server, decode, pool
from tests.e2e.greedy import transformers_output
from tests.e2e.moving import FLAGS, prompt_of
from tests.e2e.routers import until

pytestmark = pytest.mark.usefixtures("transfer_engine")

SERVED = ("--served-model-name", "random")


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    with (
        decode(random_model, flags=(*FLAGS, *SERVED)) as decoder,
        pool(
            random_model,
            size=4,
            degrees=(1, 2, 4),
            composition="fluid",
            flags=(*FLAGS, *SERVED, "--disaggregation-mode", "prefill", "--decode", decoder.url),
        ) as running,
    ):
        yield running


def generate(server: Server, prompt: list[int]) -> tuple[int, ...]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
    return tuple(server.post("/generate", body, router=True)["output_ids"])


def composed(server: Server) -> Any:
    (pool_now,) = server.get("/vertumnus/composition", router=True)["pools"]
    return pool_now


@pytest.fixture(scope="module")
def model(random_model: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        random_model, dtype=torch.float32
    ).eval()
    return loaded


def test_a_long_prompt_gets_a_wider_worker(server: Server, model: torch.nn.Module) -> None:
    assert composed(server)["composition"] == "4x1"
    prompt = prompt_of(1, 1500)
    assert generate(server, prompt) == transformers_output(model, tuple(prompt)).tokens
    after = composed(server)
    assert after["composition"] != "4x1"
    assert after["epoch"] > 0


def test_a_mix_is_answered_as_if_nothing_moved(server: Server, model: torch.nn.Module) -> None:
    lengths = [30, 1200, 60, 400, 1600, 45, 800, 30]
    prompts = [prompt_of(10 + n, length) for n, length in enumerate(lengths)]
    expected = [transformers_output(model, tuple(prompt)).tokens for prompt in prompts]
    with ThreadPoolExecutor(6) as clients:
        for _ in range(2):
            asked = [clients.submit(generate, server, prompt) for prompt in prompts]
            assert [one.result(180) for one in asked] == expected
            # Cached prompts cost next to nothing at any degree.
            with urllib.request.urlopen(f"{server.url}/flush_cache?timeout=30", timeout=60) as done:
                done.read()
    until("nothing is left", lambda: server.get("/workers", router=True)["pending"] == 0)
