"""Moving a real pool, and asking it things meanwhile."""

import json
import random
import re
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sgl_vertumnus.demo.servers import Server

PAGE_TOKENS = 16
FLAGS = (
    *("--chunked-prefill-size", "256", "--max-total-tokens", "32768", "--dtype", "float32"),
    *("--page-size", str(PAGE_TOKENS)),
)
COMPOSITIONS = ("4x1", "2x2", "1x4", "2x1,1x2", "1x2,2x1")
MAX_LOGPROB_DIFFERENCE = 1e-4
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "sizes": {"type": "array"}},
        "required": ["name", "sizes"],
    }
)
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}


def move(server: Server, composition: str) -> dict[str, Any]:
    report: dict[str, Any] = server.post("/vertumnus/regroup", {"composition": composition})
    assert report["outcome"] == "committed", report
    return report


def prompt_of(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(5, 250) for _ in range(tokens)]


def body(prompt: Sequence[int], home: int, tokens: int = 8, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {
        "input_ids": list(prompt),
        "sampling_params": sampling | more.pop("sampling", {}),
        "routed_dp_rank": home,
        **more,
    }


def generate(server: Server, prompt: Sequence[int], home: int, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/generate", body(prompt, home, **more))
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def stream(server: Server, request: dict[str, Any], begun: threading.Event) -> dict[str, Any]:
    """The last event of a stream; each one must go on where the one before ended."""
    http = urllib.request.Request(
        f"{server.url}/generate",
        json.dumps(request | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    last: dict[str, Any] = {}
    with urllib.request.urlopen(http, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if last:  # by the second token the first step has been logged
                    begun.set()
                before = last.get("output_ids", [])
                assert len(event["output_ids"]) == event["meta_info"]["completion_tokens"]
                assert len(event["output_ids"]) > len(before)
                assert event["output_ids"][: len(before)] == before
                last = event
    return last


def flush(server: Server) -> None:
    """Its answer is text."""
    with urllib.request.urlopen(f"{server.url}/flush_cache", b"", 30) as answer:
        assert b"flushed" in answer.read()


class Computed:
    """New tokens that a rank has prefilled since this was made, by its log."""

    def __init__(self, server: Server, rank: int) -> None:
        self._log = server.log
        self._offset = server.log.stat().st_size
        self._line = re.compile(rf"DP{rank}\] Prefill batch, .*?#new-token: (\d+),")

    def tokens(self) -> int:
        text = self._log.read_bytes()[self._offset :].decode(errors="replace")
        return sum(map(int, self._line.findall(text)))


def move_at_random_under_load(server: Server) -> None:
    """Streams with log-probabilities, penalties and grammars, long prompts in chunks, shared
    prefixes; against the same requests on one rank that nobody disturbs."""
    source = random.Random(3)
    documents = [prompt_of(20 + n, 1100) for n in range(3)]
    kinds: list[dict[str, Any]] = [
        {},
        {"return_logprob": True, "logprob_start_len": -1},
        {"return_logprob": True, "logprob_start_len": 0},
        {"sampling": PENALTIES},
        {"sampling": {"json_schema": SCHEMA}},
        {"sampling": {"regex": "[a-z ]{40}"}},
    ]
    requests = []
    for n in range(18):
        prompt = source.choice(documents)[: source.choice((90, 600, 1100))]
        prompt = prompt + prompt_of(40 + n, source.choice((3, 40, 300)))
        requests.append(body(prompt, n % 4, tokens=32, **kinds[n % len(kinds)]))
    move(server, "4x1")
    expected = [server.post("/generate", request | {"routed_dp_rank": 0}) for request in requests]
    flush(server)
    with ThreadPoolExecutor(12) as clients:
        streams: list[tuple[int, Future[dict[str, Any]]]] = [
            (n, clients.submit(stream, server, requests[n], threading.Event()))
            for _ in range(4)
            for n in range(len(requests))
        ]
        moves = 0
        while not all(one.done() for _, one in streams):
            move(server, source.choice(COMPOSITIONS))
            moves += 1
            threading.Event().wait(source.uniform(0.05, 0.4))  # let some steps pass
    assert moves >= 10
    for n, one in streams:
        assert_same(one.result(), expected[n], f"request {n}")
    assert all(load["num_running_reqs"] == 0 for load in server.get("/v1/loads")["loads"])


def assert_same(actual: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert actual["output_ids"] == expected["output_ids"], what
    for key in ("output_token_logprobs", "input_token_logprobs"):
        ours, theirs = (one["meta_info"].get(key) or [] for one in (actual, expected))
        assert [token for _, token, *_ in ours] == [token for _, token, *_ in theirs], what
        for (a, *_), (b, *_) in zip(ours, theirs, strict=True):
            assert a == b or abs(a - b) <= MAX_LOGPROB_DIFFERENCE, (what, key)
