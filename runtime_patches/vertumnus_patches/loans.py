"""Memory of a rank that copies of prefixes use for as long as no request needs it.

The ranks of a block plan equal steps, and each copies for itself: what a copy holds is counted as
free, and given back as soon as an allocation would fail without it.
"""

import threading
from typing import Any

import torch

from vertumnus_patches.prefix_marks import LOANS

__all__ = ["Loan", "Loans", "loans_of"]


class Loan:
    """Slots [tokens] outside the tree, a prefix that is kept from being evicted, or both.

    Whoever writes to the slots from outside the scheduler's thread does it with ``use``, and while
    ``is_held``, in pieces of a few milliseconds: a recall waits for it.
    """

    def __init__(self, slots: torch.Tensor | None, lock: Any) -> None:
        self.slots = slots
        self.lock = lock
        self.is_held = True
        self.use = threading.Lock()


class Loans:
    """Of one rank; to be called by who may touch its tree."""

    def __init__(self, scheduler: Any) -> None:
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._loans: set[Loan] = set()

    @property
    def reserved_tokens(self) -> int:
        """Slots that neither the tree nor the allocator has."""
        return sum(len(loan.slots) for loan in self._loans if loan.slots is not None)

    @property
    def tokens(self) -> int:
        """What a recall would add to what is free or can be evicted."""
        if not self._loans:
            return 0
        # The locks of two loans, or of a loan and a request, may share a part of their paths.
        before = self._tree.evictable_size()
        for loan in self._loans:
            self._tree.unlock(loan.lock)
        without = self._tree.evictable_size()
        for loan in self._loans:
            if loan.lock is not None:
                loan.lock = self._tree.lock(loan.lock.node)
        return self.reserved_tokens + int(without - before)

    def lend(self, *, slots: torch.Tensor | None = None, node: Any = None) -> Loan:
        """Take over ``slots``, and lock the path to ``node``."""
        loan = Loan(slots, None if node is None else self._tree.lock(node))
        self._loans.add(loan)
        return loan

    def end(self, loan: Loan) -> bool:
        """Give back what the loan has; whether it was held until now."""
        if loan not in self._loans:
            return False
        self._loans.remove(loan)
        with loan.use:
            loan.is_held = False
        if loan.slots is not None and len(loan.slots):
            self._allocator.free(loan.slots)
        self._tree.unlock(loan.lock)
        return True

    def recall(self) -> None:
        """End all of them."""
        for loan in list(self._loans):
            self.end(loan)


def loans_of(scheduler: Any) -> Loans:
    """The scheduler's loans, kept on its allocator."""
    allocator = scheduler.token_to_kv_pool_allocator
    loans = getattr(allocator, LOANS, None)
    if loans is None:
        loans = Loans(scheduler)
        setattr(allocator, LOANS, loans)
    return loans
