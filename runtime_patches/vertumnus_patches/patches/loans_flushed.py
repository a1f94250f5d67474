"""Take the memory of copies back before the tree is emptied."""

from typing import Any

from vertumnus_patches.prefix_marks import LOANS
from vertumnus_patches.record import Kind, Patch, Process


def recall(tree: Any) -> None:
    loans = getattr(tree.token_to_kv_pool_allocator, LOANS, None)
    if loans is not None:
        loans.recall()


PATCH = Patch(
    id="loans-flushed",
    target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
    kind=Kind.BEFORE,
    hook=recall,
    processes=(Process.RANK,),
    why="a flush frees every slot and every lock; a copy that went on would write into the KV of "
    "later requests",
    upstream="prefixes are not copied between ranks",
    remove_when="the scheduler knows of memory that it may take back",
    signature=("self",),
    fingerprint="14d936f7029d8534",
)
