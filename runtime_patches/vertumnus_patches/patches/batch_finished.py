"""Tell the rank runtime that the results of a forward step have been handed out."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def batch_finished(output: Any, scheduler: Any, batch: Any, result: Any) -> None:
    seams.rank.on_batch_finished(scheduler, batch)


PATCH = Patch(
    id="batch-finished",
    target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    kind=Kind.AFTER,
    hook=batch_finished,
    processes=(Process.RANK,),
    why="the router releases its reservation and corrects its model with the engine's own "
    "count of cached tokens and time",
    upstream="load reports carry totals, no request",
    remove_when="SGLang publishes prefill start and end per request",
    signature=("self", "batch", "result"),
    fingerprint="a67c683e53477b43",
)
