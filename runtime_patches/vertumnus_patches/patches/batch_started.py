"""Tell the rank runtime that a forward step begins."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def batch_started(scheduler: Any, batch: Any, pp_proxy_tensors: Any = None) -> None:
    seams.rank.on_batch_started(scheduler, batch)


PATCH = Patch(
    id="batch-started",
    target="sglang.srt.managers.scheduler.Scheduler.run_batch",
    kind=Kind.BEFORE,
    hook=batch_started,
    processes=(Process.RANK,),
    why="the router ages its queue estimate from the moment a prefill really starts",
    upstream="load reports carry totals, no request and no start time",
    remove_when="SGLang publishes prefill start and end per request",
    signature=("self", "batch", "pp_proxy_tensors"),
    fingerprint="c314c0d4b02c8565",
)
