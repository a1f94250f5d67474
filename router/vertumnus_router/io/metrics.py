"""Prometheus metrics. Labels are bounded: workers, degrees, outcomes and reasons, never what a
client wrote."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vertumnus_router.core.effects import CostTerms

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_NOBODY = ("", "")

Sample = tuple[str, tuple[tuple[str, str], ...], float]


class RouterMetrics:
    """Everything the router counts itself; ``watch`` adds what is read at scrape time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        who = ("worker", "degree")
        self._requests = Counter(
            "vertumnus_requests",
            "Requests by how they ended; worker and degree are empty if none was reached",
            (*who, "outcome"),
            registry=self.registry,
        )
        self._dispatches = Counter(
            "vertumnus_dispatches", "Attempts sent to a worker", who, registry=self.registry
        )
        self._attempt_failures = Counter(
            "vertumnus_attempt_failures",
            "Attempts that failed, by kind of failure",
            ("failure",),
            registry=self.registry,
        )
        self._ttft = Histogram(
            "vertumnus_ttft_seconds",
            "From arrival at the router to the first byte of the answer, streamed requests",
            ("degree",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._queue = Histogram(
            "vertumnus_queue_seconds",
            "From arrival at the router to the first dispatch",
            ("degree",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prefill_ratio = Histogram(
            "vertumnus_prefill_actual_over_predicted",
            "Reported compute time of a prefill over the time that placement predicted",
            ("degree",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._cached = Counter(
            "vertumnus_cached_tokens",
            "Prompt tokens found in the cache: as placement predicted, as the engine counted",
            ("degree", "source"),
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "vertumnus_prompt_tokens",
            "Prompt tokens of reported prefills, as the engine counted",
            ("degree",),
            registry=self.registry,
        )
        self._prompts = Counter(
            "vertumnus_prompts",
            "Prompts by how well they are known: exact, or why there are no blocks or no count",
            ("knowledge",),
            registry=self.registry,
        )
        self._mismatches = Counter(
            "vertumnus_token_count_mismatches",
            "Prompts whose exact count here differs from the engine's: the tokenizers differ",
            registry=self.registry,
        )
        self._tokenize = Histogram(
            "vertumnus_tokenize_seconds",
            "Time to template, tokenise and hash a prompt",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def watch(self, read: Callable[[], Iterable[Sample]]) -> None:
        """Add gauges (and counters, by names that end in ``_total``) read at each scrape."""
        self.registry.register(_Live(read))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def prompt(self, exact: bool, reason: str | None, seconds: float) -> None:
        self._prompts.labels(reason or ("exact" if exact else "estimate")).inc()
        self._tokenize.observe(seconds)

    def dispatched(self, chosen: CostTerms, attempt: int, waited_s: float) -> None:
        degree = str(chosen.degree)
        self._dispatches.labels(chosen.worker, degree).inc()
        if attempt == 1:
            self._queue.labels(degree).observe(waited_s)

    def attempt_failed(self, failure: str) -> None:
        self._attempt_failures.labels(failure).inc()

    def first_byte(self, chosen: CostTerms, seconds: float) -> None:
        self._ttft.labels(str(chosen.degree)).observe(seconds)

    def prefill(
        self, chosen: CostTerms, *, cached_tokens: int, input_tokens: int, compute_s: float
    ) -> None:
        degree = str(chosen.degree)
        self._cached.labels(degree, "predicted").inc(chosen.cached_tokens)
        self._cached.labels(degree, "actual").inc(cached_tokens)
        self._prompt_tokens.labels(degree).inc(input_tokens)
        if chosen.service_s > 0:
            self._prefill_ratio.labels(degree).observe(compute_s / chosen.service_s)

    def token_count_mismatch(self) -> None:
        self._mismatches.inc()

    def ended(self, chosen: CostTerms | None, outcome: str) -> None:
        who = _NOBODY if chosen is None else (chosen.worker, str(chosen.degree))
        self._requests.labels(*who, outcome).inc()


class _Live(Collector):
    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()  # names may come and go; nothing to check for duplicates

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, labels, value in self._read():
            family = families.get(name)
            if family is None:
                names = [label for label, _ in labels]
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(name, name.replace("_", " "), labels=names)
            family.add_metric([text for _, text in labels], value)  # type: ignore[attr-defined]
        return families.values()
