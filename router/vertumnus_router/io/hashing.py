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
from dataclasses import dataclass

from vertumnus_router.core.types import BlockHash

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockChain:
    """Where the chain stands after some tokens: all that it takes to go on from there.

    ``seed`` is that of the namespace, None outside of any. ``digest`` is of the last full block,
    ``tail`` the words of the block that is not full yet. ``tokens`` counts all so far.
    """

    block_tokens: int
    seed: bytes | None
    digest: bytes
    tail: bytes = b""
    tokens: int = 0

    @classmethod
    def start(
        cls, block_tokens: int, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> "BlockChain":
        """The chain of no tokens."""
        named = extra_key is not None or cache_salt is not None
        return cls(
            block_tokens=block_tokens,
            seed=_namespace_seed(extra_key, cache_salt) if named else None,
            digest=b"" if cache_salt is None else _sha256(_SALT_TAG + cache_salt.encode()),
        )

    def extend(self, words: bytes) -> tuple["BlockChain", tuple[BlockHash, ...]]:
        """The chain after more tokens, and the hashes of the blocks that they fill up."""
        pages = memoryview(self.tail + words)
        page_bytes = _WORD_BYTES * self.block_tokens
        digest, digests, full = self.digest, [], 0
        for end in range(page_bytes, len(pages) + 1, page_bytes):
            digest = _sha256(digest + pages[full:end])
            digests.append(digest)
            full = end
        if self.seed is not None:
            digests = [_sha256(self.seed + one[:8]) for one in digests]
        longer = BlockChain(
            self.block_tokens,
            self.seed,
            digest,
            bytes(pages[full:]),
            self.tokens + len(words) // _WORD_BYTES,
        )
        hashes = (int.from_bytes(one[:8], "big", signed=True) for one in digests)
        return longer, tuple(BlockHash(one) for one in hashes)


def words_of(token_ids: Sequence[int]) -> bytes:
    """The ids as u32 little-endian. Raises ``OverflowError`` or ``TypeError`` for an id that is no
    unsigned 32-bit integer."""
    words = array("I", token_ids)
    if words.itemsize != _WORD_BYTES:  # pragma: no cover - no supported platform
        raise TypeError("array('I') does not hold 32-bit words here")
    if sys.byteorder == "big":  # pragma: no cover
        words.byteswap()
    return words.tobytes()


def block_hashes(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> tuple[BlockHash, ...]:
    """The hashes of the full blocks of ``token_ids``, first to last; raises what ``words_of``
    does."""
    chain = BlockChain.start(block_tokens, extra_key=extra_key, cache_salt=cache_salt)
    return chain.extend(words_of(token_ids))[1]


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
