"""SGLang's chained block hashes of a prompt.

``digest_i = SHA256(digest_{i-1} || tokens of page i as u32 little-endian)``; KV events carry
the first eight bytes, big-endian and signed (``mem_cache/utils.py``, ``hash_str_to_int64``).
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from vertumnus_router.core.types import BlockHash

_SALT_TAG = b"sglang-cache-salt-v1\0"


def salt_seed(cache_salt: str) -> bytes:
    """What the chain starts from when the request names a ``cache_salt``
    (``compute_node_event_hash_values``)."""
    return hashlib.sha256(_SALT_TAG + cache_salt.encode()).digest()


def block_hashes(
    token_ids: Sequence[int], block_tokens: int, seed: bytes = b""
) -> tuple[BlockHash, ...]:
    """The hashes of the full blocks of ``token_ids``, first to last.

    Raises ``OverflowError`` or ``TypeError`` for an id that is no unsigned 32-bit integer.
    """
    words = array("I", token_ids)
    if words.itemsize != 4:  # pragma: no cover - no supported platform
        raise TypeError("array('I') does not hold 32-bit words here")
    if sys.byteorder == "big":  # pragma: no cover
        words.byteswap()
    pages = memoryview(words).cast("B")
    page_bytes = 4 * block_tokens
    digest = seed
    hashes: list[BlockHash] = []
    for end in range(page_bytes, len(pages) + 1, page_bytes):
        digest = hashlib.sha256(digest + pages[end - page_bytes : end]).digest()
        hashes.append(BlockHash(int.from_bytes(digest[:8], "big", signed=True)))
    return tuple(hashes)
