"""SGLang's chained block hashes of a prompt, as pools publish them (``"format": "dynamo"``).

``digest_i = SHA256(digest_{i-1} || tokens of page i as u32 little-endian)``; KV events carry
the first eight bytes, big-endian and signed (``mem_cache/utils.py``, ``hash_str_to_int64``).
A prompt with an ``extra_key`` or a ``cache_salt`` is in a namespace of its own: a salt seeds the
chain, and each hash of the chain is hashed once more with both (``disaggregation/kv_events.py``,
``namespaced_block_hash``).
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from vertumnus_router.core.types import BlockHash

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"


def block_hashes(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
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
    digest = b"" if cache_salt is None else _sha256(_SALT_TAG + cache_salt.encode())
    digests: list[bytes] = []
    for end in range(page_bytes, len(pages) + 1, page_bytes):
        digest = _sha256(digest + pages[end - page_bytes : end])
        digests.append(digest)
    if extra_key is not None or cache_salt is not None:
        seed = _namespace_seed(extra_key, cache_salt)
        digests = [_sha256(seed + one[:8]) for one in digests]
    return tuple(BlockHash(int.from_bytes(one[:8], "big", signed=True)) for one in digests)


def _namespace_seed(*parts: str | None) -> bytes:
    """``kv_event_namespace_seed``: absent, empty and joined parts all differ."""
    text = _NAMESPACE_TAG
    for part in parts:
        if part is None:
            text += b"\x00"
        else:
            encoded = part.encode()
            text += b"\x01" + len(encoded).to_bytes(8, "little") + encoded
    return _sha256(text)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
