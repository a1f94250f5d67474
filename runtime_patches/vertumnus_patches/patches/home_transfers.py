"""Follow transfers where they are sent from, without the rest of the block."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.transfers import polled_here


def poll_at_home(
    original: Callable[..., list[Any]], scheduler: Any, rids_to_check: list[str] | None = None
) -> list[Any]:
    with polled_here(scheduler):
        return original(scheduler, rids_to_check)


PATCH = Patch(
    id="home-transfers",
    target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
    "process_disagg_prefill_inflight_queue",
    kind=Kind.AROUND,
    hook=poll_at_home,
    processes=(Process.RANK,),
    why="the ranks of a block send different requests, and go on sending them when the block "
    "splits or merges",
    upstream="all ranks of a CP group wait for the slowest transfer of each request",
    remove_when="the sender of a request is chosen per request",
    signature=("self", "rids_to_check"),
    fingerprint="6514359943eac9c2",
)
