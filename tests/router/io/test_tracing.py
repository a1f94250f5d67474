"""Traces across client, router and engine."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web
from vertumnus_router.clock import WallClock
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.observe.settings import ObserveConfig
from vertumnus_router.io.observe.start import start_observer

from tests.router.io import fake_pool
from tests.router.io.fake_decode import paired
from tests.router.io.fake_pool import FakePool, Seen
from tests.router.io.harness import run, running, until

otel = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the otel extra")

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "shop=cart"}
OBSERVE = ObserveConfig(otlp_traces_endpoint="127.0.0.1:4317")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What would go to the collector."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from vertumnus_router.io.observe import tracing

    exporter = InMemorySpanExporter()

    def in_memory(endpoint: str, clock: WallClock) -> tracing.OtlpTracer:
        assert endpoint == OBSERVE.otlp_traces_endpoint
        return tracing.OtlpTracer(SimpleSpanProcessor(exporter), clock)

    monkeypatch.setattr(tracing, "otlp_tracer", in_memory)
    return exporter


async def answer_and_report(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
    for name in PARENT:
        assert len(request.headers.getall(name)) == 1, "not the caller's as well"
    pool.prefill_started(seen)
    await asyncio.sleep(0.1)
    pool.prefill_finished(seen, input_tokens=100, cached_tokens=64)
    await asyncio.sleep(0.2)  # the reports come by another way
    return await fake_pool.stream(pool, request, seen)


def tree(spans: Any) -> dict[str, list[str]]:
    """The names of the spans below each, in the order in which they began; the caller's first."""
    found = sorted(spans.get_finished_spans(), key=lambda span: span.start_time)
    names = {span.context.span_id: span.name for span in found}
    below: dict[str, list[str]] = {}
    for span in found:
        above = "caller" if span.parent is None else names.get(span.parent.span_id, "caller")
        below.setdefault(above, []).append(span.name)
    return below


def test_a_trace_goes_from_the_client_through_the_router_to_the_engine(spans: Any) -> None:
    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url, observe=OBSERVE) as it:
            await it.ready()
            pool.answer = answer_and_report
            body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
            async with it.client.post(
                "/v1/chat/completions", json=body, headers=PARENT
            ) as response:
                await response.read()
            await until(lambda: len(spans.get_finished_spans()) == 6, "six spans")
            assert tree(spans) == {
                "caller": ["POST /v1/chat/completions"],
                "POST /v1/chat/completions": ["tokenize", "queue", "dispatch"],
                "dispatch": ["prefill", "first_token"],
            }
            by_name = {span.name: span for span in spans.get_finished_spans()}
            root, dispatch = by_name["POST /v1/chat/completions"], by_name["dispatch"]
            assert f"{root.parent.span_id:016x}" == CALLER
            assert {f"{span.context.trace_id:032x}" for span in by_name.values()} == {TRACE}
            # What the engine reads: the dispatch is the parent of what it does.
            sent = pool.seen[0].headers
            assert sent["traceparent"] == f"00-{TRACE}-{dispatch.context.span_id:016x}-01"
            assert sent["tracestate"] == "shop=cart"

            assert dispatch.attributes["vertumnus.worker"] == "fake/0x2"
            assert dispatch.attributes["vertumnus.cp_degree"] == 2
            assert by_name["prefill"].attributes["vertumnus.cached_tokens"] == 64
            assert root.attributes["http.response.status_code"] == 200
            assert root.attributes["vertumnus.outcome"] == "ok"
            for span in by_name.values():
                assert root.start_time <= span.start_time <= span.end_time <= root.end_time
            prefill_s = (by_name["prefill"].end_time - by_name["prefill"].start_time) / 1e9
            assert prefill_s >= 0.05
            assert by_name["first_token"].start_time == by_name["prefill"].end_time

    run(scenario())


def test_each_attempt_is_a_span_of_its_own(spans: Any) -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url, observe=OBSERVE) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            pool.answers.append(fake_pool.drop)
            async with await it.chat(stream=True) as response:
                await response.read()
            await until(lambda: "caller" in tree(spans), "over")
            dispatches = [s for s in spans.get_finished_spans() if s.name == "dispatch"]
            failed, done = sorted(dispatches, key=lambda span: span.start_time)
            assert (failed.status.is_ok, failed.status.description) == (False, "disconnected")
            assert done.status.is_ok
            assert failed.end_time <= done.start_time
            parents = [seen.headers["traceparent"].split("-")[2] for seen in pool.seen]
            assert parents == [f"{span.context.span_id:016x}" for span in (failed, done)]
            pool.answer = fake_pool.refuse(500, {"error": "boom"})
            spans.clear()
            async with await it.chat() as response:
                assert response.status == 502
            await until(lambda: "caller" in tree(spans), "over")
            root = next(s for s in spans.get_finished_spans() if s.parent is None)
            assert (root.status.is_ok, root.status.description) == (False, "worker_error")

    run(scenario())


def test_the_transfer_to_a_decode_server_is_a_span(spans: Any) -> None:
    async def scenario() -> None:
        async with paired(2, "1x2", observe=OBSERVE) as (pool, (decode,), it):
            async with await it.chat(stream=True) as response:
                await response.read()
            await until(lambda: "caller" in tree(spans), "over")
            assert "dispatch" in tree(spans)["POST /v1/chat/completions"]
            legs = {seen.headers["traceparent"] for seen in (pool.seen[0], decode.seen[0])}
            assert len(legs) == 1, "both engines hang below the same dispatch"
            # The reports and the answer race in a fake without any work to do.
            names = {"prefill", "transfer", "first_token"}
            assert set(tree(spans).get("dispatch", [])) <= names

    run(scenario())


def test_a_refused_request_is_traced_too(spans: Any) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, observe=OBSERVE) as it:
            await it.ready()
            async with it.client.post("/generate", data=b"{") as response:
                assert response.status == 400
            (root,) = spans.get_finished_spans()
            assert root.attributes["vertumnus.outcome"] == "invalid_json"

    run(scenario())


def test_what_the_caller_does_not_record_is_not_recorded(spans: Any) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, observe=OBSERVE) as it:
            await it.ready()
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
            async with it.client.post("/generate", json={"text": "x"}, headers=headers) as answer:
                assert answer.status == 200
            await until(it.settled, "settled")
            assert spans.get_finished_spans() == ()
            assert pool.seen[0].headers["traceparent"].startswith(f"00-{TRACE}-")
            assert pool.seen[0].headers["traceparent"].endswith("-00")

    run(scenario())


def test_without_traces_the_callers_headers_travel_unchanged() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            async with it.client.post("/generate", json={"text": "x"}, headers=PARENT) as answer:
                assert answer.status == 200
            assert {name: pool.seen[0].headers[name] for name in PARENT} == PARENT

    run(scenario())


def test_nothing_of_it_is_imported_unless_traces_are_wanted() -> None:
    code = """
import sys
from vertumnus_router.clock import WallClock
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.router import Router
Router(RouterConfig(pool_urls=("http://127.0.0.1:1",)), WallClock())
print([name for name in sys.modules if name.startswith(("opentelemetry", "grpc", "google"))])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_without_opentelemetry_the_router_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "vertumnus_router.io.observe.tracing", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'sgl-vertumnus\[otel\]'"):
        start_observer(OBSERVE, WallClock(), RouterMetrics())


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """One that speaks OTLP over gRPC, as SGLang's exporter expects; its address, what it got."""
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    received: list[Any] = []

    class Collector(service.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", received
    server.stop(0)


def test_a_collector_has_it_all_when_the_router_has_stopped(
    collector: tuple[str, list[Any]],
) -> None:
    address, received = collector

    async def scenario() -> None:
        observe = ObserveConfig(otlp_traces_endpoint=address)
        async with FakePool(1) as pool, running(pool.url, observe=observe) as it:
            await it.ready()
            async with await it.chat(stream=True) as response:
                await response.read()
            await until(it.settled, "settled")

    run(scenario())
    resources = [one for request in received for one in request.resource_spans]
    found = [span.name for one in resources for scope in one.scope_spans for span in scope.spans]
    assert {"POST /v1/chat/completions", "queue", "dispatch"} <= set(found)
    (name,) = {
        attribute.value.string_value
        for one in resources
        for attribute in one.resource.attributes
        if attribute.key == "service.name"
    }
    assert name == "vertumnus-router"


def test_a_collector_that_is_not_there_holds_nothing_up() -> None:
    async def scenario() -> None:
        observe = ObserveConfig(otlp_traces_endpoint="127.0.0.1:1")
        async with FakePool(1) as pool, running(pool.url, observe=observe) as it:
            await it.ready()
            for _ in range(3):
                async with await it.chat(stream=True) as response:
                    assert response.status == 200

    run(scenario())  # it has 20 s, the exporter's own patience would be longer
