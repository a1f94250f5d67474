"""Evict the copies first that another rank of the block keeps."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.in_hand import home_of
from vertumnus_patches.prefix_marks import SURPLUS_PRIORITY
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def lower_surplus(original: Callable[..., None], tree: Any, req: Any, **kwargs: Any) -> None:
    if seams.rank.answers(home_of(req)):  # its home is the one that keeps it
        original(tree, req, **kwargs)
        return
    given, req.priority = req.priority, SURPLUS_PRIORITY
    try:
        original(tree, req, **kwargs)
    finally:
        req.priority = given


PATCH = Patch(
    id="keep-one",
    target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
    kind=Kind.AROUND,
    hook=lower_surplus,
    processes=(Process.RANK,),
    why="every rank of a block stores the KV of all its requests; when memory runs out, one copy "
    "is enough, and the others of the block can take it over from there",
    upstream="the ranks of a CP group evict alike",
    remove_when="upstream shards cached KV over a CP group",
    signature=("self", "req", "up_to", "kwargs"),
    fingerprint="f68aeb8c88ed10d0",
)
