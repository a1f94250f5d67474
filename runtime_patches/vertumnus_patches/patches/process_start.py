"""Choose how SGLang makes its child processes."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def set_start_method(result: Any, server_args: Any) -> None:
    import multiprocessing

    multiprocessing.set_start_method(seams.front.process_start_method(), force=True)


PATCH = Patch(
    id="process-start",
    target="sglang.srt.entrypoints.engine._set_envs_and_config",
    kind=Kind.AFTER,
    hook=set_start_method,
    processes=(Process.FRONT,),
    why="importing the stack costs every spawned process more than ten seconds of CPU and a "
    "gigabyte; children forked before any device context share both",
    upstream="always spawns, which CUDA needs",
    remove_when="SGLang offers a fork server",
    signature=("server_args",),
    fingerprint="b3ddd8a51c625a11",
)
