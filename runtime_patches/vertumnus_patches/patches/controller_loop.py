"""Replace the controller's spinning loop by one that sleeps and notices dead ranks."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def run_controller(controller: Any) -> None:
    seams.controller.run(controller)


PATCH = Patch(
    id="controller-loop",
    target="sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
    kind=Kind.REPLACE,
    hook=run_controller,
    processes=(Process.CONTROLLER,),
    why="upstream polls without blocking, a full core of two on small machines, and never "
    "learns that a replica died",
    upstream="a busy loop over zmq.NOBLOCK",
    remove_when="upstream blocks in a poller that also watches its children",
    signature=("self",),
    fingerprint="804af740481d2c51",
)
