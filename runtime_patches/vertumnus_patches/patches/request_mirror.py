"""Give every member of a block the requests that its leader received."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def mirror_requests(
    result: list[Any] | None, receiver: Any, recv_reqs: Any, local_reqs: Any = None
) -> list[Any]:
    return seams.rank.exchange_requests(result)


PATCH = Patch(
    id="request-mirror",
    target="sglang.srt.managers.scheduler_components.request_receiver."
    "SchedulerRequestReceiver._broadcast_reqs_across_ranks",
    kind=Kind.AFTER,
    hook=mirror_requests,
    processes=(Process.RANK,),
    why="the ranks of a block schedule in lockstep, so each step must start from the same "
    "requests on all of them",
    upstream="broadcasts within one replica's TP group only",
    remove_when="request broadcast follows the CP group across replicas",
    signature=("self", "recv_reqs", "local_reqs"),
    fingerprint="ad62850b382dd44b",
)
