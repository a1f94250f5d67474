"""Prometheus metrics. Labels are bounded: workers, degrees, outcomes and reasons, never what a
client wrote."""

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vertumnus_router.core.effects import Cause, CostTerms
from vertumnus_router.core.events import CopyEnded, ReclaimEnded, RegroupEnded, TransferOutcome
from vertumnus_router.io.metric_help import HELP
from vertumnus_router.io.quick_labels import Counter, Histogram
from vertumnus_router.io.ttft import PARTS, RecentSplits

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_CACHED_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0, 1.1, 1.5, 2.0, 4.0)
_NOBODY = ("", "")

Sample = tuple[str, tuple[tuple[str, str], ...], float]


class RouterMetrics:
    """Everything the router counts itself; ``watch`` adds what is read at scrape time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        who = ("worker", "degree")
        self._requests = Counter(
            "vertumnus_requests",
            "Requests by how they ended; worker and degree are empty if none was reached",
            (*who, "outcome"),
            registry=self.registry,
        )
        self._refused = Counter(
            "vertumnus_refused",
            "Requests turned down at the door, by the name of the client's key and the reason",
            ("client", "reason"),
            registry=self.registry,
        )
        self._admitted = Counter(
            "vertumnus_client_requests",
            "Requests let into the queue, by the name of the client's key",
            ("client",),
            registry=self.registry,
        )
        self._admitted_tokens = Counter(
            "vertumnus_client_prompt_tokens",
            "Prompt tokens of those",
            ("client",),
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
        self._ttft_parts = Histogram(
            "vertumnus_ttft_part_seconds",
            "The time to the first byte of requests with a pull or a decode server, in parts that "
            "add up",
            ("part",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.recent_splits = RecentSplits()
        self._leg_failures = Counter(
            "vertumnus_pair_failures",
            "Attempts with a decode server that failed, by the leg that did and its failure",
            ("leg", "cause"),
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
        self._cached_ratio = Histogram(
            "vertumnus_cached_actual_over_predicted",
            "Prompt tokens found in the cache over those that placement predicted, of requests "
            "where it predicted any",
            ("degree",),
            buckets=_CACHED_RATIOS,
            registry=self.registry,
        )
        self._judged = Counter(
            "vertumnus_slo_tokens",
            "Prompt tokens of streamed or failed requests, by whether the first token came in time",
            ("met",),
            registry=self.registry,
        )
        self._by_met = {met: self._judged.labels(str(met).lower()) for met in (True, False)}
        self._lasted = Histogram(
            "vertumnus_request_seconds",
            "From arrival to the end of the answer, whatever it was",
            ("endpoint",),
            buckets=_SECONDS,
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

        self._moves = Counter(
            "vertumnus_moves",
            "Splits and merges that this router commanded, by how they ended",
            ("kind", "outcome"),
            registry=self.registry,
        )
        self._move_stages = Histogram(
            "vertumnus_move_stage_seconds",
            "How long each stage of a move took, as the pool measured it",
            ("stage",),
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )

        self._copies = Counter(
            "vertumnus_copies",
            "Copies of cached prefixes between ranks, by why they were made and how they ended",
            ("cause", "outcome"),
            registry=self.registry,
        )
        self._copied_blocks = Counter(
            "vertumnus_copied_blocks",
            "Blocks that copies brought",
            ("cause",),
            registry=self.registry,
        )
        self._copied_bytes = Counter(
            "vertumnus_copied_bytes",
            "Bytes of KV that copies brought",
            ("cause",),
            registry=self.registry,
        )
        self._copy_seconds = Histogram(
            "vertumnus_copy_seconds",
            "How long copies took that were done and had something to bring",
            ("cause",),
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self._pull_waits = Histogram(
            "vertumnus_pull_wait_seconds",
            "How long requests were held back for the copy that went before them",
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self._pulls = Counter(
            "vertumnus_pulls",
            "Requests with a pull by what their prefill found: won, as much as was predicted with "
            "it, or lost, less",
            ("result",),
            registry=self.registry,
        )
        self._reclaims = Counter(
            "vertumnus_reclaims",
            "Deletions of cached prefixes, by why they were made and how they ended",
            ("cause", "outcome"),
            registry=self.registry,
        )
        self._reclaimed_blocks = Counter(
            "vertumnus_reclaimed_blocks",
            "Blocks that were deleted",
            ("cause",),
            registry=self.registry,
        )
        self._snapshots = Counter(
            "vertumnus_snapshots",
            "Snapshots asked of ranks whose events were lost for good, by the answer",
            ("outcome",),
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

    def refused(self, client: str, reason: str) -> None:
        self._refused.labels(client, reason).inc()

    def admitted(self, client: str, input_tokens: int) -> None:
        self._admitted.labels(client).inc()
        self._admitted_tokens.labels(client).inc(input_tokens)

    def dispatched(self, chosen: CostTerms, attempt: int, waited_s: float) -> None:
        degree = str(chosen.degree)
        self._dispatches.labels(chosen.worker, degree).inc()
        if attempt == 1:
            self._queue.labels(degree).observe(waited_s)

    def attempt_failed(self, failure: str) -> None:
        self._attempt_failures.labels(failure).inc()

    def first_byte(self, chosen: CostTerms, seconds: float) -> None:
        self._ttft.labels(str(chosen.degree)).observe(seconds)

    def ttft_split(self, split: tuple[float, ...]) -> None:
        self.recent_splits.add(split)
        for part, seconds in zip(PARTS, split, strict=True):
            self._ttft_parts.labels(part).observe(seconds)

    def leg_failed(self, leg: str, cause: str) -> None:
        self._leg_failures.labels(leg, cause).inc()

    def prefill(
        self, chosen: CostTerms, *, cached_tokens: int, input_tokens: int, compute_s: float
    ) -> None:
        degree = str(chosen.degree)
        self._cached.labels(degree, "predicted").inc(chosen.cached_tokens)
        self._cached.labels(degree, "actual").inc(cached_tokens)
        self._prompt_tokens.labels(degree).inc(input_tokens)
        if chosen.cached_tokens:
            self._cached_ratio.labels(degree).observe(cached_tokens / chosen.cached_tokens)
        prefill_s = chosen.service_s - chosen.pull_s
        if prefill_s > 0:
            self._prefill_ratio.labels(degree).observe(compute_s / prefill_s)
        if chosen.pull_tokens:
            won = cached_tokens >= chosen.cached_tokens
            self._pulls.labels("won" if won else "lost").inc()

    def judged(self, input_tokens: int, *, met: bool) -> None:
        self._by_met[met].inc(input_tokens)

    def lasted(self, endpoint: str, seconds: float) -> None:
        self._lasted.labels(endpoint).observe(seconds)

    def token_count_mismatch(self) -> None:
        self._mismatches.inc()

    def moved(self, merges: bool, ended: RegroupEnded) -> None:
        self._moves.labels("merge" if merges else "split", ended.outcome.value).inc()
        if ended.stages is not None:
            for stage, ms in msgspec.structs.asdict(ended.stages).items():
                self._move_stages.labels(stage).observe(ms / 1000)

    def copied(self, cause: Cause, ended: CopyEnded) -> None:
        self._copies.labels(cause.value, ended.outcome.value).inc()
        if ended.outcome is TransferOutcome.DONE and ended.blocks:
            self._copied_blocks.labels(cause.value).inc(ended.blocks)
            self._copied_bytes.labels(cause.value).inc(ended.bytes)
            self._copy_seconds.labels(cause.value).observe(ended.seconds)

    def pull_waited(self, seconds: float) -> None:
        self._pull_waits.observe(seconds)

    def reclaimed(self, cause: Cause, ended: ReclaimEnded) -> None:
        self._reclaims.labels(cause.value, ended.outcome.value).inc()
        self._reclaimed_blocks.labels(cause.value).inc(ended.blocks)

    def snapshot(self, outcome: str) -> None:
        self._snapshots.labels(outcome).inc()

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
                about = HELP.get(name, name.replace("_", " "))
                family = families[name] = kind(name, about, labels=names)
            family.add_metric([text for _, text in labels], value)  # type: ignore[attr-defined]
        return families.values()
