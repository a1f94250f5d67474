"""Tell the rank runtime which blocks enter and leave the tree, with their namespaces."""

from typing import Any

from vertumnus_patches.block_events import block_event
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def tell_block(result: Any, event: tuple[Any, ...], *args: Any, **kwargs: Any) -> None:
    seams.rank.on_block_event(block_event(result, event))


PATCH = Patch(
    id="block-events",
    target="sglang.srt.mem_cache.rust_tree_core.adapter._kv_event_from_tagged",
    kind=Kind.AFTER,
    hook=tell_block,
    processes=(Process.RANK,),
    why="copies and deletions name prefixes by their block hashes; the rank must know the tokens "
    "and the namespace behind each",
    upstream="events have hashes, tokens and salt, but not the extra key",
    remove_when="the tree can be asked for a prefix by its hash",
    signature=("event", "lora_names", "dynamo_format"),
    fingerprint="9e1c847959da2c73",
)
