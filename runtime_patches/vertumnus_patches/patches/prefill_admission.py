"""Let the ranks of a block agree on cached prefixes, or on no prefill at all, before each step."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def admit_alike(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    return seams.rank.admit_prefills(
        scheduler, running_batch, lambda: original(scheduler, running_batch)
    )


PATCH = Patch(
    id="prefill-admission",
    target="sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
    kind=Kind.AROUND,
    hook=admit_alike,
    processes=(Process.RANK,),
    why="ranks that served apart hold different prefixes, and the step that a scheduler plans "
    "depends on them; and a move waits for running prefills, so none may begin meanwhile",
    upstream="the ranks of a CP group have served together since their start",
    remove_when="prefix matches are agreed on across a CP group",
    signature=("self", "running_batch"),
    fingerprint="ef868e474b833b79",
)
