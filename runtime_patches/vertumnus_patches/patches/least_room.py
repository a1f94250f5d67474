"""Plan a step with the memory of the rank of the block that has least, and with what copies have
borrowed."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.prefix_marks import BUDGET, LOANS
from vertumnus_patches.record import Kind, Patch, Process


def as_agreed(original: Callable[..., int], budget: Any) -> int:
    agreed = getattr(budget.allocator, BUDGET, None)
    if agreed is not None:
        return int(agreed.tokens)
    loans = getattr(budget.allocator, LOANS, None)
    return original(budget) + (0 if loans is None else int(loans.tokens))


PATCH = Patch(
    id="least-room",
    target="sglang.srt.mem_cache.prefill_budget.PrefillBudget._available_and_evictable",
    kind=Kind.AROUND,
    hook=as_agreed,
    processes=(Process.RANK,),
    why="a rank keeps the KV that it is sending to decode servers, the others of its block do "
    "not, and each copies prefixes for itself; what fits into a step must be the same on all of "
    "them",
    upstream="all ranks of a CP group keep the KV of all requests equally long",
    remove_when="the memory of a step is agreed on across a CP group",
    signature=("self",),
    fingerprint="816122bc5102213c",
)
