"""Give every rank the KV capacity of the rank of its widest block that has least."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def as_the_least(original: Callable[..., int], configurator: Any, token_capacity: int) -> int:
    return seams.rank.least_capacity(original(configurator, token_capacity))


PATCH = Patch(
    id="least-capacity",
    target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._apply_token_constraints",
    kind=Kind.AROUND,
    hook=as_the_least,
    processes=(Process.RANK,),
    why="each rank sizes its KV pool by what its own GPU has free; ranks of a block that differ "
    "by a page admit and retract differently once memory is short, and fall out of step",
    upstream="agreed on inside one WORLD only; each data-parallel replica is one of its own",
    remove_when="KV capacity is agreed on across data-parallel replicas",
    signature=("self", "token_capacity"),
    fingerprint="80a5d555224f8405",
)
