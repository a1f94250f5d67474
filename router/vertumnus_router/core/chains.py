"""Chains of block hashes: each hash covers the whole prefix that it ends."""

from collections.abc import Sequence

from vertumnus_router.core.types import BlockHash, Request


def shared_depth(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """How many blocks two chains begin with alike. Chained hashes: once apart, always apart."""
    if not one or not other or one[0] != other[0]:
        return 0
    low, high = 1, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def usable_blocks(request: Request, block_tokens: int) -> int:
    """The blocks that a prefill could find: without the last token, which is always computed."""
    return min(len(request.blocks), max(0, request.input_tokens - 1) // block_tokens)
