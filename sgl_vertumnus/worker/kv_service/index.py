"""A rank's cached blocks by their hashes, as its KV events tell them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from vertumnus_patches.block_events import BlockEvent, Cleared, Namespace, Removed, Stored


class NotHeld(LookupError):
    """Blocks that the rank does not have, or that are no chain; the message says which."""


@dataclass(frozen=True, slots=True)
class Block:
    """``page`` holds its tokens as 64-bit integers; ``version`` is the number of the batch of
    events that told of it, the first being 1."""

    parent: int | None
    page: bytes
    namespace: Namespace
    version: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A prefix: what its blocks stand for."""

    tokens: array[int]
    namespace: Namespace
    newest: int


class BlockIndex:
    """Parents come before their children, in ``runs``, too."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._version = 0
        self._is_behind = False

    @property
    def version(self) -> int:
        """How many batches of events the rank has published."""
        return self._version

    def note(self, event: BlockEvent) -> None:
        """Of the batch that is published next."""
        self._is_behind = True
        match event:
            case Stored(hashes, parent, pages, namespace):
                for block_hash, page in zip(hashes, pages, strict=True):
                    block = Block(parent, page, namespace, self._version + 1)
                    self._blocks.setdefault(block_hash, block)
                    parent = block_hash
            case Removed(hashes):
                for block_hash in hashes:
                    self._blocks.pop(block_hash, None)
            case Cleared():
                self._blocks.clear()

    def published(self) -> None:
        """What has been noted since the last call, if anything, has been published."""
        if self._is_behind:
            self._version += 1
            self._is_behind = False

    def published_again(self) -> None:
        """A batch went out that says nothing new."""
        self._version += 1

    def held(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks of a chain are held."""
        for count, block_hash in enumerate(blocks):
            if block_hash not in self._blocks:
                return count
        return len(blocks)

    def chain(self, blocks: Sequence[int], *, since: int = 0) -> Chain:
        """The prefix that the blocks are, from the root; ``newest`` is the version of the newest
        of ``blocks[since:]``. Raises ``NotHeld``."""
        tokens: array[int] = array("q")
        namespace: Namespace = (None, None)
        newest, parent = 0, None
        for at, block_hash in enumerate(blocks):
            block = self._blocks.get(block_hash)
            if block is None:
                raise NotHeld(f"block {at + 1} of {len(blocks)} is not held")
            if block.parent != parent:
                raise NotHeld(f"block {at + 1} of {len(blocks)} does not follow the one before")
            tokens.frombytes(block.page)
            namespace, parent = block.namespace, block_hash
            if at >= since:
                newest = max(newest, block.version)
        return Chain(tokens, namespace, newest)

    def hashes(self) -> list[int]:
        """Of all blocks, parents first."""
        return list(self._blocks)

    def runs(self, hashes: Sequence[int]) -> list[Stored]:
        """Those of the blocks that are held, as they would be stored now."""
        runs: list[tuple[list[int], int | None, list[bytes], Namespace]] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            if runs and block.parent == runs[-1][0][-1]:
                runs[-1][0].append(block_hash)
                runs[-1][2].append(block.page)
            else:
                runs.append(([block_hash], block.parent, [block.page], block.namespace))
        return [Stored(tuple(names), parent, tuple(pages), ns) for names, parent, pages, ns in runs]
