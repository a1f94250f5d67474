"""Cached prefixes of one rank by their tokens: pin, take in, delete, publish.

For whoever may touch the tree; no request is involved. ``tokens`` are an ``array("q")`` of whole
pages.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vertumnus_patches.block_events import Namespace, Stored, stored_event
from vertumnus_patches.loans import Loan, loans_of

__all__ = [
    "Buffer",
    "Memory",
    "delete",
    "hold",
    "lend",
    "memory",
    "pages_of",
    "publish",
    "publish_again",
    "store",
]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Keys or values of one layer: slot s is at ``address + s * slot_bytes``."""

    address: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a rank's KV is. Ranks whose ``kind`` is equal may copy each other's bytes."""

    kind: str
    page_tokens: int
    buffers: tuple[Buffer, ...]

    @property
    def token_bytes(self) -> int:
        return sum(buffer.slot_bytes for buffer in self.buffers)


def memory(scheduler: Any) -> Memory:
    """Of the rank's KV pool; constant for its life, but for the ``kind`` when its weights are
    updated. Raises ``ValueError`` where slots are not contiguous."""
    from sglang.srt.runtime_context import get_serving

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    layers = [tensor for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for tensor in pair]
    for tensor in layers:
        if not tensor.is_contiguous():
            raise ValueError("the KV of a slot is not contiguous")
    page = int(scheduler.page_size)
    model = str(getattr(scheduler.model_config, "model_path", "")).rstrip("/").rpartition("/")[2]
    shapes = [tuple(tensor.shape[1:]) for tensor in layers]
    shape = f"{len(shapes) // 2} x {shapes[0]}, {shapes[1]}"
    return Memory(
        kind=f"{model}: {pool.dtype}, layers {shape}, pages of {page}, "
        f"weights {get_serving().weight_version!r}",
        page_tokens=page,
        buffers=tuple(
            Buffer(t.data_ptr(), t.stride(0) * t.element_size(), int(t.shape[0])) for t in layers
        ),
    )


def lend(scheduler: Any, tokens: array[int], namespace: Namespace) -> Loan | None:
    """Keep this prefix from being evicted; None when it is not held as a whole."""
    if not tokens:
        return loans_of(scheduler).lend()
    found = _match(scheduler, tokens, namespace)
    if found.device_prefix_len < len(tokens):
        return None
    return loans_of(scheduler).lend(node=found.last_device_node)


def pages_of(scheduler: Any, loan: Loan) -> torch.Tensor:
    """The pages [blocks] of a prefix on loan: slot number / tokens of a page, from the root."""
    page = int(scheduler.page_size)
    path: torch.Tensor = scheduler.tree_cache.path_device_indices(loan.lock.node)
    return path[::page] // page


def hold(scheduler: Any, loan: Loan, tokens: int) -> bool:
    """Add slots for so many tokens to a loan, taken from unused prefixes if need be, but from no
    loan; whether there was room."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = scheduler.token_to_kv_pool_allocator
    short = tokens - allocator.available_size()
    if short > scheduler.tree_cache.evictable_size():
        return False  # and nothing is evicted for nothing
    if short > 0:
        scheduler.tree_cache.evict_for_alloc(EvictParams(num_tokens=short))
    loan.slots = allocator.alloc(tokens)
    return loan.slots is not None


def store(scheduler: Any, loan: Loan, tokens: array[int], namespace: Namespace) -> None:
    """Make the prefix on loan, and behind it the loan's slots, which hold the KV of the rest of
    ``tokens``, a cached prefix, and end the loan. What came into the tree meanwhile stays as it is.

    Raises ``ValueError`` for a loan that has been recalled.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    slots = loan.slots
    if not loan.is_held or slots is None:
        raise ValueError("the memory of this copy was needed for requests")
    tree = scheduler.tree_cache
    base = slots[:0] if loan.lock is None else tree.path_device_indices(loan.lock.node)
    loan.slots = None  # the tree's from now on; it frees those of what it has by now
    tree.insert(
        InsertParams(
            key=_key(scheduler, tokens, namespace),
            value=torch.cat([base, slots]),
            prev_prefix_len=len(base),
            inserted_len=len(base),
            priority=0,
        )
    )
    loans_of(scheduler).end(loan)


def delete(scheduler: Any, tokens: array[int], namespace: Namespace, keep: int) -> str | None:
    """Delete the prefix behind its first ``keep`` tokens; why not, if it cannot be."""
    tree = scheduler.tree_cache
    found = _match(scheduler, tokens, namespace)
    if found.device_prefix_len < len(tokens):
        return "the prefix is not held"
    tip = found.last_device_node
    if keep:
        _match(scheduler, tokens[:keep], namespace)  # splits the node that spans both parts
    (path,) = tree.tree_core.collect_path_info([tip])
    doomed = [node for node in path if node.path_start >= keep]
    if [node.num_children for node in doomed] != [1] * (len(doomed) - 1) + [0]:
        return "other prefixes continue it"
    before = tree.evictable_size()
    lock = tree.lock(tip)
    unused = before - tree.evictable_size()
    tree.unlock(lock)
    # What is locked is locked from the root on; the core does not survive evicting any of it.
    if unused < len(tokens) - keep:
        return "it is in use"
    freed = dict.fromkeys(tree.tree_components, 0)
    for node in reversed(doomed):
        tree._evict_device_leaf(node.node_id, freed)
    return None


def publish(scheduler: Any) -> None:
    """Publish what has happened to the tree so far."""
    scheduler.kv_events_publisher.publish_kv_events()


def publish_again(scheduler: Any, runs: Sequence[Stored]) -> None:
    """Publish blocks that are held, as one batch."""
    from sglang.srt.disaggregation.kv_events import KVEventBatch

    events = [stored_event(run) for run in runs]
    stamp = time.time()  # noqa: TID251  SGLang stamps its batches so
    scheduler.kv_events_publisher.kv_event_publisher.publish(KVEventBatch(stamp, events))


def _key(scheduler: Any, tokens: array[int], namespace: Namespace) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    extra_key, cache_salt = namespace
    return RadixKey(token_ids=tokens, extra_key=extra_key, cache_salt=cache_salt)


def _match(scheduler: Any, tokens: array[int], namespace: Namespace) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    key = _key(scheduler, tokens, namespace)
    return scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))
