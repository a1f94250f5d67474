"""The router's OpenAPI document: all that is served is in it, and what is in it holds."""

import asyncio
import json
from typing import Any

import jsonschema_rs
import pytest
from fastapi.routing import APIRoute
from vertumnus_router.clock import WallClock
from vertumnus_router.io.access import Level, level
from vertumnus_router.io.admin import _admin
from vertumnus_router.io.client_request import Endpoint
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.hot_path import _METHODS
from vertumnus_router.io.keys import ApiKey
from vertumnus_router.io.openapi.document import document
from vertumnus_router.io.openapi.operations import CODES, OPERATIONS
from vertumnus_router.io.passthrough import ALIASES, DECODES, REPEATABLE
from vertumnus_router.io.router import Router

from tests.router.io.fake_plain import FakePlain
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import Running, run, running, until

DOCUMENT = document()
#: Where the path of an operation leads in these tests.
NAMES = {"{model}": "fake-model", "{name}": "index.html"}


def described() -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, those in DOCUMENT["paths"].items() for method in those}


def test_every_route_is_described_and_nothing_else() -> None:
    router = Router(RouterConfig(pool_urls=("http://127.0.0.1:1",)), WallClock())
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in _admin(router).routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    assert ("GET", "/workers") in routes
    hot = {(method, one.value) for one in Endpoint for method in _METHODS[one]}
    passed_on = {("POST", path) for path in (*REPEATABLE, *ALIASES, *DECODES)}
    assert described() == routes | hot | passed_on


def test_the_document_is_openapi() -> None:
    text = json.dumps(DOCUMENT)
    for name in {part.split('"')[0] for part in text.split('"$ref": "#/components/')[1:]}:
        kind, _, one = name.partition("/")
        assert one in DOCUMENT["components"][kind], name
    ids = [one["operationId"] for those in DOCUMENT["paths"].values() for one in those.values()]
    assert len(ids) == len(set(ids))
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": DIALECT, **schema})


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("one", OPERATIONS, ids=lambda one: one.id)
def test_an_operation_says_who_may_and_gives_valid_examples(one: Any) -> None:
    told = DOCUMENT["paths"][one.path][one.method.lower()]
    access = level(one.method, one.path)
    without_key = {Level.OPEN: set(), Level.DATA: {"401"}, Level.OPERATOR: {"403"}}[access]
    assert without_key <= set(told["responses"])
    assert bool(told["security"]) == (access is not Level.OPEN)
    content = told.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" in content:
        assert validator(content["schema"]).is_valid(content["example"])
    for status, response in told["responses"].items():
        assert "$ref" in response or response["description"]
        if status.isdigit() and int(status) in CODES and "$ref" not in response:
            shown = response["content"]["application/json"]
            assert "example" not in shown or validator(shown["schema"]).is_valid(shown["example"])


async def ask(it: Running, one: Any) -> tuple[int, str, bytes]:
    told = DOCUMENT["paths"][one.path][one.method.lower()]
    path = one.path
    if path.startswith("/workers/"):
        path = path.replace("{name}", it.router.pools[0].url)
    for name, value in NAMES.items():
        path = path.replace(name, value)
    content = told.get("requestBody", {}).get("content", {}).get("application/json")
    body = None if content is None else content.get("example", {"input": "x"})
    async with it.client.request(one.method, path, json=body) as answer:
        return answer.status, answer.content_type, await answer.read()


def conforms(one: Any, status: int, kind: str, body: bytes) -> None:
    """The answer is one of those that the document has for the operation."""
    responses = DOCUMENT["paths"][one.path][one.method.lower()]["responses"]
    family = f"{status // 100}XX"
    name = next((key for key in (str(status), family, "default") if key in responses), None)
    assert name is not None, (one.id, status, body)
    response = responses[name]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    if "content" in response:
        assert kind in response["content"], (one.id, status, kind)
        schema = response["content"][kind].get("schema", {})
        if kind == "application/json":
            found = [str(error) for error in validator(schema).iter_errors(json.loads(body))]
            assert not found, (one.id, status, found)


def test_everything_described_is_served_and_answers_as_described() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, running(worker_urls=(server.url,)) as it:
            await it.ready()
            # A server that leaves answers nothing any more.
            for one in sorted(OPERATIONS, key=lambda one: one.method == "DELETE"):
                before = len(server.asked)
                status, kind, body = await ask(it, one)
                conforms(one, status, kind, body)
                if one.tag == "passed on":
                    assert server.asked[before:], f"{one.id} has not gone to the server"
                elif one.path not in NOT_OF_PLAIN:
                    assert status < 300, (one.id, status, body)
            await until(it.settled, "settled")

    run(scenario())


#: Plain SGLang cannot be told these, or has no such path in the fake.
NOT_OF_PLAIN = (
    *("/vertumnus/reconfigure", "/vertumnus/replicate", "/vertumnus/reclaim"),
    *("/start_profile", "/stop_profile", "/get_server_info"),
)


def test_every_kind_of_prompt_that_is_described_can_be_explained() -> None:
    bodies = ({"text": "x"}, {"input_ids": [1, 2]}, {"input_embeds": [[0.5, 0.5]]})

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for body in bodies:
                async with it.client.post("/explain", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    assert (await answer.json())["endpoint"] == "/generate"

    run(scenario())


def test_a_router_without_servers_answers_as_described() -> None:
    async def scenario() -> None:
        async with running("http://127.0.0.1:1") as it:
            for one in OPERATIONS:
                if one.forwarded:
                    continue  # it waits for a worker; the next test has what is said then
                conforms(one, *await ask(it, one))

    run(scenario())


def test_who_has_no_key_is_told_so_as_described() -> None:
    async def scenario() -> None:
        keys = {"api_keys": (ApiKey("a", "secret-a"),), "control_key": "secret-b"}
        async with FakePool(1) as pool, running(pool.url, **keys) as it:
            for one in OPERATIONS:
                found = await ask(it, one)
                conforms(one, *found)
                wanted = {Level.DATA: 401, Level.OPERATOR: 403}.get(level(one.method, one.path))
                assert wanted is None or found[0] == wanted, one.id
            for key, status in (("wrong", 401), ("secret-a", 200), ("secret-b", 200)):
                headers = {"authorization": f"Bearer {key}"}
                async with it.client.get("/openapi.json", headers=headers) as answer:
                    assert answer.status == status
                    assert status != 200 or await answer.json() == DOCUMENT

    run(scenario())


def test_a_method_that_a_path_does_not_take_is_told_which_it_takes() -> None:
    cases = {
        ("DELETE", "/workers"): "GET, HEAD, POST",
        ("PATCH", "/workers/x"): "DELETE, GET, HEAD, PUT",
        ("DELETE", "/flush_cache"): "GET, POST",
        ("GET", "/generate"): "POST, PUT",
        ("GET", "/v1/completions"): "POST",
    }

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            for (method, path), taken in cases.items():
                async with it.client.request(method, path) as answer:
                    assert answer.status == 405
                    assert answer.headers["allow"] == taken
                    assert taken in (await it.error(answer))["message"]

    run(scenario())


def test_what_can_be_got_can_be_looked_at() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for path in ("/health", "/readiness", "/v1/models", "/workers", "/metrics", "/ui"):
                async with it.client.head(path) as answer:
                    assert answer.status == 200 and await answer.read() == b""
                async with it.client.get("/health") as answer:  # on the same connection
                    assert await answer.json() == {"status": "ok"}
            async with it.client.head("/flush_cache") as answer:
                assert answer.status == 405
            assert pool.commands == []

    run(scenario())


def test_a_number_of_any_length_is_refused_as_described() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            for limit in ("0", "00001", "1001", "9" * 5000):
                async with it.client.get("/vertumnus/prefixes", params={"limit": limit}) as answer:
                    assert answer.status == 400
                    assert (await it.error(answer))["code"] == "bad_limit"

    run(scenario())


def test_a_fault_of_the_router_has_the_shape_of_other_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            monkeypatch.setattr(it.router, "not_ready", lambda: 1 / 0)
            async with it.client.get("/readiness") as answer:
                assert answer.status == 500
                assert (await it.error(answer))["code"] == "internal_error"

    run(scenario())


def test_an_order_that_is_too_long_is_not_read() -> None:
    async def pieces() -> Any:
        for _ in range(64):
            yield b" " * 65_536

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for path in ("/vertumnus/reconfigure", "/vertumnus/reclaim", "/workers"):
                async with it.client.post(path, data=b" " * (2**20 + 1)) as answer:
                    assert answer.status == 413
                    assert "1048576 bytes" in (await it.error(answer))["message"]
                try:
                    async with it.client.post(path, data=pieces()) as answer:
                        assert answer.status == 413
                except OSError:
                    pass  # the connection is closed while the rest is being sent
            assert pool.regroups == []

    run(scenario())


def test_an_order_that_does_not_arrive_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            port = int(it.url.rpartition(":")[2])
            for path in (b"/vertumnus/reconfigure", b"/workers", b"/explain", b"/start_profile"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST %b HTTP/1.1\r\nHost: localhost\r\n" % path)
                writer.write(b'Content-Length: 100\r\n\r\n{"composition"')
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()
            await until(it.settled, "settled")
            async with it.client.get("/health") as answer:
                assert answer.status == 200
            assert pool.regroups == [] and pool.commands == []

    run(scenario())
    assert [one for one in caplog.records if one.exc_info] == []
