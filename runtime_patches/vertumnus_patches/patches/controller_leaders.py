"""Let the controller follow the composition: only leaders take requests."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def after_control_message(result: Any, controller: Any, obj: Any) -> None:
    seams.controller.on_control(controller, obj)


PATCH = Patch(
    id="controller-leaders",
    target="sglang.srt.managers.data_parallel_controller."
    "DataParallelController.send_control_message",
    kind=Kind.AFTER,
    hook=after_control_message,
    processes=(Process.CONTROLLER,),
    why="requests that follow a regroup command in the stream must go to the new leaders",
    upstream="the set of active replicas changes only with elastic EP",
    remove_when="SGLang lets a plugin choose the active replicas",
    signature=("self", "obj"),
    fingerprint="53b2a10898d6de2e",
)
