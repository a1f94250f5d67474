"""Take the memory of copies back before an allocation for requests fails."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.prefix_marks import LOANS
from vertumnus_patches.record import Kind, Patch, Process


def recall_if_short(
    original: Callable[..., bool | None], allocator: Any, tree_cache: Any, num_tokens: int
) -> bool | None:
    done = original(allocator, tree_cache, num_tokens)
    loans = getattr(allocator, LOANS, None)
    if loans is None or allocator.available_size() >= num_tokens:
        return done
    loans.recall()
    return original(allocator, tree_cache, num_tokens)


PATCH = Patch(
    id="loans-recalled",
    target="sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.evict_to_free_tokens",
    kind=Kind.AROUND,
    hook=recall_if_short,
    processes=(Process.RANK,),
    why="copies of prefixes use memory that the scheduler counts as free, because the ranks of a "
    "block must plan alike; it must be there when a request needs it",
    upstream="prefixes are not copied between ranks",
    remove_when="the scheduler knows of memory that it may take back",
    signature=("self", "tree_cache", "num_tokens"),
    fingerprint="78e195c1a4b54e9d",
)
