"""``/workers`` as sglang-router has it, what is asked of all servers, and what passes through."""

import asyncio
from typing import Any

import pytest
from vertumnus_router.io.every_server import merged
from vertumnus_router.io.server import listen, serve_metrics

from tests.router.io.fake_decode import paired
from tests.router.io.fake_plain import FakePlain
from tests.router.io.fake_pool import FakePool, refuse, stream_slowly
from tests.router.io.harness import Running, run, running, until
from tests.router.io.test_plain_servers import joined, plain

REMOTE = {"x-forwarded-for": "203.0.113.9"}  # as a proxy on this host tells it


async def ask(
    it: Running, method: str, path: str, status: int = 200, **more: Any
) -> dict[str, Any]:
    async with it.client.request(method, path, **more) as answer:
        assert answer.status == status, await answer.text()
        content = await answer.json()
        assert isinstance(content, dict)
        return content


def test_a_server_joins_and_leaves_by_http() -> None:
    async def scenario() -> None:
        async with FakePlain() as first, FakePlain() as second, plain(first.url) as it:
            await joined(it)
            body = {"url": second.url + "/", "labels": {"rack": "7"}, "priority": 60}
            accepted = await ask(it, "POST", "/workers", 202, json=body)
            assert accepted["status"] == "accepted"
            assert accepted["url"] == second.url
            await joined(it, 2)
            there = await ask(it, "GET", accepted["location"])
            assert there["is_healthy"]
            assert (there["id"], there["url"]) == (accepted["worker_id"], second.url)
            assert (there["priority"], there["metadata"]["rack"]) == (60, "7")
            assert [worker["id"] for worker in there["workers"]] == [f"{second.name}/0x1"]
            assert (await ask(it, "GET", f"/workers/{second.name}/0x1"))["state"] == "serving"
            await ask(it, "PUT", accepted["location"], 202, json={"priority": 70})
            assert (await ask(it, "GET", f"/workers/{second.name}"))["priority"] == 70
            listed = await ask(it, "GET", "/workers")
            assert listed["total"] == 2
            assert listed["stats"] == {"prefill_count": 0, "decode_count": 0, "regular_count": 2}
            second.answer = stream_slowly(1000, 0.02)
            first.answer = refuse(500, {})
            async with await it.chat(stream=True) as answer:
                assert answer.headers["x-vertumnus-worker"].startswith(second.name)
                # By the name of its only worker.
                await ask(it, "DELETE", f"/workers/{second.name}/0x1", 202)
                assert (await ask(it, "GET", accepted["location"]))["state"] == "leaving"
            await until(lambda: len(it.router.pools) == 1, "gone")
            await ask(it, "GET", accepted["location"], 404)
            await ask(it, "DELETE", accepted["location"], 404)

    run(scenario())


def test_a_server_may_be_named_by_its_url() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            assert (await ask(it, "GET", f"/workers/{server.url}"))["url"] == server.url
            await ask(it, "GET", f"/workers/{server.url}//a", 400)
            await ask(it, "DELETE", f"/workers/{server.url}", 202)
            await until(lambda: not it.router.pools, "gone")

    run(scenario())


def test_what_cannot_join_is_refused() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            for body, status in (
                ({}, 422),
                ({"url": "http://a", "worker_type": "other"}, 422),
                ({"url": "a:1"}, 400),
                ({"url": "http://a", "bootstrap_port": 70_000}, 422),
                ({"url": "http://a", "api_key": "k"}, 400),
                ({"url": pool.url, "worker_type": "decode"}, 409),
            ):
                await ask(it, "POST", "/workers", status, json=body)
            await ask(it, "POST", "/workers", 400, data=b"{")
            await ask(it, "POST", "/workers", 202, json={"url": pool.url})  # it is here
            one = await ask(it, "DELETE", "/workers/fake/0x1", 409)
            assert "one of 2 workers" in one["error"]["message"]
            for method, path in (("POST", ""), ("PUT", "/fake"), ("DELETE", "/fake")):
                await ask(it, method, f"/workers{path}", 403, headers=REMOTE, json={})
            assert len(it.router.pools) == 1

    run(scenario())


def test_decode_servers_are_listed_too() -> None:
    async def scenario() -> None:
        async with paired(2) as (_, (decode,), it):
            listed = await ask(it, "GET", "/workers")
            assert listed["stats"] == {"prefill_count": 2, "decode_count": 1, "regular_count": 0}
            there = next(w for w in listed["workers"] if w["worker_type"] == "decode")
            assert there["is_healthy"]
            assert there["url"] == decode.url
            assert (await ask(it, "GET", "/workers/fake"))["worker_type"] == "prefill"
            await ask(it, "DELETE", f"/workers/{there['server_id']}", 202)
            await until(lambda: not it.router.decodes, "gone")

    run(scenario())


def test_loads_metrics_and_flush_of_all() -> None:
    async def scenario() -> None:
        async with (
            FakePlain() as plain_one,
            FakePool(1) as pool,
            running(pool.url, worker_urls=(plain_one.url,)) as it,
        ):
            await joined(it, 2)
            loads = (await ask(it, "GET", "/get_loads"))["workers"]
            assert {one["worker"]: one["load"] for one in loads} == {
                plain_one.url: 17,
                pool.url: -1,
            }
            async with it.client.get("/engine_metrics") as answer:
                text = await answer.text()
            assert f'worker_addr="{plain_one.url}"' in text
            flushed = await ask(it, "POST", "/flush_cache")
            assert flushed["workers_flushed"] == flushed["total_http_workers"] == 2
            assert flushed["status"] == "success"
            await ask(it, "GET", "/health_generate")

    run(scenario())


def test_metrics_of_several_servers_are_one_exposition() -> None:
    one = b'# HELP a:b what\n# TYPE a:b gauge\na:b{x="1"} 1\na:b{} 2\n# TYPE c counter\nc 3\n'
    two = b'# HELP a:b what\n# TYPE a:b gauge\na:b{x="1"} 4\n# TYPE c counter\nc 5 99\n'
    assert merged([("http://p", one), ("http://q", two)]).decode().splitlines() == [
        "# HELP a_b what",
        "# TYPE a_b gauge",
        'a_b{worker_addr="http://p",x="1"} 1',
        'a_b{worker_addr="http://p"} 2',
        'a_b{worker_addr="http://q",x="1"} 4',
        "# TYPE c counter",
        'c{worker_addr="http://p"} 3',
        'c{worker_addr="http://q"} 5 99',
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/rerank", {"query": "hi", "documents": ["a"]}),
        ("/rerank", {"query": "hi", "documents": ["a"]}),
        ("/v1/classify", {"input": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/tokenize", {"prompt": "hi"}),
        ("/v1/detokenize", {"tokens": [1]}),
        ("/v1/score", {}),
    ],
)
def test_endpoints_of_the_engine_pass_through(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            async with it.client.post(path, json=body, headers=REMOTE) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["x-vertumnus-worker"] == f"{server.name}/0x1"
            assert server.asked[-1] == f"POST {path if path != '/rerank' else '/v1/rerank'}"
            await until(it.settled, "settled")

    run(scenario())


def test_unknown_paths_pass_with_method_query_and_body_and_count_as_load() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            async with it.client.put("/echo?a=b%20c", json={"x": 1}) as answer:
                content = await answer.json()
            assert content == {"method": "PUT", "query": "a=b%20c", "body": '{"x": 1}'}
            async with it.client.get("/nowhere") as answer:
                assert answer.status == 404
                await it.error(answer)
            async with it.client.head("/nowhere") as answer:
                assert answer.status == 404
            async with it.client.head("/echo") as answer:
                assert answer.status == 200
                assert int(answer.headers["content-length"]) > 0
            server.other = asyncio.Event()
            waiting = asyncio.ensure_future(it.client.post("/echo", json={}))
            await until(lambda: it.router.core.pending_count == 1, "it counts")
            assert it.router.core.requests_at(it.router.core.pools[0].pool) == 1
            server.other.set()
            (await waiting).release()
            await until(it.settled, "settled")

    run(scenario())


def test_what_must_not_pass_does_not() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            await ask(it, "POST", "/update_weights", 403, headers=REMOTE, json={})
            for path in ("/vertumnus/regroup", "/v1/%2e%2e/update_weights", "/vertumnus/pool"):
                async with it.client.post(path, json={}, headers=REMOTE) as answer:
                    assert answer.status in (403, 404)
                    await it.error(answer)
            assert not server.asked

    run(scenario())


def test_a_command_is_tried_once_and_a_question_again() -> None:
    async def scenario() -> None:
        async with FakePlain() as a, FakePlain() as b, plain(a.url, b.url) as it:
            await joined(it, 2)
            a.status = b.status = 500
            await ask(it, "POST", "/echo", 502, json={})
            assert len(a.asked) + len(b.asked) == 1
            await ask(it, "POST", "/v1/score", 502, json={})
            assert len(a.asked) + len(b.asked) == 3

    run(scenario())


def test_a_client_that_leaves_ends_what_passes_through() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            server.other = asyncio.Event()
            asked = asyncio.ensure_future(it.client.post("/echo", json={}))
            await until(lambda: server.asked, "it is there")
            asked.cancel()
            await until(it.settled, "settled")
            assert not server.aborted, "nobody told the engine an id"

    run(scenario())


def test_with_decode_servers_only_what_does_not_decode_passes() -> None:
    async def scenario() -> None:
        async with paired(1) as (_, _, it):
            refused = await ask(it, "POST", "/v1/responses", 501, json={"input": "hi"})
            assert "/v1/chat/completions" in refused["error"]["message"]
            async with it.client.post("/v1/tokenize", json={"prompt": "hi"}) as answer:
                assert answer.status == 404, "of the fake front"
            assert it.settled()

    run(scenario())


def test_metrics_have_a_port_of_their_own_if_wanted() -> None:
    async def scenario() -> None:
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        over = asyncio.Event()
        async with FakePlain() as server, plain(server.url) as it:
            serving = asyncio.create_task(serve_metrics(it.router, listener, over))
            async with it.client.get(f"{url}/metrics") as answer:
                assert answer.status == 200
                assert "vertumnus_ready" in await answer.text()
            async with it.client.get(f"{url}/workers") as answer:
                assert answer.status == 404
            it.router.metrics.exposition = lambda: b"x" * 2**26  # type: ignore[method-assign]
            # A scraper that does not read does not keep the router from stopping.
            async with it.client.get(f"{url}/metrics"):
                over.set()
                async with asyncio.timeout(5.0):
                    await serving

    run(scenario())


def test_nobody_is_told_the_keys_of_a_server() -> None:
    """SGLang's ``/server_info`` has every argument of its command line, keys included."""

    async def scenario() -> None:
        keys = {"admin_api_key": "sk-control", "ssl_keyfile": None}
        command = "sglang serve --admin-api-key sk-control"
        server = FakePlain(**keys, launch_command=command, internal_states=[{**keys}])
        async with server, plain(server.url) as it:
            await joined(it)
            for path in ("/server_info", "/get_server_info"):
                async with it.client.get(path) as answer:
                    assert answer.status == 200
                    text = await answer.text()
                assert "sk-" not in text
                assert "model_path" in text

    run(scenario())
