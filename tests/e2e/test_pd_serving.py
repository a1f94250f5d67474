"""A prefill pool and a decode server behind the router: what users see, and what breaks."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl_vertumnus.demo.servers import Server, decode, fetch, pool
from sgl_vertumnus.ports import free_range
from sgl_vertumnus.processes import title
from tests.e2e.greedy import transformers_output
from tests.e2e.moving import prompt_of
from tests.e2e.routers import until

pytestmark = pytest.mark.usefixtures("transfer_engine")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "SmolLM2-135M-Instruct"
#: Other than in the tests of the pair alone.
PAGE_TOKENS = 64
FLAGS = (
    *("--served-model-name", MODEL, "--max-total-tokens", "32768", "--dtype", "float32"),
    *("--page-size", str(PAGE_TOKENS), "--chunked-prefill-size", "256"),
)
#: After a decode server has died, or a client has left.
NOTICE_S = 5.0


class Decoder:
    """The decode server, on one port all its lives."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._port = free_range("127.0.0.1", 1, start=31900)
        self._life = ExitStack()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = self._life.enter_context(decode(self._model, port=self._port, flags=FLAGS))

    def kill(self) -> None:
        for process in self._server.family:
            os.kill(process.pid, signal.SIGKILL)
        self._life.close()

    def stop(self) -> None:
        self._life.close()


@pytest.fixture(scope="module")
def decoder(embedded_model_path: str) -> Iterator[Decoder]:
    server = Decoder(embedded_model_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server(embedded_model_path: str, decoder: Decoder) -> Iterator[Server]:
    with pool(
        embedded_model_path,
        size=2,
        degrees=(1, 2),
        composition="2x1",
        flags=(
            *(*FLAGS, "--disaggregation-mode", "prefill", "--decode", decoder.url),
            # Longer than a decode server takes to start.
            *("--queue-timeout-s", "150"),
        ),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.router_url}/v1", api_key="none", max_retries=0)


def generate(server: Server, prompt: list[int], tokens: int = 8, **more: Any) -> Any:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling} | more
    return server.post("/generate", body, router=True)


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(messages=QUESTION, **asked)
    assert "Paris" in whole.choices[0].message.content
    stream = client.chat.completions.create(messages=QUESTION, stream=True, **asked)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert len(pieces) > 2
    assert "".join(filter(None, pieces)) == whole.choices[0].message.content
    said = client.completions.create(prompt="The capital of France is", logprobs=1, **asked)
    assert "Paris" in said.choices[0].text
    assert len(said.choices[0].logprobs.token_logprobs) == 16


def test_batches_and_logprobs_of_the_prompt(server: Server, embedded_model_path: str) -> None:
    prompts = [prompt_of(1, 40), prompt_of(2, 600)]
    alone = [generate(server, p, return_logprob=True, logprob_start_len=0) for p in prompts]
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, alone, strict=True):
        assert tuple(answer["output_ids"]) == transformers_output(model, tuple(prompt)).tokens
        told = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, *_ in told] == prompt
        assert all(value < 0 for value, *_ in told[1:])
        assert len(answer["meta_info"]["output_token_logprobs"]) == 8
    batch = generate(server, prompts)  # type: ignore[arg-type]
    assert [one["output_ids"] for one in batch] == [one["output_ids"] for one in alone]


def test_the_time_to_the_first_token_is_told_in_parts(server: Server) -> None:
    generate(server, prompt_of(3, 700))
    told = server.post("/explain", {"input_ids": prompt_of(3, 700)}, router=True)
    parts = told["ttft"]["mean_s"]
    assert set(parts) == {"queue", "pull", "prefill", "transfer", "first_decode"}
    assert parts["prefill"] > parts["queue"] >= 0 == parts["pull"]
    workers = server.get("/workers", router=True)["workers"]
    assert sorted(w["worker_type"] for w in workers) == ["decode", "prefill", "prefill"]


def test_the_pool_moves_while_it_is_asked(server: Server, decoder: Decoder) -> None:
    prompts = [prompt_of(10 + n, 200 + 40 * n) for n in range(6)]
    expected = [generate(server, prompt)["output_ids"] for prompt in prompts]
    stop = threading.Event()

    def ask(n: int) -> int:
        count = 0
        while not stop.is_set():
            assert generate(server, prompts[n])["output_ids"] == expected[n]
            count += 1
        return count

    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(ask, n) for n in range(6)]
        for composition in ("1x2", "2x1", "1x2", "2x1"):
            command = {"composition": composition}
            told = server.post("/vertumnus/reconfigure", command, router=True)
            assert [move["outcome"] for move in told["moves"]] == ["committed"]
            stop.wait(1.0)
        stop.set()
        assert all(one.result(60) for one in asked)
    nothing_is_left(server, decoder)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.6])
def test_a_client_that_leaves_is_forgotten_on_both_sides(
    server: Server, decoder: Decoder, after_s: float
) -> None:
    router = urlsplit(str(server.router_url))
    connection = HTTPConnection(str(router.hostname), router.port, timeout=30)
    sampling = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt_of(30, 900), "sampling_params": sampling, "stream": True}
    connection.request("POST", "/generate", json.dumps(body))
    time.sleep(after_s)
    connection.close()
    nothing_is_left(server, decoder)


def nothing_is_left(server: Server, decoder: Decoder) -> None:
    def idle() -> bool:
        sides = [fetch(f"{url}/v1/loads")["loads"] for url in (server.url, decoder.url)]
        loads = [load for side in sides for load in side]
        return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)

    until("both sides are idle", idle, NOTICE_S)
    assert server.get("/workers", router=True)["pending"] == 0


def test_a_decode_server_that_dies_and_comes_back(server: Server, decoder: Decoder) -> None:
    """Nothing has been sent to the clients: their requests wait for the server, and are served."""
    prompts = [prompt_of(40 + n, 100) for n in range(4)]
    expected = [generate(server, prompt, 48)["output_ids"] for prompt in prompts]
    outcomes: list[object] = []

    def ask(n: int) -> None:
        try:
            outcomes.append(generate(server, prompts[n % 4], 48)["output_ids"] == expected[n % 4])
        except HTTPError as exc:
            outcomes.append((exc.code, exc.read()))

    askers = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for asker in askers:
        asker.start()
    until("they are being decoded", lambda: decoding(decoder) > 0)
    decoder.kill()
    until("the router knows", lambda: not ready(server), NOTICE_S)
    decoder.start()
    until("it is found again", lambda: ready(server))
    for asker in askers:
        asker.join(60)
    assert outcomes == [True] * 8
    assert generate(server, prompts[0], 48)["output_ids"] == expected[0]
    nothing_is_left(server, decoder)


def decoding(decoder: Decoder) -> int:
    return sum(load["num_running_reqs"] for load in fetch(f"{decoder.url}/v1/loads")["loads"])


def ready(server: Server) -> bool:
    try:
        fetch(f"{server.router_url}/readiness", timeout_s=5)
    except HTTPError:
        return False
    return True


def test_a_rank_that_dies_takes_no_request_along(server: Server, decoder: Decoder) -> None:
    """Nothing has been streamed: each is prefilled again by the other rank. The last test: the
    rank does not come back."""
    prompts = [prompt_of(60 + n, 900) for n in range(6)]
    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(generate, server, prompt) for prompt in prompts]
        until("both ranks are busy", lambda: all(w["requests"] for w in prefilling(server)))
        os.kill(next(p.pid for p in server.ranks() if title(p).endswith("1")), signal.SIGKILL)
        answers = [one.result(60) for one in asked]
    assert all(len(answer["output_ids"]) == 8 for answer in answers)
    assert [w["state"] for w in prefilling(server) if w["ranks"] == [0]] == ["serving"]
    until("both sides are idle", lambda: decoding(decoder) == 0, NOTICE_S)


def prefilling(server: Server) -> list[dict[str, Any]]:
    workers = server.get("/workers", router=True)["workers"]
    return [worker for worker in workers if worker["worker_type"] == "prefill"]
