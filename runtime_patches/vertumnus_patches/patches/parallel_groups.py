"""Build the lattice's communicators as soon as SGLang has built its own groups."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def build_lattice_groups(result: Any, *, server_args: Any, device: str, dist_port: int) -> None:
    seams.rank.on_parallel_ready()


PATCH = Patch(
    id="parallel-groups",
    target="sglang.srt.distributed.bootstrap.init_parallel_runtime",
    kind=Kind.AFTER,
    hook=build_lattice_groups,
    processes=(Process.RANK,),
    why="every aligned block of ranks needs a communicator that exists and is warm before a "
    "regroup; SGLang knows only the groups of its launch topology",
    upstream="no seam: process groups are built once, inside one WORLD per replica",
    remove_when="SGLang can form process groups across data-parallel replicas",
    signature=("server_args", "device", "dist_port"),
    fingerprint="860ad71010617a1f",
)
