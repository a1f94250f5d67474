"""Plan a step with the request rows of the rank of the block that has least."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.prefix_marks import BUDGET
from vertumnus_patches.record import Kind, Patch, Process


def as_agreed(
    original: Callable[..., int],
    scheduler: Any,
    running_bs: int,
    beam_width: int | None = None,
    running_batch: Any = None,
    num_held_rows: int = 0,
) -> int:
    agreed = getattr(scheduler.token_to_kv_pool_allocator, BUDGET, None)
    if agreed is not None:
        num_held_rows += agreed.rows - scheduler.req_to_token_pool.available_size()
    return original(scheduler, running_bs, beam_width, running_batch, num_held_rows)


PATCH = Patch(
    id="least-rows",
    target="sglang.srt.managers.scheduler.Scheduler.get_num_allocatable_reqs",
    kind=Kind.AROUND,
    hook=as_agreed,
    processes=(Process.RANK,),
    why="a rank keeps the rows of the requests that it is sending to decode servers, the others "
    "of its block do not; how many fit into a step must be the same on all of them",
    upstream="all ranks of a CP group keep the rows of all requests equally long",
    remove_when="the memory of a step is agreed on across a CP group",
    signature=("self", "running_bs", "beam_width", "running_batch", "num_held_rows"),
    fingerprint="01c1c7a8da013993",
)
