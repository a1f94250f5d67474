"""The KV blocks of the requests that each worker has, as a router can count them for itself.

Dynamo's ``ActiveSequences`` (``lib/kv-router/src/sequences/``): the blocks of a prompt are active
from its dispatch until the request ends, and one that several requests share counts once.
"""

from collections import Counter

from vertumnus_router.core.types import BlockHash, RequestId, WorkerId


class ActiveBlocks:
    def __init__(self) -> None:
        self._blocks: dict[WorkerId, Counter[BlockHash]] = {}
        self._requests: dict[RequestId, tuple[WorkerId, tuple[BlockHash, ...]]] = {}

    def __len__(self) -> int:
        """Requests that are counted."""
        return len(self._requests)

    def add(self, request: RequestId, worker: WorkerId, blocks: tuple[BlockHash, ...]) -> None:
        """The worker has the request, whose prompt is the chain ``blocks``."""
        self._requests[request] = worker, blocks
        self._blocks.setdefault(worker, Counter()).update(blocks)

    def free(self, request: RequestId) -> None:
        """It has it no more. Nothing to do for a request that is not counted."""
        counted = self._requests.pop(request, None)
        if counted is None:
            return
        worker, blocks = counted
        active = self._blocks.get(worker)
        if active is None:
            return  # it has no whole block, and the others of the worker have ended
        active.subtract(blocks)
        for block in blocks:
            if not active[block]:
                del active[block]
        if not active:
            del self._blocks[worker]

    def with_request(self, worker: WorkerId, blocks: tuple[BlockHash, ...]) -> int:
        """Active blocks of the worker if it also had a request with this prompt."""
        active = self._blocks.get(worker)
        if active is None:
            return len(blocks)
        low, high = 0, len(blocks)
        while low < high:  # with a block, all before it are active
            middle = (low + high) // 2
            if blocks[middle] in active:
                low = middle + 1
            else:
                high = middle
        return len(active) + len(blocks) - low
