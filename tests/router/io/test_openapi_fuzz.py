"""The router against its OpenAPI document: generated requests, good and bad, for every operation.

``FUZZ_EXAMPLES`` raises the number of examples of each operation for a long run. What was tried is
printed (``pytest -s``).
"""

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
import uvloop
from hypothesis import assume, given
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.checks import load_all_checks as load_checks
from schemathesis.core.parameters import ParameterLocation
from vertumnus_router.io.openapi.document import document
from vertumnus_router.io.servers import server_id

from tests.router.io.fake_pool import FakePool
from tests.router.io.fuzzing import examples, fuzzing
from tests.router.io.harness import running, until

EXAMPLES = examples(6)
SETTINGS = fuzzing(6)
#: Where nothing listens.
NOBODY = tuple(f"http://127.0.0.1:{port}" for port in (1, 2, 3))
CONFORMANCE = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
)
#: All of these go the same way.
PASSED_ON = ("/v1/embeddings", "/rerank")
#: Bad input that is no fault to take: what else is in these bodies is SGLang's or sglang-router's.
LENIENT = ("inference", "passed on", "live page")


def tame(told: dict[str, Any]) -> dict[str, Any]:
    """Names that lead somewhere, of what exists only here; nobody else's servers to look for."""

    def one_of(*values: Any) -> dict[str, Any]:
        return {"enum": list(values)}

    schemas = told["components"]["schemas"]
    schemas["Join"]["properties"]["url"] = one_of(*NOBODY)
    order = schemas["Reconfigure"]["properties"]
    order["composition"] = one_of("4x1", "2x1,1x2", "1x2,2x1", "2x2", "1x4", "3x1", "1x3", "x")
    order["pool"] = one_of(None, "fake", "other")
    order = schemas["Order"]["properties"]
    order["tip"] = one_of("11", 12, "99", "x")
    order["worker"] = one_of("fake/0x1", "fake/1x1", "fake/0x2", "nobody")
    servers = one_of(*NOBODY, *map(server_id, NOBODY), "nobody")
    names = {
        ("/workers/{name}", "get"): one_of(*servers["enum"], "fake", "fake/0x1"),
        ("/workers/{name}", "put"): one_of(*servers["enum"], "fake"),
        ("/workers/{name}", "delete"): servers,  # the pool is to stay
        ("/v1/models/{model}", "get"): one_of("fake-model", "other"),
        ("/ui/{name}", "get"): one_of("index.html", "nothing.html"),
    }
    for (path, method), schema in names.items():
        told["paths"][path][method]["parameters"][0]["schema"] = schema
    for path, those in list(told["paths"].items()):
        if those.get("post", {}).get("tags") == ["passed on"] and path not in PASSED_ON:
            del told["paths"][path]
    return told


class Fuzz:
    """Sends what is generated, and counts it."""

    def __init__(self, url: str) -> None:
        load_checks()
        self._url = url
        self._checks = [CHECKS.get_one(name) for name in CONFORMANCE]
        self._schema = schemathesis.openapi.from_dict(tame(document()))
        self._session = requests.Session()
        self.tried: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        with self._session:
            for found in self._schema.get_all_operations():
                operation = found.ok()
                for mode in GenerationMode:
                    if mode is GenerationMode.POSITIVE or can_be_wrong(operation):
                        self._run(operation, mode)

    def _run(self, operation: Any, mode: GenerationMode) -> None:
        @SETTINGS
        @given(operation.as_strategy(generation_mode=mode))
        def fuzz(case: Any) -> None:
            assume(not leads_elsewhere(case))
            answer = case.call(base_url=self._url, session=self._session, timeout=20)
            self.tried[mode.value, answer.status_code] += 1
            case.validate_response(answer, checks=self._checks)
            assert answer.status_code < 500, answer.text
            own = str(answer.status_code) in operation.definition.raw["responses"]
            if answer.status_code >= 400 and own:
                error = json.loads(answer.content)["error"]
                assert error["code"] and len(error["message"]) > 10
            elif answer.status_code < 400 and mode is GenerationMode.NEGATIVE:
                tag = operation.definition.raw["tags"][0]
                assert tag in LENIENT or not bad_body(case), (case, answer.text)

        try:
            fuzz()
        except Exception as exc:
            exc.add_note(f"{mode.value}: {operation.label}")
            raise


def can_be_wrong(operation: Any) -> bool:
    raw = operation.definition.raw
    return bool(raw["parameters"]) or "requestBody" in raw


def leads_elsewhere(case: Any) -> bool:
    """Whether the router would be told to look for a server that a generator has made up."""
    if (case.method, case.path) != ("POST", "/workers") or not isinstance(case.body, dict):
        return False
    url = case.body.get("url")
    return isinstance(url, str) and "//" in url and url not in NOBODY


def bad_body(case: Any) -> bool:
    found = case.meta.components.get(ParameterLocation.BODY)
    return found is not None and found.mode.is_negative


def test_generated_requests_get_the_answers_that_are_described(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> Counter[tuple[str, int]]:
        async with FakePool(4, copies=True) as pool, running(pool.url) as it:
            await it.ready()
            pool.ranks[0].store([11, 12])
            await until(lambda: it.router.core.prefixes(0.0).index_blocks == 2, "stored")
            fuzz = Fuzz(it.url)
            await asyncio.to_thread(fuzz.run)
            await until(it.settled, "settled")
            async with it.client.get("/readiness") as response:
                assert response.status == 200
            async with await it.chat() as response:
                assert response.status == 200
            return fuzz.tried

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tried = runner.run(scenario())  # as long as it takes
    good = sum(count for (mode, _), count in tried.items() if mode == "positive")
    bad = sum(tried.values()) - good
    print(f"{good} good and {bad} bad requests; statuses: {sorted(tried.items())}")
    assert bad > 10 * EXAMPLES
    assert [one for one in caplog.records if one.exc_info or one.levelno > logging.ERROR] == []
