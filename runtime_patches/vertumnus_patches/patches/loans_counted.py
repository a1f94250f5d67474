"""Know of the slots that copies have reserved when looking for leaks."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.prefix_marks import LOANS
from vertumnus_patches.record import Kind, Patch, Process


def with_reserved(
    original: Callable[..., tuple[bool, str]], checker: Any, ps: Any, uncached: int = 0
) -> tuple[bool, str]:
    loans = getattr(checker.token_to_kv_pool_allocator, LOANS, None)
    reserved = 0 if loans is None else loans.reserved_tokens
    return original(checker, ps, uncached + reserved)


PATCH = Patch(
    id="loans-counted",
    target="sglang.srt.managers.scheduler_components.invariant_checker."
    "SchedulerInvariantChecker._check_full_pool",
    kind=Kind.AROUND,
    hook=with_reserved,
    processes=(Process.RANK,),
    why="slots that a copy of a prefix will be put in belong to no request and to no tree, and "
    "an idle rank takes such slots for a leak",
    upstream="every slot is free, cached or a request's",
    remove_when="the scheduler knows of memory that it may take back",
    signature=("self", "ps", "uncached"),
    fingerprint="9348729b8c5a3e1c",
)
