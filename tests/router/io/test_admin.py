"""Everything but inference: what operators, clients and benchmarks ask a router."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vertumnus_router.clock import WallClock
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.profile import ErrorSummary, Measurement
from vertumnus_router.io.admin import build_app
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.router import Router
from vertumnus_router.profiles import DEFAULT, load_profile

from tests.router.io import fake_pool
from tests.router.io.chat_cases import SMOL, write_model
from tests.router.io.fake_pool import FakePool, pools
from tests.router.io.harness import Running, run, running, until


def test_models_health_and_readiness() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            async with it.client.get("/v1/models") as response:
                assert response.status == 200
                (card,) = (await response.json())["data"]
            assert card["id"] == "fake-model"
            assert card["max_model_len"] == 4096
            async with it.client.get("/v1/models/fake-model") as response:
                assert (await response.json())["id"] == "fake-model"
            for path in ("/health", "/liveness", "/readiness"):
                async with it.client.get(path) as response:
                    assert response.status == 200, path

    run(scenario())


def test_before_any_pool_the_process_lives_and_is_not_ready() -> None:
    async def scenario() -> None:
        async with running("http://127.0.0.1:1") as it:
            statuses = {}
            for path in ("/health", "/liveness", "/readiness", "/v1/models", "/workers"):
                async with it.client.get(path) as response:
                    statuses[path] = response.status
            assert statuses == {
                "/health": 200,
                "/liveness": 200,
                "/readiness": 503,
                "/v1/models": 503,
                "/workers": 200,
            }
            async with it.client.get("/server_info") as response:
                assert response.status == 503
                await it.error(response)

    run(scenario())


@pytest.mark.parametrize(
    ("composition", "policy", "says"),
    [
        ("1x8", PolicyConfig(), "has no degree 8, only 1, 2, 4"),
        ("1x4", PolicyConfig(expected_manifest="mine"), "runs patches 'same'"),
    ],
)
def test_readiness_says_why_workers_are_refused(
    composition: str, policy: PolicyConfig, says: str
) -> None:
    size = int(composition[2:])

    async def scenario() -> None:
        async with FakePool(size, composition) as pool, running(pool.url, policy=policy) as it:
            await until(lambda: it.router.core.workers(it.router.clock.now()), "reported")
            async with it.client.get("/readiness") as response:
                assert response.status == 503
                none, why = (await response.json())["reasons"]
            assert none == "no worker serves"
            assert why.startswith(f"worker fake/0x{size} is refused: ")
            assert says in why

    run(scenario())


def kv_used(it: Running) -> list[list[int | None]]:
    found = it.router.core.workers(it.router.clock.now())
    return [list(worker.rank_kv_used_tokens) for worker in found]


def test_workers_are_listed_with_what_they_do() -> None:
    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2") as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 3, "all")
            pool.answer = fake_pool.hang
            task = asyncio.create_task(it.chat())
            await until(lambda: pool.running, "running")
            for rank in pool.ranks:
                rank.load = {
                    "running_requests": 10 + rank.index,
                    "waiting_requests": rank.index,
                    "kv_used_tokens": 100 * rank.index,
                }
                rank.beat()
            await until(lambda: kv_used(it) == [[0], [100], [200, 300]], "all loads")
            async with it.client.get("/workers") as response:
                content = await response.json()
            workers = {worker["id"]: worker for worker in content["workers"]}
            assert set(workers) == {"fake/0x1", "fake/1x1", "fake/2x2"}
            assert workers["fake/2x2"]["ranks"] == [2, 3]
            assert workers["fake/2x2"]["degree"] == 2
            assert workers["fake/2x2"]["running_requests"] == 12, "the leader's count"
            assert workers["fake/2x2"]["waiting_requests"] == 2
            assert workers["fake/2x2"]["rank_kv_used_tokens"] == [200, 300]
            assert all(worker["state"] == "serving" for worker in workers.values())
            assert sum(worker["requests"] for worker in workers.values()) == 1
            assert max(worker["queue_s"] for worker in workers.values()) > 0
            assert content["pending"] == 1
            task.cancel()
            await until(it.settled, "settled")

    run(scenario())


def test_explain_says_what_was_never_measured(tmp_path: Path) -> None:
    error = ErrorSummary(mean=0.01, p90=0.02, max=0.03)
    measured = Measurement(uncached_tokens=(2, 100), cached_tokens=(0, 0), samples=9, error=error)
    known = msgspec.structs.replace(load_profile(DEFAULT), measurements={1: measured})
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(known))

    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2") as pool, running(pool.url, profile=str(path)) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 3, "all")
            for tokens, expected in ((50, {1: False, 2: True}), (101, {1: True, 2: True})):
                body = {"input_ids": list(range(tokens))}
                async with it.client.post("/explain", json=body) as response:
                    candidates = (await response.json())["candidates"]
                assert {c["degree"]: c["extrapolated"] for c in candidates} == expected

    run(scenario())


def test_explain_prices_every_worker_and_changes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, SMOL)
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "hello"},
        {"text": "hello"},
        {"input_ids": [1, 2, 3]},
    ]

    async def scenario() -> None:
        fake = FakePool(4, "2x1,1x2", tokenizer_path=str(tmp_path))
        async with fake as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 3, "all")
            for body in bodies:
                async with it.client.post("/explain", json=body) as response:
                    assert response.status == 200
                    answer = await response.json()
                assert answer["exact"]
                assert len(answer["candidates"]) == 3
                assert answer["choice"] == answer["candidates"][0]["worker"]
                for terms in answer["candidates"]:
                    total = (
                        terms["queue_s"]
                        + terms["beta"] * terms["service_s"]
                        + terms["lambda_term_s"]
                    )
                    assert terms["total_s"] == pytest.approx(total)
            assert it.settled()
            assert not pool.seen
            for bad in (b"{}", b"nonsense", b"[]"):
                async with it.client.post("/explain", data=bad) as response:
                    assert response.status == 400
                    await it.error(response)

    run(scenario())


def test_metrics_parse_and_their_labels_are_bounded() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            for number in range(5):
                async with await it.chat(model="fake-model", user=f"user-{number}") as response:
                    await response.read()
            async with await it.chat(model="no-such-model") as response:
                assert response.status == 404
            async with it.client.get("/metrics") as response:
                assert response.headers["content-type"].startswith("text/plain")
                text = await response.text()
            families = {family.name: family for family in text_string_to_metric_families(text)}
            for name in (
                "vertumnus_requests",
                "vertumnus_dispatches",
                "vertumnus_ttft_seconds",
                "vertumnus_queue_seconds",
                "vertumnus_prefill_actual_over_predicted",
                "vertumnus_cached_tokens",
                "vertumnus_queue_length",
                "vertumnus_workers",
                "vertumnus_event_gaps",
                "vertumnus_index_nodes",
                "vertumnus_index_forgotten_blocks",
            ):
                assert name in families, name
            outcomes = {
                sample.labels["outcome"]: sample.value
                for sample in families["vertumnus_requests"].samples
                if sample.name.endswith("_total") and sample.labels["outcome"] != "ok"
            }
            assert outcomes == {"model_not_found": 1}
            assert "no-such-model" not in text
            assert "user-" not in text

    run(scenario())


def test_what_bench_serving_asks_besides_inference() -> None:
    async def scenario() -> None:
        one, two = FakePool(1, pool_id="one"), FakePool(1, pool_id="two")
        async with pools(one, two), running(one.url, two.url) as it:
            await it.ready()
            await until(lambda: all(link.description for link in it.router.pools), "both")
            async with it.client.post("/flush_cache", params={"timeout": 1.0}) as response:
                assert response.status == 200
                assert (await response.text()).count("Done.") == 2
            assert one.commands == two.commands == ["/flush_cache"]
            for path in ("/server_info", "/get_server_info", "/model_info"):
                async with it.client.get(path) as response:
                    if path == "/get_server_info":
                        continue  # the fake front does not have the deprecated name
                    assert response.status == 200
                    assert (await response.json())["path"] == path
            await two.stop_front()
            async with it.client.post("/flush_cache") as response:
                assert response.status in (200, 502)

    run(scenario())


@pytest.mark.parametrize("key", [None, "secret"])
def test_commands_are_for_this_host_and_for_holders_of_the_key(key: str | None) -> None:
    remote = {"x-forwarded-for": "203.0.113.9"}  # as a proxy on this host tells it
    wrong = {**remote, "authorization": "Bearer guess"}
    right = {**remote, "authorization": "Bearer secret"}

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, control_key=key) as it:
            await it.ready()
            for path in ("/flush_cache", "/start_profile", "/stop_profile"):
                for headers in (remote, wrong, right) if key is None else (remote, wrong):
                    async with it.client.post(path, headers=headers) as response:
                        assert response.status == 403
                        error = await it.error(response)
                    assert error["code"] == "operators_only"
                    assert "Authorization: Bearer" in error["message"]
                    assert ("--control-key" in error["message"]) == (key is None)
            assert pool.commands == []
            allowed = [{}] if key is None else [{}, right]
            for headers in allowed:
                async with it.client.get("/flush_cache", headers=headers) as response:
                    assert response.status == 200
                for path in ("/start_profile", "/stop_profile"):
                    async with it.client.get(path, headers=headers) as response:
                        assert response.status == 405
                        await it.error(response)
                    async with it.client.post(path, headers=headers) as response:
                        assert response.status == 200
            assert pool.commands == ["/flush_cache", "/start_profile", "/stop_profile"] * len(
                allowed
            )

    run(scenario())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 503),
        ("127.8.9.1", 503),
        ("::1", 503),
        ("::ffff:127.0.0.1", 503),
        ("10.0.0.7", 403),
        ("::ffff:10.0.0.7", 403),
        ("2001:db8::1", 403),
        ("localhost", 403),
        (None, 403),
    ],
)
def test_which_addresses_are_this_host(host: str | None, status: int) -> None:
    """Those that are get as far as the pools, of which there is none."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/flush_cache",
        "query_string": b"",
        "headers": [],
        "client": None if host is None else (host, 40000),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    router = Router(RouterConfig(pool_urls=("http://127.0.0.1:1",)), WallClock())
    asyncio.run(build_app(router)(scope, receive, send))
    assert sent[0]["status"] == status


def test_the_openai_client_works_unmodified() -> None:
    openai = pytest.importorskip("openai", reason="needs the openai package")

    async def chat_answer(
        pool: FakePool, request: fake_pool.web.Request, seen: fake_pool.Seen
    ) -> fake_pool.web.StreamResponse:
        if json.loads(seen.body).get("stream"):
            return await fake_pool.stream(pool, request, seen)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Paris."},
        }
        return fake_pool.web.json_response(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
            }
        )

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = chat_answer
            messages = [{"role": "user", "content": "capital of France?"}]
            async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none") as client:
                (model,) = (await client.models.list()).data
                assert model.id == "fake-model"
                answer = await client.chat.completions.create(model=model.id, messages=messages)
                assert answer.choices[0].message.content == "Paris."
                streamed = await client.chat.completions.create(
                    model=model.id, messages=messages, stream=True
                )
                texts = [chunk.choices[0].delta.content async for chunk in streamed]
                assert len(texts) == 3
                with pytest.raises(openai.NotFoundError, match="no-such"):
                    await client.chat.completions.create(model="no-such", messages=messages)
                pool.answer = fake_pool.drop_after(fake_pool.sse_chunks(2)[:1])
                broken = await client.chat.completions.create(
                    model=model.id, messages=messages, stream=True
                )
                with pytest.raises(openai.APIError):
                    async for _ in broken:
                        pass
            await until(it.settled, "settled")

    run(scenario())
