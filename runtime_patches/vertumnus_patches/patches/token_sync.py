"""Make the leader's sampled tokens the tokens of the whole block."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def sync_with_leader(
    result: Any, sampler: Any, batch_next_token_ids: Any, sampling_info: Any
) -> None:
    seams.rank.sync_token_ids(batch_next_token_ids)


PATCH = Patch(
    id="token-sync",
    target="sglang.srt.layers.sampler.Sampler._sync_token_ids_across_tp",
    kind=Kind.AFTER,
    hook=sync_with_leader,
    processes=(Process.RANK,),
    why="logits of two ranks may differ in low bits and random states do differ; one token "
    "apart and the block's schedules diverge for good",
    upstream="syncs over the TP group, and only on request",
    remove_when="token sync covers a CP group across replicas",
    signature=("self", "batch_next_token_ids", "sampling_info"),
    fingerprint="6a72df918de6f975",
)
