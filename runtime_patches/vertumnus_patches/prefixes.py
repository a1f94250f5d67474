"""Cached prefixes of one rank: how long, what KV, and how to take over another rank's.

Lengths are tokens, in whole pages. To be called between steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vertumnus_patches import new_kv
from vertumnus_patches.loans import loans_of
from vertumnus_patches.prefix_marks import AGREED, BUDGET, Budget

__all__ = [
    "Incoming",
    "agreed_prefixes",
    "candidates",
    "chunk_tokens",
    "cost",
    "empty",
    "give_up",
    "lock",
    "locked",
    "matched",
    "namespace_of",
    "page_tokens",
    "read",
    "reserve",
    "room",
    "store",
    "tokens_of",
]


@dataclass(frozen=True, slots=True)
class Incoming:
    """Slots for KV that another rank is about to send, behind a prefix that is held here."""

    key: Any
    base: torch.Tensor
    slots: torch.Tensor


def candidates(scheduler: Any, running_batch: Any) -> list[Any]:
    """The waiting requests that the next prefill step may take, in its order.

    Those whose grammars are compiled by now among them, as SGLang would queue them while it
    plans the step.
    """
    if scheduler.grammar_manager.has_waiting_grammars():
        for request in scheduler.grammar_manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)
    is_full = running_batch.batch_is_full and not running_batch.is_empty()
    if is_full and not scheduler.enable_priority_preemption:
        return []
    if scheduler.enable_priority_scheduling or scheduler.schedule_policy != "fcfs":
        scheduler.policy.calc_priority(scheduler.waiting_queue, running_batch)
    return list(scheduler.waiting_queue)


def tokens_of(request: Any) -> Any:
    """Prompt and output so far, an ``array`` of token ids."""
    request.refresh_fill_ids()
    return request.full_untruncated_fill_ids


def namespace_of(request: Any) -> tuple[Any, ...]:
    """What tells equal tokens apart in the cache."""
    return request.extra_key, request.cache_salt


def matched(scheduler: Any, request: Any) -> int:
    """How much of the request's prefix this rank holds and the request may use."""
    if request.positional_embed_overrides is not None:
        return 0
    key = _key_of(scheduler, request)
    return int(_match(scheduler, key).device_prefix_len)


def read(scheduler: Any, request: Any, start: int, end: int) -> torch.Tensor:
    """KV of the request's tokens [start, end), [layers, 2, tokens, KV heads, head width]."""
    found = _match(scheduler, _key_of(scheduler, request, end))
    path = scheduler.tree_cache.path_device_indices(found.last_device_node)
    if len(path) < end:
        raise ValueError(f"{len(path)} tokens are cached, {end} were to be read")
    return new_kv.read_slots(_pool(scheduler), path[start:end])


def reserve(scheduler: Any, request: Any, start: int, end: int) -> Incoming | None:
    """Slots for the request's tokens [start, end), taken from unused prefixes if need be; None
    when there is no room. What is held up to ``start`` must be ``locked``.
    """
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    base = torch.empty(0, dtype=torch.int64, device=allocator.device)
    if start:
        found = _match(scheduler, _key_of(scheduler, request, start))
        base = tree.path_device_indices(found.last_device_node)
    evict_from_tree_cache(tree, end - start)
    slots = allocator.alloc(end - start)
    return None if slots is None else Incoming(_key_of(scheduler, request, end), base, slots)


def store(scheduler: Any, incoming: Incoming, kv: torch.Tensor, priority: int) -> None:
    """Write the KV and make it a cached prefix."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    tree = scheduler.tree_cache
    new_kv.write_slots(_pool(scheduler), incoming.slots, kv)
    held = len(incoming.base)
    tree.insert(
        InsertParams(
            key=incoming.key,
            value=torch.cat([incoming.base, incoming.slots]),
            prev_prefix_len=held,
            inserted_len=held,
            priority=priority,
        )
    )


def give_up(scheduler: Any, incoming: Incoming) -> None:
    """Return slots that nothing was written to."""
    scheduler.token_to_kv_pool_allocator.free(incoming.slots)


def empty(scheduler: Any, tokens: int) -> torch.Tensor:
    """An uninitialised tensor for the KV of so many tokens."""
    return new_kv.empty_slots(_pool(scheduler), tokens)


@contextmanager
def locked(scheduler: Any, prefixes: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Keep (request, length) prefixes from being evicted meanwhile."""
    locks = [lock(scheduler, request, length) for request, length in prefixes if length]
    try:
        yield
    finally:
        for one in locks:
            scheduler.tree_cache.unlock(one)


def lock(scheduler: Any, request: Any, length: int) -> Any:
    """Keep the request's prefix of this length from being evicted until ``tree_cache.unlock``."""
    found = _match(scheduler, _key_of(scheduler, request, length))
    return scheduler.tree_cache.lock(found.last_device_node)


def cost(scheduler: Any, request: Any, length: int) -> int:
    """How many tokens less this rank can evict once the request uses so much of its prefix."""
    if not length:
        return 0
    before = _evictable(scheduler)
    held = lock(scheduler, request, length)
    after = _evictable(scheduler)
    scheduler.tree_cache.unlock(held)
    return before - after


def room(scheduler: Any) -> tuple[int, int]:
    """What this rank has for further requests: tokens of KV, unused prefixes included, and
    requests."""
    free = scheduler.token_to_kv_pool_allocator.available_size()
    return int(free) + _evictable(scheduler), int(scheduler.req_to_token_pool.available_size())


@contextmanager
def agreed_prefixes(
    scheduler: Any,
    requests: Sequence[Any],
    lengths: Sequence[int],
    budget: Budget | None = None,
) -> Iterator[None]:
    """Let the scheduler see ``requests`` only, which head its queue, each with a cached prefix of
    no more than its length, and the memory of ``budget`` if there is one."""
    grammar = scheduler.grammar_manager
    hidden, compiling = scheduler.waiting_queue[len(requests) :], grammar.grammar_queue
    scheduler.waiting_queue, grammar.grammar_queue = list(requests), []
    for request, length in zip(requests, lengths, strict=True):
        setattr(request, AGREED, length)
    marked = [*requests, scheduler.token_to_kv_pool_allocator] if budget else []
    for one in marked:
        setattr(one, BUDGET, budget)
    try:
        yield
    finally:
        for one in marked:
            delattr(one, BUDGET)
        for request in requests:
            delattr(request, AGREED)
        scheduler.waiting_queue = [*scheduler.waiting_queue, *hidden]
        grammar.grammar_queue = compiling


def chunk_tokens(scheduler: Any) -> int:
    """The most new tokens that one prefill step takes."""
    limits = (scheduler.chunked_prefill_size, scheduler.max_prefill_tokens)
    return min(int(limit) for limit in limits if limit is not None and limit > 0)


def page_tokens(scheduler: Any) -> int:
    return int(scheduler.page_size)


def _key_of(scheduler: Any, request: Any, length: int | None = None) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = tokens_of(request)
    limit = request._compute_max_prefix_len(len(tokens)) if length is None else length
    return RadixKey(
        token_ids=tokens[:limit], extra_key=request.extra_key, cache_salt=request.cache_salt
    ).page_aligned(page_tokens(scheduler))


def _evictable(scheduler: Any) -> int:
    """Unused prefixes, and what copies give back when it is needed."""
    return int(scheduler.tree_cache.evictable_size()) + loans_of(scheduler).tokens


def _match(scheduler: Any, key: Any) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    return scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))


def _pool(scheduler: Any) -> Any:
    return scheduler.token_to_kv_pool_allocator.get_kvcache()
