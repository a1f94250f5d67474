"""What a worker may hold, guessed from the requests that were sent to it.

SGLang's router hears nothing from its workers' caches. It keeps a radix tree of the prompts that
each worker was sent (``sgl-model-gateway/src/policies/tree.rs``), of text there, of block hashes
here. Such a hash names its whole prefix, so a set of hashes is the tree.
"""

from collections import OrderedDict

from vertumnus_router.core.types import BlockHash


class RequestTree:
    """The prompts of one worker, as chains of blocks. Its size is its number of blocks."""

    def __init__(self) -> None:
        self._children: dict[BlockHash, int] = {}
        #: every prompt by its last block, least recently sent first
        self._prompts: OrderedDict[BlockHash, tuple[BlockHash, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._children)

    def match(self, blocks: tuple[BlockHash, ...]) -> int:
        """How many blocks of the chain are in the tree, from the first on."""
        low, high = 0, len(blocks)
        while low < high:  # with a block, all before it are in the tree
            middle = (low + high) // 2
            if blocks[middle] in self._children:
                low = middle + 1
            else:
                high = middle
        return low

    def insert(self, blocks: tuple[BlockHash, ...]) -> None:
        """A request with this prompt was sent."""
        if not blocks:
            return
        known = self.match(blocks)
        if 0 < known < len(blocks):
            self._children[blocks[known - 1]] += 1
        for block in blocks[known:]:
            self._children[block] = 1
        if known < len(blocks):
            self._children[blocks[-1]] = 0
        self._prompts[blocks[-1]] = blocks
        self._prompts.move_to_end(blocks[-1])

    def evict(self, max_blocks: int) -> None:
        """Forget the ends of the least recently sent prompts until the tree is no larger."""
        while len(self._children) > max_blocks and self._prompts:
            _, blocks = self._prompts.popitem(last=False)
            depth = len(blocks)
            while depth and not self._children[blocks[depth - 1]]:
                block = blocks[depth - 1]
                if block in self._prompts:
                    break  # the end of a prompt that was sent later
                if len(self._children) <= max_blocks:
                    # What is left of the prompt stays the oldest one.
                    self._prompts[block] = blocks[:depth]
                    self._prompts.move_to_end(block, last=False)
                    break
                del self._children[block]
                depth -= 1
                if depth:
                    self._children[blocks[depth - 1]] -= 1
