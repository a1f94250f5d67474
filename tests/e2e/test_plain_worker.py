"""A real server of plain SGLang, without the plugin, as a worker of the router."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from vertumnus_router.io.servers import server_id

from sgl_vertumnus.demo.servers import Server, fetch, plain
from tests.e2e.moving import prompt_of
from tests.e2e.routers import router_of, until

FLAGS = ("--max-total-tokens", "8192", "--chunked-prefill-size", "256", "--enable-cache-report")
TOKENS = 8
QUESTION = [{"role": "user", "content": "What is the capital of France? " * 8}]


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    with plain(random_model, flags=FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with router_of("--worker-urls", server.url) as (url, _):
        yield url


def the_worker(url: str) -> dict[str, Any]:
    (worker,) = fetch(f"{url}/workers")["workers"]
    return dict(worker)


def generate(url: str, prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = fetch(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling})
    return dict(answer)


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": QUESTION,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def test_it_joins_as_a_worker_of_its_own_degree(server: Server, url: str) -> None:
    worker = the_worker(url)
    assert (worker["degree"], worker["ranks"], worker["state"]) == (1, [0], "serving")
    assert worker["url"] == server.url
    assert worker["worker_type"] == "regular"
    (pool,) = fetch(f"{url}/vertumnus/composition")["pools"]
    assert pool["composition"] == "1x1" and pool["trouble"] is None


def test_it_says_the_same_behind_the_router(server: Server, url: str) -> None:
    prompt = prompt_of(1, 300)
    direct, routed = generate(server.url, prompt), generate(url, prompt)
    assert routed["output_ids"] == direct["output_ids"]
    assert len(routed["output_ids"]) == TOKENS
    assert routed["meta_info"]["prompt_tokens"] == 300
    # All whole pages but that of the last token, which is computed for its logits.
    assert routed["meta_info"]["cached_tokens"] == 288


def test_it_streams_and_tells_what_was_cached(server: Server, url: str) -> None:
    whole = fetch(f"{url}/v1/chat/completions", chat())
    body = chat(stream=True, stream_options={"include_usage": True})
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-vertumnus-worker"] == the_worker(url)["id"]
        lines = [line.strip() for line in answer if line.strip()]
    assert lines[-1] == b"data: [DONE]"
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    said = [choice["delta"].get("content") or "" for one in events for choice in one["choices"]]
    assert "".join(said) == whole["choices"][0]["message"]["content"]
    assert sum(bool(piece) for piece in said) > 1
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16


def test_the_router_tells_its_load_and_its_metrics(server: Server, url: str) -> None:
    assert fetch(f"{url}/get_loads") == {"workers": [{"worker": server.url, "load": 0}]}
    assert fetch(f"{url}/server_info")["max_total_num_tokens"] == 8192
    assert fetch(f"{url}/v1/tokenize", {"prompt": "hello"})["count"] > 0
    assert fetch(f"{url}/flush_cache", {})["workers_flushed"] == 1
    assert generate(url, prompt_of(1, 300))["meta_info"]["cached_tokens"] == 0


def test_what_it_refuses_is_told_to_the_client(url: str) -> None:
    with pytest.raises(HTTPError) as refused:
        fetch(f"{url}/v1/chat/completions", chat(temperature=-1))
    assert refused.value.code == 400
    assert "temperature" in json.load(refused.value)["error"]["message"]
    assert the_worker(url)["breaker"] == "closed"


def test_it_leaves_and_comes_back(server: Server, url: str) -> None:
    name = server_id(server.url)
    leave = urllib.request.Request(f"{url}/workers/{name}", method="DELETE")
    with urllib.request.urlopen(leave, timeout=30) as answer:
        assert answer.status == 202
    until("it has left", lambda: fetch(f"{url}/workers")["total"] == 0)
    with pytest.raises(HTTPError) as refused:
        generate(url, prompt_of(2, 64))
    assert refused.value.code == 503
    assert json.load(refused.value)["error"]["code"] == "no_pool"

    told = fetch(f"{url}/workers", {"url": server.url})
    assert told["location"] == f"/workers/{name}"
    until("it is back", lambda: fetch(f"{url}/workers")["total"] == 1)
    until("it serves", lambda: the_worker(url)["state"] == "serving")
    prompt = prompt_of(2, 64)
    assert generate(url, prompt)["output_ids"] == generate(server.url, prompt)["output_ids"]
