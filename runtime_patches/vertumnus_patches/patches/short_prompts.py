"""Shard a batch over the CP group even when it holds very short prompts."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process


def shard_any_mixture(
    original: Callable[..., bool], strategy: Any, num_tokens: int, forward_batch: Any
) -> bool:
    if original(strategy, num_tokens, forward_batch):
        return True
    lengths = getattr(forward_batch, "extend_seq_lens_cpu", None)
    if lengths is None or not _is_torch_native():
        return False
    mode = forward_batch.forward_mode
    return (
        strategy.cp_size > 1
        and mode.is_context_parallel_extend()
        and not mode.is_mixed()
        # Below two tokens a rank, exchanging KV costs more than computing it everywhere.
        and sum(map(int, lengths)) >= 2 * strategy.cp_size
    )


def _is_torch_native() -> bool:
    """Whether attention accepts segments without a query, as the CPU kernel does."""
    from sglang.srt.runtime_context import attention_backends

    return "torch_native" in attention_backends()


PATCH = Patch(
    id="short-prompts",
    target="sglang.srt.layers.cp.zigzag.ZigzagCPStrategy.can_apply",
    kind=Kind.AROUND,
    hook=shard_any_mixture,
    processes=(Process.RANK,),
    why="upstream drops the whole batch to replicated compute when one of its prompts has "
    "fewer than 2 * C new tokens, so one short prompt costs all the others their speed-up",
    upstream="every sequence must fill its 2 * C segments",
    remove_when="upstream allows empty zigzag segments",
    signature=("self", "num_tokens", "forward_batch"),
    fingerprint="8915ce04a8f36caf",
)
