"""Tell those who follow requests what becomes of each."""

from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.core.effects import Dispatch
from vertumnus_router.core.events import Failure
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.observe.request_log import RequestLog
from vertumnus_router.io.observe.settings import TtftTargets
from vertumnus_router.io.observe.timeline import Timeline
from vertumnus_router.io.observe.trail import Trail
from vertumnus_router.io.ttft import Marks

Headers = list[tuple[bytes, bytes]]

#: How requests end whose first token nobody has waited for in vain.
_NOT_OURS = frozenset(("ok", "client_error", "cancelled"))


class Tracer(Protocol):
    """What is wanted of ``tracing.OtlpTracer``, which is imported only where traces are."""

    def begin(self, trail: Trail, headers: Headers) -> None:
        """A request has come; ``headers`` are the client's and may name a trace of its own."""

    def attempt(self, trail: Trail, headers: Headers) -> Headers:
        """An attempt is about to be sent: its headers, with the place in the trace."""

    def failed(self, trail: Trail) -> None:
        """The current attempt has ended badly; the last of ``trail.failures`` says how."""

    def end(self, trail: Trail) -> None: ...

    def close(self) -> None:
        """Send what is left, for a moment at most. Blocks; not for an event loop."""


class Observer:
    """Told of each request: ``arrived``; for every attempt ``attempted``, ``traced`` when it is
    sent, and ``failed`` if it does; ``first_byte``; and in any case, as the last, ``ended``."""

    def __init__(
        self,
        *,
        clock: Clock,
        metrics: RouterMetrics,
        slo: TtftTargets,
        log: RequestLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.timeline = Timeline()
        self._clock = clock
        self._metrics = metrics
        self._slo = slo
        self._log = log
        self._tracer = tracer

    def close(self) -> None:
        """Hand over what is left, for some seconds at most. Blocks; not for an event loop."""
        if self._log is not None:
            self._log.close()
        if self._tracer is not None:
            self._tracer.close()

    @property
    def log_dropped(self) -> int:
        """Lines that the request log had no room for."""
        return 0 if self._log is None else self._log.dropped

    def arrived(self, trail: Trail, headers: Headers) -> None:
        if self._tracer is not None:
            self._tracer.begin(trail, headers)

    def attempted(self, trail: Trail, dispatch: Dispatch, marks: Marks) -> None:
        """``marks`` may still be written to."""
        trail.dispatch, trail.marks, trail.prefill = dispatch, marks, None
        if trail.dispatched_s is None:
            trail.dispatched_s = marks.dispatched_s

    def traced(self, trail: Trail, headers: Headers) -> Headers:
        """The headers for the current attempt; unchanged where nobody traces."""
        return headers if self._tracer is None else self._tracer.attempt(trail, headers)

    def failed(self, trail: Trail, failure: Failure) -> None:
        """The current attempt, or what should have become one, has failed."""
        worker = None if trail.dispatch is None else trail.dispatch.worker
        trail.failures.append((worker, failure))
        if self._tracer is not None:
            self._tracer.failed(trail)

    def first_byte(self, trail: Trail, *, streams: bool) -> None:
        """``streams``: it is that of a stream of events."""
        now = self._clock.now()
        trail.first_byte_s, trail.streams = now, streams
        tokens, seconds = trail.input_tokens, trail.ttft_s
        if tokens is None or seconds is None:
            return
        met = seconds <= self._slo.target_s(tokens)
        self.timeline.first_token(now, seconds, tokens, met=met)
        self._metrics.judged(tokens, met=met)

    def ended(self, trail: Trail, outcome: str, status: int | None) -> None:
        """``status`` is what the client was answered, None if it was not."""
        now = trail.ended_s = self._clock.now()
        trail.outcome, trail.status = outcome, status
        tokens = trail.input_tokens
        if trail.first_byte_s is None and outcome not in _NOT_OURS and tokens is not None:
            self.timeline.no_token(now, tokens)
            self._metrics.judged(tokens, met=False)
        self.timeline.ended(now, trail)
        self._metrics.lasted(trail.endpoint, now - trail.arrived_s)
        if self._tracer is not None:
            self._tracer.end(trail)
        if self._log is not None:
            self._log.write(trail)
