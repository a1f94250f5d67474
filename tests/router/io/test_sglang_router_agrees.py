"""Both routers, ours and sglang-router 0.3.2, before the same server: same requests, same answers.

Same means the same status, and every key of their answer in ours. What differs on purpose is in
``WANTED``, with the reason.
"""

import asyncio
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router.io.fake_plain import MODEL, FakePlain
from tests.router.io.fake_pool import _free_ports, drop, refuse
from tests.router.io.harness import run, until
from tests.router.io.test_plain_servers import plain

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None,
    reason="sglang-router is not installed: pip install '.[dev]'",
)

#: It imports SGLang if it can, which takes half a minute and is for its small Python balancer only.
START = """
import sys
sys.modules["sglang"] = None
from sglang_router.launch_router import main
main()
"""
NO_ID = "3d3e0c2c-0b4c-4f3a-9c55-1b1b1b1b1b1b"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
OTHER_MODEL = {**CHAT, "model": "other"}

#: What is asked, in this order: a name, method, path, and the body.
ASKED: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "liveness": ("GET", "/liveness", None),
    "readiness": ("GET", "/readiness", None),
    "health_generate": ("GET", "/health_generate", None),
    "engine_metrics": ("GET", "/engine_metrics", None),
    "models": ("GET", "/v1/models", None),
    "get_model_info": ("GET", "/get_model_info", None),
    "get_server_info": ("GET", "/get_server_info", None),
    "loads": ("GET", "/get_loads", None),
    "workers": ("GET", "/workers", None),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    "chat of nothing": ("POST", "/v1/chat/completions", {**CHAT, "messages": []}),
    "chat with another model": ("POST", "/v1/chat/completions", OTHER_MODEL),
    "chat that is no JSON": ("POST", "/v1/chat/completions", b"{"),
    "chat by GET": ("GET", "/v1/chat/completions", None),
    "completion": ("POST", "/v1/completions", {"model": MODEL, "prompt": "hi"}),
    "generate": ("POST", "/generate", {"text": "hi"}),
    "generate stream": ("POST", "/generate", {"text": "hi", "stream": True}),
    "embeddings": ("POST", "/v1/embeddings", {"model": MODEL, "input": "hi"}),
    "rerank": ("POST", "/v1/rerank", {"model": MODEL, "query": "hi", "documents": ["a"]}),
    "classify": ("POST", "/v1/classify", {"model": MODEL, "input": "hi"}),
    "responses": ("POST", "/v1/responses", {"model": MODEL, "input": "hi"}),
    "tokenize": ("POST", "/v1/tokenize", {"model": MODEL, "prompt": "hi"}),
    "detokenize": ("POST", "/v1/detokenize", {"model": MODEL, "tokens": [1]}),
    "an unknown path": ("POST", "/echo", {}),
    "a path of nobody": ("GET", "/nowhere", None),
    "flush_cache": ("POST", "/flush_cache", None),
    "flush_cache by GET": ("GET", "/flush_cache", None),
    "worker without a URL": ("POST", "/workers", {}),
    "worker at no URL": ("POST", "/workers", {"url": "nonsense"}),
    "a worker that is not there": ("GET", f"/workers/{NO_ID}", None),
    "removal of a worker that is not there": ("DELETE", f"/workers/{NO_ID}", None),
}

#: Where the answers differ: theirs, ours, why. Statuses; 0 stands for other keys.
WANTED: dict[str, tuple[int, int, str]] = {
    "get_server_info": (0, 0, "theirs counts routers and workers; ours is SGLang's own answer, "
                        "which sglang.bench_serving and others read"),
    "chat with another model": (200, 404, "a model that is not served is an error, as for OpenAI"),
    "rerank": (0, 0, "theirs rewrites the answer; ours passes SGLang's on byte for byte"),
    "tokenize": (400, 200, "theirs wants a tokenizer of its own; ours asks a worker"),
    "detokenize": (400, 200, "the same"),
    "an unknown path": (404, 200, "for operators, unknown paths pass through"),
    "flush_cache by GET": (405, 200, "SGLang takes either method, and its clients use both"),
    "worker at no URL": (202, 400, "what cannot become a worker is refused at once"),
    "a worker that is not there": (0, 0, "one shape for all errors; theirs is a string"),
    "removal of a worker that is not there": (0, 0, "the same"),
}  # fmt: skip


@dataclass
class Said:
    status: int
    body: bytes
    stream: bool
    keys: Any = field(default=None)

    def __post_init__(self) -> None:
        with contextlib.suppress(ValueError):
            self.keys = keys_of(json.loads(self.body))


def keys_of(content: Any) -> Any:
    """The keys of a JSON value, at every depth; of a list those of its first."""
    if isinstance(content, dict):
        # How far it is with an addition, theirs tells for a moment only; labels are free.
        shown = {key: inner for key, inner in content.items() if key != "job_status"}
        return {k: None if k == "metadata" else keys_of(v) for k, v in shown.items()}
    if isinstance(content, list):
        return [keys_of(content[0])] if content else []
    return None


def covers(ours: Any, theirs: Any) -> bool:
    """Whether every key of theirs is in ours."""
    if isinstance(theirs, dict):
        return isinstance(ours, dict) and all(
            key in ours and covers(ours[key], inner) for key, inner in theirs.items()
        )
    if isinstance(theirs, list) and theirs:
        return isinstance(ours, list) and bool(ours) and covers(ours[0], theirs[0])
    return True


@contextlib.asynccontextmanager
async def sglang_router(log: Path, *urls: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Theirs, ready, and a client of it."""
    port = _free_ports(2)
    command = [sys.executable, "-c", START, "--worker-urls", *urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    command += ["--prometheus-host", "127.0.0.1", "--disable-retries", "--log-level", "warn"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            async with asyncio.timeout(60):
                while not await is_ready(client):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            yield client
    finally:
        process.terminate()
        await process.wait()


async def is_ready(client: aiohttp.ClientSession) -> bool:
    try:
        async with client.get("/readiness") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def ask(client: aiohttp.ClientSession, method: str, path: str, body: Any) -> Said:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body)
    headers = {"content-type": "application/json"}
    async with client.request(method, path, data=data, headers=headers) as answer:
        kind = answer.headers.get("content-type", "")
        return Said(answer.status, await answer.read(), kind.startswith("text/event-stream"))


def difference(theirs: Said, ours: Said) -> tuple[int, int] | None:
    """Of statuses, or 0, 0 for one of keys; None where ours does."""
    if theirs.status != ours.status:
        return theirs.status, ours.status
    if theirs.stream != ours.stream or (theirs.stream and theirs.body != ours.body):
        return 0, 0
    return None if covers(ours.keys, theirs.keys) else (0, 0)


async def answers_agree(theirs: aiohttp.ClientSession, ours: aiohttp.ClientSession) -> None:
    found = {}
    for name, asked in ASKED.items():
        said = await ask(theirs, *asked), await ask(ours, *asked)
        if (differs := difference(*said)) is not None:
            found[name] = (*differs, *said)
    expected = {name: wanted[:2] for name, wanted in WANTED.items()}
    assert {name: one[:2] for name, one in found.items()} == expected, found


async def failures_agree(
    theirs: aiohttp.ClientSession, ours: aiohttp.ClientSession, server: FakePlain
) -> None:
    """What the engine refuses is passed on; no answer is a fault of the gateway."""
    for status in (400, 404, 422):
        server.answer = refuse(status, {"error": {"message": "no"}})
        for client in (theirs, ours):
            assert (await ask(client, "POST", "/v1/chat/completions", CHAT)).status == status
    server.answer = drop
    for client in (theirs, ours):
        assert (await ask(client, "POST", "/v1/chat/completions", CHAT)).status >= 500


async def life_of_a_worker(client: aiohttp.ClientSession, url: str) -> list[tuple[int, Any]]:
    """As a script leads it: status and keys of every answer."""
    told = []

    async def say(method: str, path: str, body: Any = None) -> Said:
        said = await ask(client, method, path, body)
        told.append((said.status, said.keys))
        return said

    async def state(path: str) -> Any:
        said = await ask(client, "GET", path, None)
        return json.loads(said.body) if said.status == 200 else None

    accepted = json.loads((await say("POST", "/workers", {"url": url})).body)
    where = accepted["location"]
    assert where == f"/workers/{accepted['worker_id']}"
    while not (await state(where))["is_healthy"]:
        await asyncio.sleep(0.05)
    await say("GET", where)
    await say("PUT", where, {"priority": 70})
    while (await state(where))["priority"] != 70:
        await asyncio.sleep(0.05)
    listed = await state("/workers")
    assert url in [worker["url"] for worker in listed["workers"]]
    assert listed["total"] == listed["stats"]["regular_count"] == 2
    await say("DELETE", where)
    while await state(where) is not None:
        await asyncio.sleep(0.05)
    assert (await state("/workers"))["total"] == 1
    return told


def test_the_same_requests_get_the_same_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakePlain() as server,
            FakePlain() as second,
            sglang_router(tmp_path / "log", server.url) as theirs,
            plain(server.url) as it,
        ):
            await it.ready()
            await answers_agree(theirs, it.client)
            their_life = await life_of_a_worker(theirs, second.url)
            our_life = await life_of_a_worker(it.client, second.url)
            for their, our in zip(their_life, our_life, strict=True):
                assert our[0] == their[0]
                assert covers(our[1], their[1]), (our, their)
            await failures_agree(theirs, it.client, server)
            await until(it.settled, "settled")

    run(scenario(), 120.0)
