"""OpenTelemetry: the router's part of a trace, and the engine's hung below it.

Imported only where traces are wanted; needs the ``otel`` extra. SGLang reads ``traceparent`` from
the headers of a request (``observability/trace.py``, with ``--enable-trace``), so the spans of the
ranks become children of the attempt that they served.

    POST /v1/chat/completions   from arrival to the end of the answer
    ├── tokenize                until the prompt's tokens are known
    ├── queue                   until the first attempt
    └── dispatch                one for each attempt
        ├── pull                a copy of its prefix goes first
        ├── prefill             as the leader of the worker reports it
        ├── transfer            until the KV is at the decode server
        └── first_token         from there to the first byte of the answer
"""

from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vertumnus_router.clock import Clock
from vertumnus_router.core.effects import Dispatch
from vertumnus_router.io.observe.observer import Headers
from vertumnus_router.io.observe.trail import Trail

_SERVICE = "vertumnus-router"
_CONTEXT = (b"traceparent", b"tracestate")
_CLOSE_MS = 2000
#: No trace is worth more than that to a router which is stopping.
_EXPORT_S = 2.0
_FINE = ("ok", "cancelled", "client_error")


class _Spans:
    """The open spans of a request."""

    __slots__ = ("_offset_ns", "attempt", "context", "root", "trace_id")

    def __init__(self, root: Any, offset_ns: int) -> None:
        self.root = root
        self._offset_ns = offset_ns
        self.context = trace.set_span_in_context(root)
        self.trace_id = trace.format_trace_id(root.get_span_context().trace_id)
        self.attempt: Any = None

    def ns(self, at_s: float | None) -> int | None:
        """Unix time. All spans of a request are on one scale, even if the machine's clock is set
        meanwhile."""
        return None if at_s is None else self._offset_ns + _ns(at_s)


class OtlpTracer:
    """``observer.Tracer``: spans go to ``processor``, in the background."""

    def __init__(self, processor: SpanProcessor, clock: Clock) -> None:
        # Not the process's global provider: nothing else here is traced.
        self._provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("vertumnus_router")
        self._clock = clock
        self._w3c = TraceContextTextMapPropagator()

    def begin(self, trail: Trail, headers: Headers) -> None:
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT
        }
        offset_ns = _ns(self._clock.unix_s(0.0))
        root = self._tracer.start_span(
            f"{trail.method} {trail.endpoint}",
            context=self._w3c.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=offset_ns + _ns(trail.arrived_s),
            attributes={
                "http.request.method": trail.method,
                "http.route": trail.endpoint,
                "vertumnus.request_id": trail.id,
            },
        )
        trail.span = _Spans(root, offset_ns)

    def attempt(self, trail: Trail, headers: Headers) -> Headers:
        spans: _Spans = trail.span
        dispatch, marks = trail.dispatch, trail.marks
        assert dispatch is not None and marks is not None
        span = spans.attempt = self._tracer.start_span(
            "dispatch",
            context=spans.context,
            kind=SpanKind.CLIENT,
            start_time=spans.ns(marks.dispatched_s),
            attributes=_attempt(dispatch) if spans.root.is_recording() else None,
        )
        carrier: dict[str, str] = {}
        self._w3c.inject(carrier, trace.set_span_in_context(span))
        kept = [(name, value) for name, value in headers if name not in _CONTEXT]
        return [*kept, *((name.encode(), value.encode()) for name, value in carrier.items())]

    def failed(self, trail: Trail) -> None:
        failure = trail.failures[-1][1].value
        self._end_attempt(trail, self._clock.now(), Status(StatusCode.ERROR, failure))

    def end(self, trail: Trail) -> None:
        spans: _Spans = trail.span
        if not spans.root.is_recording():
            return
        self._end_attempt(trail, trail.ended_s)
        self._child(spans, spans.context, "tokenize", trail.arrived_s, trail.described_s)
        self._child(spans, spans.context, "queue", trail.described_s, trail.dispatched_s)
        facts: dict[str, str | int | float | None] = {
            "vertumnus.outcome": trail.outcome,
            "vertumnus.attempts": trail.attempts,
            "http.response.status_code": trail.status,
            "gen_ai.usage.input_tokens": trail.input_tokens,
            "vertumnus.ttft_s": trail.ttft_s,
        }
        for name, fact in facts.items():
            if fact is not None:
                spans.root.set_attribute(name, fact)
        if trail.outcome not in _FINE:
            spans.root.set_status(Status(StatusCode.ERROR, trail.outcome))
        spans.root.end(end_time=spans.ns(trail.ended_s))

    def close(self) -> None:
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()

    def _end_attempt(self, trail: Trail, at_s: float | None, status: Status | None = None) -> None:
        """The attempt, if one was sent and has not ended, and its children."""
        spans: _Spans = trail.span
        span, marks, prefill = spans.attempt, trail.marks, trail.prefill
        if span is None or marks is None:
            return
        spans.attempt = None
        context = trace.set_span_in_context(span)
        facts = {}
        if prefill is not None:
            facts["gen_ai.usage.input_tokens"] = prefill.input_tokens
            facts["vertumnus.cached_tokens"] = prefill.cached_tokens
        # The report of a prefill and the first byte come on two ways, in any order.
        prefilled_s = _earlier(marks.prefilled_s, trail.first_byte_s)
        self._child(spans, context, "pull", marks.dispatched_s, marks.pulled_s)
        self._child(spans, context, "prefill", marks.started_s, prefilled_s, facts)
        self._child(spans, context, "transfer", marks.prefilled_s, marks.arrived_s)
        if trail.streams:
            since_s = prefilled_s if marks.arrived_s is None else marks.arrived_s
            self._child(spans, context, "first_token", since_s, trail.first_byte_s)
        if status is not None:
            span.set_status(status)
        span.end(end_time=spans.ns(at_s))

    def _child(
        self,
        spans: _Spans,
        context: Any,
        name: str,
        begin_s: float | None,
        end_s: float | None,
        facts: dict[str, int] | None = None,
    ) -> None:
        """A span that is over, if anybody told when it began and ended."""
        if begin_s is None or end_s is None:
            return
        span = self._tracer.start_span(
            name, context=context, start_time=spans.ns(begin_s), attributes=facts
        )
        span.end(end_time=spans.ns(max(begin_s, end_s)))


def _attempt(dispatch: Dispatch) -> dict[str, str | int | float]:
    chosen = dispatch.decision.chosen
    attributes: dict[str, str | int | float] = {
        "vertumnus.attempt": dispatch.attempt,
        "vertumnus.worker": chosen.worker,
        "vertumnus.cp_degree": chosen.degree,
        "vertumnus.home": str(dispatch.home),
        "vertumnus.policy": dispatch.decision.policy,
        "vertumnus.predicted.cached_tokens": chosen.cached_tokens,
        "vertumnus.predicted.queue_s": chosen.queue_s,
        "vertumnus.predicted.service_s": chosen.service_s,
    }
    if dispatch.pair is not None:
        attributes["vertumnus.decode"] = str(dispatch.pair.decode)
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _earlier(one: float | None, other: float | None) -> float | None:
    times = [time for time in (one, other) if time is not None]
    return min(times, default=None)


def otlp_tracer(endpoint: str, clock: Clock) -> OtlpTracer:
    """Spans go to the collector at ``endpoint``, ``HOST:PORT``, by gRPC without TLS, as SGLang's
    own do. What it cannot take is dropped, and requests never wait for it."""
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=_EXPORT_S)
    return OtlpTracer(BatchSpanProcessor(exporter), clock)
