"""Use no more of a cached prefix than all ranks of the block hold."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.prefix_marks import AGREED, BUDGET
from vertumnus_patches.record import Kind, Patch, Process


def within_agreed(original: Callable[..., int], request: Any, input_len: int) -> int:
    longest = original(request, input_len)
    agreed: int | None = getattr(request, AGREED, None)
    if agreed is None:
        return longest
    if (budget := getattr(request, BUDGET, None)) is not None:
        budget.use(request)
    return min(longest, agreed)


PATCH = Patch(
    id="agreed-prefix",
    target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    kind=Kind.AROUND,
    hook=within_agreed,
    processes=(Process.RANK,),
    why="a rank that holds more than the others would plan a shorter prefill than they do",
    upstream="the ranks of a CP group hold the same",
    remove_when="prefix matches are agreed on across a CP group",
    signature=("self", "input_len"),
    fingerprint="a9050ccaee365873",
)
