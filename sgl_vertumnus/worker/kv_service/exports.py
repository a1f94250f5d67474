"""What other ranks are reading here."""

import itertools
import os
import threading
from typing import Any

from vertumnus_patches import cached_blocks
from vertumnus_patches.loans import Loan, loans_of

from sgl_vertumnus.worker.kv_service.baton import Baton
from sgl_vertumnus.worker.kv_service.index import BlockIndex, NotHeld
from sgl_vertumnus.worker.kv_service.messages import Buffer, Pin, Pinned, ServiceError
from sgl_vertumnus.worker.kv_service.transports import machine

MAX_LEASES = 16
#: Longer than any copy may take.
MAX_LEASE_S = 120.0
#: How long a question waits for the scheduler's thread.
BATON_S = 5.0
#: A lease that ends by itself waits for it as long as it takes.
_PATIENCE_S = 3600.0


class Exports:
    """Prefixes that stay in place while another rank reads them."""

    def __init__(self, baton: Baton, index: BlockIndex) -> None:
        self._baton = baton
        self._index = index
        self._numbers = itertools.count(1)
        self._leases: dict[int, tuple[Loan, threading.Timer]] = {}

    def pin(self, scheduler: Any, ask: Pin) -> Pinned:
        """Raises ``ServiceError``."""
        memory = cached_blocks.memory(scheduler)
        if ask.kind != memory.kind:
            raise ServiceError(
                f"KV that differs is not copied: {memory.kind} there, {ask.kind} here"
            )
        if not 0 <= ask.start < len(ask.blocks) or ask.lease_s <= 0:
            raise ServiceError("nothing is asked for")
        with self._baton.held(BATON_S):
            if len(self._leases) >= MAX_LEASES:
                raise ServiceError("busy: too many ranks read here")
            cached_blocks.publish(scheduler)
            try:
                chain = self._index.chain(ask.blocks)
            except NotHeld as exc:
                raise ServiceError(f"the source does not hold it: {exc}") from exc
            loan = cached_blocks.lend(scheduler, chain.tokens, chain.namespace)
            if loan is None:
                raise ServiceError("the source does not hold it")
            pages = cached_blocks.pages_of(scheduler, loan)[ask.start :]
            lease = next(self._numbers)
            timer = threading.Timer(
                min(ask.lease_s, MAX_LEASE_S), self.release, (scheduler, lease, _PATIENCE_S)
            )
            timer.daemon = True
            self._leases[lease] = loan, timer
        timer.start()
        return Pinned(
            lease=lease,
            tokens=chain.tokens.tobytes(),
            extra_key=chain.namespace[0],
            cache_salt=chain.namespace[1],
            pages=pages.numpy().tobytes(),
            machine=machine(),
            pid=os.getpid(),
            buffers=tuple(Buffer(b.address, b.slot_bytes) for b in memory.buffers),
        )

    def release(self, scheduler: Any, lease: int, timeout_s: float = BATON_S) -> bool:
        """Whether the prefix has stayed in place until now."""
        with self._baton.held(timeout_s):
            loan, timer = self._leases.pop(lease, (None, None))
            if loan is None or timer is None:
                return False
            timer.cancel()
            return loans_of(scheduler).end(loan)
