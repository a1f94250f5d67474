"""What is read at scrape time instead of being counted: the queue, the workers, the streams."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vertumnus_router.core.effects import Cause
from vertumnus_router.core.snapshot import PrefixesSnapshot
from vertumnus_router.core.types import BreakerState
from vertumnus_router.io.metrics import Sample
from vertumnus_router.io.verdicts import controller_samples

if TYPE_CHECKING:
    from vertumnus_router.io.router import Router


#: As sglang-router numbers them.
_BREAKER = {BreakerState.CLOSED: 0, BreakerState.OPEN: 1, BreakerState.HALF_OPEN: 2}


def live_samples(router: "Router") -> Iterator[Sample]:
    """Gauges, and counters whose names end in ``_total``."""
    core = router.core
    yield "vertumnus_queue_length", (), core.queued_count
    yield "vertumnus_requests_pending", (), core.pending_count
    for client, waiting in sorted(router.door.admission.waiting().items()):
        yield "vertumnus_client_waiting", (("client", client),), waiting
    yield "vertumnus_index_nodes", (), core.index_nodes
    yield "vertumnus_index_forgotten_blocks_total", (), core.index_forgotten
    prompts = router.tokenizer.cache
    yield "vertumnus_tokenize_cache_bytes", (), prompts.size_bytes
    yield "vertumnus_tokenize_reused_bytes_total", (), prompts.reused_bytes
    yield "vertumnus_tokenize_worked_bytes_total", (), prompts.worked_bytes
    yield "vertumnus_request_log_dropped_total", (), router.observer.log_dropped
    yield "vertumnus_ready", (), float(not router.not_ready())
    yield "vertumnus_requests_moved_total", (), core.requests_moved
    yield "vertumnus_retries_refused_total", (), core.retries_refused
    yield "vertumnus_breakers_opened_total", (), core.breakers_opened
    yield "vertumnus_breakers_overridden_total", (), core.breakers_overridden
    for joined in core.pools:
        where = (("pool", str(joined.pool)),)
        yield "vertumnus_pool_epoch", where, core.epoch(joined.pool)
        yield "vertumnus_pool_kv_capacity_tokens", where, joined.kv_capacity_tokens
    if core.controller is not None:
        yield from controller_samples(core.controller)
    yield from _prefixes(core.prefixes(router.clock.now()))
    workers = core.workers(router.clock.now())
    by_degree = Counter((str(w.degree), w.state.value) for w in workers)
    for (degree, state), count in sorted(by_degree.items()):
        yield "vertumnus_workers", (("degree", degree), ("state", state)), count
    for worker in workers:
        labels = (("worker", str(worker.id)), ("degree", str(worker.degree)))
        yield "vertumnus_worker_breaker_state", labels, _BREAKER[worker.breaker]
        yield "vertumnus_worker_queue_seconds", labels, worker.queue_s
        yield "vertumnus_worker_requests", labels, len(worker.requests)
        yield "vertumnus_worker_cached_blocks", labels, worker.cached_blocks
        yield "vertumnus_worker_partial_blocks", labels, worker.partial_blocks
        for rank, used in zip(worker.ranks, worker.rank_kv_used_tokens, strict=True):
            if used is not None:
                at = (("pool", str(rank.pool)), ("rank", str(rank.index)))
                yield "vertumnus_rank_kv_used_tokens", at, used
    for fitted, correction in sorted(core.corrections().items()):
        yield "vertumnus_model_correction", (("degree", str(fitted)),), correction.factor
    for terms in core.decodes():
        where = (("decode", str(terms.decode)),)
        yield "vertumnus_decode_rooms", where, terms.rooms
        yield "vertumnus_decode_room_limit", where, terms.limit
    for link in router.decodes:
        yield "vertumnus_decode_up", (("decode", link.url),), float(link.server is not None)
    for source in router.discovery:
        where = (("source", source.name),)
        yield "vertumnus_discovery_up", where, float(source.trouble is None)
        yield "vertumnus_discovery_holds", where, float(any(f.holds for f in source.following))
        yield "vertumnus_discovery_servers", where, sum(len(f.urls) for f in source.following)
    for pool in router.pools:
        where = (("pool", pool.url),)
        yield "vertumnus_pool_up", where, float(pool.description is not None)
        yield "vertumnus_pool_joins_total", where, pool.joins
        yield "vertumnus_pool_stale", where, float(pool.stale_s is not None)
        counters = pool.counters
        yield "vertumnus_event_gaps_total", where, counters.gaps
        yield "vertumnus_index_resets_total", where, counters.resets
        yield "vertumnus_events_skipped_total", where, counters.skipped_events


def _prefixes(found: PrefixesSnapshot) -> Iterator[Sample]:
    yield "vertumnus_index_bytes", (), found.index_bytes
    yield "vertumnus_index_scans_total", (), found.scans
    in_flight = Counter(one.cause.value for one in found.transfers)
    for cause in Cause:
        labels = (("cause", cause.value),)
        yield "vertumnus_transfers_in_flight", labels, in_flight[cause.value]
    for where, link in (("same_pool", found.local), ("other_pool", found.remote)):
        yield "vertumnus_copy_bytes_per_second", (("to", where),), link.bytes_per_s
        yield "vertumnus_copy_latency_seconds", (("to", where),), link.latency_s
