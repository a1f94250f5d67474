"""Let the commands of a move reach the rank runtime in order with the requests around them."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.regroup_message import is_regroup
from vertumnus_patches.seams import seams


def follow_command(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    if not is_regroup(recv_req):
        return original(scheduler, recv_req)
    seams.rank.follow(scheduler, recv_req.server_args)
    return None  # the rank answers its supervisor itself


PATCH = Patch(
    id="control",
    target="sglang.srt.managers.scheduler.Scheduler.set_internal_state",
    kind=Kind.AROUND,
    hook=follow_command,
    processes=(Process.RANK,),
    why="a regroup must happen at one position of the request stream on every rank; the "
    "scheduler's control messages are in that stream and are answered by every rank",
    upstream="the set of knobs is closed",
    remove_when="SGLang lets a plugin register control handlers",
    signature=("self", "recv_req"),
    fingerprint="0c311f96114fb5c4",
)
