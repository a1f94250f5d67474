"""Shard a step over the CP group by its work, not by its shortest prompt."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def shard_by_work(
    original: Callable[..., bool], strategy: Any, num_tokens: int, forward_batch: Any
) -> bool:
    new_tokens = getattr(forward_batch, "extend_seq_lens_cpu", None)
    if new_tokens is None or not _allows_empty_segments():
        return original(strategy, num_tokens, forward_batch)
    mode = forward_batch.forward_mode
    if not mode.is_context_parallel_extend() or mode.is_mixed():
        return False
    # SGLang asks several times per step, also after it has built the metadata.
    if forward_batch.attn_cp_metadata is not None:
        return True
    return seams.rank.shards(
        [int(length) for length in new_tokens],
        [int(length) for length in forward_batch.seq_lens_cpu],
        strategy.cp_size,
    )


def _allows_empty_segments() -> bool:
    """Whether attention accepts segments without a query, as our adapters do."""
    from sglang.srt.runtime_context import attention_backends

    prefill, _ = attention_backends()
    return prefill in ("torch_native", "flashinfer")


PATCH = Patch(
    id="short-prompts",
    target="sglang.srt.layers.cp.zigzag.ZigzagCPStrategy.can_apply",
    kind=Kind.AROUND,
    hook=shard_by_work,
    processes=(Process.RANK,),
    why="upstream drops the whole batch to replicated compute when one of its prompts has "
    "fewer than 2 * C new tokens, so one short prompt costs all the others their speed-up; and "
    "it shards steps that are too small to gain from it",
    upstream="every sequence must fill its 2 * C segments",
    remove_when="upstream allows empty zigzag segments and a smallest step",
    signature=("self", "num_tokens", "forward_batch"),
    fingerprint="8915ce04a8f36caf",
)
