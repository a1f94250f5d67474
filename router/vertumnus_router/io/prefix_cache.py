"""What is known of the beginnings of prompts seen before, so that only what is new is worked out.

A prompt comes as parts. What a part adds to the chain of block hashes depends on everything before
it and on itself, so it is kept under a digest of all of that. Token ids are not kept: nobody
asks for them again.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain as chained

from vertumnus_router.core.types import BlockHash
from vertumnus_router.io.hashing import BlockChain

#: Measured with tracemalloc: an entry without blocks, and a hash in a tuple.
_ENTRY_BYTES, _HASH_BYTES = 480, 44


@dataclass(frozen=True, slots=True)
class _Known:
    """``blocks`` are those that this part has filled up, ``chain`` is where it ends."""

    chain: BlockChain
    blocks: tuple[BlockHash, ...]

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.chain.tail) + _HASH_BYTES * len(self.blocks)


class PrefixCache:
    """Bounded by bytes; what was not used for longest goes first. Safe to share between threads.

    ``reused_bytes`` and ``worked_bytes`` count how much of all prompts (their parts as given) was
    known and how much was not.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        #: longest unused first; a prompt's later parts before its earlier ones
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self.size_bytes = 0
        self.reused_bytes = 0
        self.worked_bytes = 0

    def extend(
        self,
        kind: str,
        start: BlockChain,
        parts: Sequence[bytes],
        words: Callable[[int], Iterable[bytes]],
    ) -> tuple[BlockChain, tuple[BlockHash, ...]]:
        """The chain behind all parts, and the blocks that they fill up.

        ``kind`` says what the parts are, and with them, where they were cut: equal bytes of one
        kind stand for equal tokens.
        ``words(n)`` gives the token ids of every part from the n-th on, as u32 little-endian. The
        last part is never kept: it is what the next prompt will have something else in place of.
        """
        keys = _keys(kind, start, parts)
        found = self._look_up(keys)
        chain = found[-1].chain if found else start
        new: list[_Known] = []
        for one in words(len(found)):
            chain, blocks = chain.extend(one)
            new.append(_Known(chain, blocks))
        self._keep(keys, len(found), new[:-1])
        known = sum(len(part) for part in parts[: len(found)])
        with self._lock:
            self.reused_bytes += known
            self.worked_bytes += sum(map(len, parts)) - known
        return chain, tuple(chained.from_iterable(one.blocks for one in (*found, *new)))

    def _look_up(self, keys: Sequence[bytes]) -> list[_Known]:
        with self._lock:
            found: list[_Known] = []
            for key in keys:
                one = self._known.get(key)
                if one is None:
                    break
                found.append(one)
            return found

    def _keep(self, keys: Sequence[bytes], found: int, new: Sequence[_Known]) -> None:
        with self._lock:
            for key, one in reversed(list(zip(keys[found:], new, strict=True))):
                if key not in self._known:  # else another thread was faster
                    self._known[key] = one
                    self.size_bytes += one.size_bytes
            for key in reversed(keys[:found]):
                if key in self._known:
                    self._known.move_to_end(key)
            while self.size_bytes > self._limit_bytes:
                _, gone = self._known.popitem(last=False)
                self.size_bytes -= gone.size_bytes


def _keys(kind: str, start: BlockChain, parts: Sequence[bytes]) -> list[bytes]:
    """One for each part but the last: a digest of the start and of all parts up to its end."""
    digest = hashlib.sha256(repr((kind, start)).encode())
    keys: list[bytes] = []
    for part in parts[:-1]:
        digest.update(part)
        keys.append(digest.copy().digest())
    return keys
