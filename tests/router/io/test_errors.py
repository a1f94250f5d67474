"""What a client gets for what cannot be served: always a clear error, never a crash."""

import asyncio
import json
import random
from typing import Any

import pytest
from vertumnus_router.core.config import LateConfig, PolicyConfig
from vertumnus_router.io.config import Limits

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running, until

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, b"{not json", 400, "invalid_json"),
        (CHAT, b"", 400, "invalid_json"),
        (CHAT, b"[1, 2]", 400, "invalid_json"),
        (CHAT, b'"text"', 400, "invalid_json"),
        (CHAT, b'{"messages": "\xff"}', 400, "invalid_json"),
        (CHAT, b"[" * 100_000, 400, "invalid_json"),
        (CHAT, b"{}", 400, "missing_messages"),
        (CHAT, b'{"messages": []}', 400, "missing_messages"),
        (CHAT, b'{"messages": 7}', 400, "missing_messages"),
        ("/v1/completions", b'{"prompt": 7}', 400, "missing_prompt"),
        ("/generate", b'{"texts": "x"}', 400, "missing_prompt"),
        (CHAT, b'{"model": "other", "messages": [{}]}', 404, "model_not_found"),
        ("/v1/completions", b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    path: str, body: bytes, status: int, code: str
) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            async with it.client.post(path, data=body, headers=JSON) as response:
                assert response.status == status
                error = await it.error(response)
            assert error["code"] == code
            assert error["type"] == "invalid_request_error"
            assert not pool.seen
            async with await it.chat() as response:
                assert response.status == 200, "the router lives"

    run(scenario())


def test_the_wrong_method_and_an_unknown_path_are_errors_of_the_same_shape() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            async with it.client.get(CHAT) as response:
                assert response.status == 405
                await it.error(response)
            for path in ("/v1/nothing", "/", "/v1/models/other"):
                async with it.client.get(path) as response:
                    assert response.status == 404
                    await it.error(response)

    run(scenario())


def test_the_models_own_names_are_accepted() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for name in ("fake-model", "/models/fake", "default", "fake-model:adapter", None):
                async with await it.chat(model=name) as response:
                    assert response.status == 200, name

    run(scenario())


def test_a_body_of_10_mb_is_served() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            text = "word " * 2_000_000
            async with await it.chat(messages=[{"role": "user", "content": text}]) as response:
                assert response.status == 200
            assert len(json.loads(pool.seen[0].body)["messages"][0]["content"]) == len(text)
            await until(it.settled, "settled")

    run(scenario())


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_over_the_limit_is_refused_and_not_read(chunked: bool) -> None:
    async def scenario() -> None:
        limits = Limits(body_bytes=100_000, stop_s=1.0)
        async with FakePool(1) as pool, running(pool.url, limits=limits) as it:
            await it.ready()
            body = json.dumps({"messages": [{"role": "user", "content": "x" * 200_000}]}).encode()

            async def pieces() -> Any:
                for at in range(0, len(body), 10_000):
                    yield body[at : at + 10_000]

            data = pieces() if chunked else body
            async with it.client.post(CHAT, data=data, headers=JSON) as response:
                assert response.status == 413
                error = await it.error(response)
            assert error["code"] == "body_too_large"
            assert "100000 bytes" in error["message"]
            assert not pool.seen

    run(scenario())


def test_a_full_queue_asks_the_client_to_come_back() -> None:
    policy = PolicyConfig(policy="late", queue_limit=2, late=LateConfig(window=1))

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, policy=policy) as it:
            await it.ready()
            pool.answer = fake_pool.hang
            long = [{"role": "user", "content": "word " * 2500}]
            tasks = [asyncio.create_task(it.chat(messages=long)) for _ in range(10)]
            done, waiting = await asyncio.wait(tasks, timeout=1.0)
            assert done
            assert waiting
            for task in done:
                async with task.result() as response:
                    assert response.status == 429
                    assert 1 <= int(response.headers["retry-after"]) <= 60
                    error = await it.error(response)
                    assert error["code"] == "queue_full"
                    assert error["type"] == "rate_limit_error"
            for task in waiting:
                task.cancel()
            await until(it.settled, "settled")

    run(scenario())


def test_no_worker_that_serves_is_503_after_the_queue_timeout() -> None:
    policy = PolicyConfig(queue_timeout_s=0.3)

    async def scenario() -> None:
        async with FakePool(1) as pool:
            pool.beating = False
            async with running(pool.url, policy=policy) as it:
                await until(lambda: it.router.pools[0].description is not None, "joined")
                async with await it.chat() as response:
                    assert response.status == 503
                    error = await it.error(response)
                assert error["code"] == "no_worker"
                assert not pool.seen
                await until(it.settled, "settled")

    run(scenario())


def test_garbage_never_kills_the_router() -> None:
    """Valid JSON of every wrong shape, and bytes that are no JSON."""
    seed = random.Random(11)
    atoms: list[Any] = [
        None,
        True,
        -1,
        1e300,
        "",
        "x",
        [],
        {},
        [[]],
        [None],
        [{}],
        {"a": []},
        2**70,
    ]
    fields = [
        "model",
        "messages",
        "prompt",
        "text",
        "input_ids",
        "stream",
        "max_tokens",
        "n",
        "tools",
        "tool_choice",
        "sampling_params",
        "priority",
        "cache_salt",
        "chat_template_kwargs",
        "reasoning_effort",
    ]

    def body() -> bytes:
        if seed.random() < 0.2:
            return bytes(seed.randrange(256) for _ in range(seed.randrange(100)))
        chosen = {name: seed.choice(atoms) for name in seed.sample(fields, 5)}
        if seed.random() < 0.7:
            chosen["messages"] = [
                {"role": seed.choice(["user", "assistant", 7, None]), "content": seed.choice(atoms)}
            ]
            chosen["model"] = "default"
        return json.dumps(chosen).encode()

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for number in range(150):
                path = seed.choice([CHAT, "/v1/completions", "/generate", "/explain"])
                data = body()
                async with it.client.post(path, data=data, headers=JSON) as response:
                    assert response.status in (200, 400, 404), (number, path, data)
                    if response.status != 200:
                        await it.error(response)
            await until(it.settled, "settled")

    run(scenario())


def test_bytes_that_are_not_http_only_cost_their_connection() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            host, port = it.url.removeprefix("http://").split(":")
            for junk in (b"\x00\xff\xfe garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(junk)
                writer.write_eof()
                await reader.read()
                writer.close()
            async with await it.chat() as response:
                assert response.status == 200

    run(scenario())


def test_a_fault_of_the_router_itself_is_answered_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            monkeypatch.setattr(it.router, "front", lambda pool: 1 / 0)
            async with await it.chat() as response:
                assert response.status == 500
                error = await it.error(response)
            assert error["code"] == "internal_error"
            assert it.settled()
            monkeypatch.setattr(it.router.model, "output_tokens", lambda asked, tokens: 1 / 0)
            async with await it.chat() as response:
                assert response.status == 500
                await it.error(response)
            monkeypatch.undo()
            async with await it.chat() as response:
                assert response.status == 200

    run(scenario())
