"""The endpoint that users see: real model, real clients, real ranks, one router."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.profiles import load_profile

from sgl_vertumnus.demo.servers import Server, pool

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "SmolLM2-135M-Instruct"
PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def server(embedded_model_path: str) -> Iterator[Server]:
    with pool(
        embedded_model_path,
        size=4,
        degrees=(1, 2),
        composition="2x1,1x2",
        flags=(
            *("--served-model-name", MODEL, "--max-total-tokens", "32768"),
            # So that two workers of different degrees say the same.
            *("--dtype", "float32"),
        ),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.router_url}/v1", api_key="none")


def explain(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/explain", body, router=True)
    return answer


def held(terms: dict[str, Any]) -> int:
    """Cached tokens that the worker has without a pull."""
    return int(terms["cached_tokens"] - terms["pull_tokens"])


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, temperature=0
    )
    assert "Paris" in answer.choices[0].message.content
    assert [model.id for model in client.models.list()] == [MODEL]


def test_streaming_says_the_same_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, temperature=0
    )
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert len(pieces) > 2
    assert "".join(filter(None, pieces)) == whole.choices[0].message.content


def test_completions_and_generate(client: openai.OpenAI, server: Server) -> None:
    text = "The capital of France is"
    completion = client.completions.create(model=MODEL, prompt=text, max_tokens=4, temperature=0)
    assert "Paris" in completion.choices[0].text
    sampling = {"max_new_tokens": 4, "temperature": 0}
    native = server.post("/generate", {"text": text, "sampling_params": sampling}, router=True)
    assert native["text"] == completion.choices[0].text
    batch = server.post(
        "/generate", {"text": [text, "One, two,"], "sampling_params": sampling}, router=True
    )
    assert batch[0]["text"] == native["text"]


def test_bench_serving_runs_unmodified(
    server: Server, embedded_model_path: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    subprocess.run(
        [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai"),
            *("--base-url", str(server.router_url), "--dataset-name", "random-ids"),
            *("--num-prompts", "6", "--random-input-len", "48", "--random-output-len", "4"),
            *("--model", MODEL, "--tokenizer", embedded_model_path, "--disable-tqdm"),
            *("--warmup-requests", "1", "--output-file", str(report)),
        ],
        check=True,
        timeout=240,
        capture_output=True,
    )
    result = json.loads(report.read_text().splitlines()[-1])
    assert result["completed"] == 6
    assert result["mean_ttft_ms"] > 0


def test_workers_show_degrees_ranks_and_state(server: Server) -> None:
    workers = server.get("/workers", router=True)["workers"]
    assert sorted((w["degree"], tuple(w["ranks"])) for w in workers) == [
        (1, (0,)),
        (1, (1,)),
        (2, (2, 3)),
    ]
    assert {w["state"] for w in workers} == {"serving"}
    assert {w["epoch"] for w in workers} == {1}
    assert all(w["queue_s"] >= 0 and w["cached_blocks"] >= 0 for w in workers)


def test_the_router_knows_the_blocks_of_a_chat_prompt(server: Server) -> None:
    """Its chat template, tokenizer and hash chain give what the rank's events carry."""
    text = "Tell me about rivers. " * 60
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    request = Request(
        f"{server.router_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=120) as answer:
        worker = answer.headers["x-vertumnus-worker"]
        prompt_tokens = json.loads(answer.read())["usage"]["prompt_tokens"]
    candidates = {c["worker"]: c for c in explain(server, body)["candidates"]}
    expected = (prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert held(candidates[worker]) == expected > 200
    assert all(held(c) < 64 for name, c in candidates.items() if name != worker)
    for terms in candidates.values():
        total = terms["queue_s"] + terms["beta"] * terms["service_s"] + terms["lambda_term_s"]
        assert math.isclose(terms["total_s"], total, rel_tol=1e-6)
        assert math.isclose(terms["lambda_term_s"], terms["lambda"] * terms["extra_gpu_s"])


def test_a_prefix_attracts_and_a_long_queue_repels(server: Server) -> None:
    prefix = [7 * i % 1000 + 40 for i in range(320)]

    def ask(suffix: list[int]) -> tuple[str, int]:
        """The worker, and how many tokens it had cached."""
        body = {
            "input_ids": prefix + suffix,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        request = Request(
            f"{server.router_url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=240) as answer:
            found = json.loads(answer.read())["meta_info"]["cached_tokens"]
            return str(answer.headers["x-vertumnus-worker"]), int(found)

    holder, _ = ask([1])
    # They go to the prefix, or it is copied to where they go: it is never computed again.
    assert [ask([tail])[1] for tail in (2, 3, 4)] == [len(prefix)] * 3
    known = {c["worker"]: held(c) for c in explain(server, {"input_ids": prefix})["candidates"]}
    assert known[holder] == len(prefix) - PAGE_TOKENS
    # Everyone wants the prefix at once: behind a queue it is not worth the wait.
    suffixes = [[(13 * i + 5 * n) % 1000 + 40 for i in range(640)] for n in range(10)]
    with ThreadPoolExecutor(len(suffixes)) as clients:
        crowd = list(clients.map(ask, suffixes))
    assert len({worker for worker, _ in crowd}) > 1, crowd


def test_errors_have_openais_shape(server: Server) -> None:
    def refusal(path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        request = Request(f"{server.router_url}{path}", body, {"Content-Type": "application/json"})
        with pytest.raises(HTTPError) as caught:
            urlopen(request, timeout=60)
        return caught.value.code, json.loads(caught.value.read())["error"]

    chat = "/v1/chat/completions"
    status, error = refusal(chat, b'{"messages": [')
    assert status == 400 and error["type"] == "invalid_request_error"
    status, error = refusal(chat, json.dumps({"model": "gpt-9", "messages": QUESTION}).encode())
    assert (status, error["code"]) == (404, "model_not_found")
    long = json.dumps({"model": MODEL, "prompt": "word " * 9000, "max_tokens": 5}).encode()
    status, error = refusal("/v1/completions", long)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    huge = json.dumps({"model": MODEL, "prompt": "word " * 2_000_000}).encode()
    assert len(huge) > 10_000_000
    status, error = refusal("/v1/completions", huge)
    assert status in (400, 413) and error["message"]
    assert server.get("/readiness", router=True) is not None


def test_metrics_count_what_was_served(server: Server) -> None:
    with urlopen(f"{server.router_url}/metrics", timeout=10) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    served = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if re.search(r"requests?(_total)?$", sample.name)
    ]
    assert sum(served) > 10
    assert any("ttft" in name for name in families)


def test_the_pool_is_profiled_through_its_router_and_put_back(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    before = server.get("/vertumnus/composition")["composition"]
    command = [sys.executable, "-m", "sgl_vertumnus.profile", "--url", str(server.router_url)]
    quick = ("--lengths", "32,128,256", "--cached-tokens", "0,64", "--repetitions", "2")
    subprocess.run([*command, *quick, "--no-kappa", "--out", str(out)], check=True, timeout=240)
    profile = load_profile(str(out))
    assert profile.measured and set(profile.degrees) == {1, 2}
    assert profile.measured_on is not None and "LlamaForCausalLM" in profile.measured_on.model
    for one in profile.measurements.values():
        assert (one.uncached_tokens, one.cached_tokens) == ((32, 256), (0, 64))
        assert one.samples == 12 and one.error.mean < 1.0
    model = PrefillModel(profile)
    for degree in (1, 2):
        assert model.profiled_s(degree, 256, 0) > 1.5 * model.profiled_s(degree, 32, 0) > 0
    assert "the leader's own report" in profile.note
    assert server.get("/vertumnus/composition")["composition"] == before
