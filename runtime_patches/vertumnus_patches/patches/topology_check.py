"""Let the CP width of a rank differ from its launch topology; check everything else."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process


class _LaunchTopology:
    """The topology without its CP dimension, which is what ``--dp-size N`` launched."""

    def __init__(self, parallel: Any) -> None:
        self._parallel = parallel

    def __getattr__(self, name: str) -> Any:
        if name == "attn_cp_size":
            return 1
        if name == "attn_cp_rank":
            return 0
        if name == "attn_cp_group":
            raise AttributeError(name)
        return getattr(self._parallel, name)


def check_apart_from_cp(original: Callable[..., None], parallel: Any, source: str) -> None:
    original(_LaunchTopology(parallel), source)
    try:
        size, rank = parallel.attn_cp_size, parallel.attn_cp_rank
        width = parallel.attn_cp_group.world_size
    except (AttributeError, RuntimeError, ValueError):
        return  # not initialised yet; SGLang skips what it cannot read, too
    if not 0 <= rank < size or width != size:
        raise ValueError(
            f"CP geometry is inconsistent (set by {source}): rank {rank} of {size}, "
            f"communicator of {width}"
        )


PATCH = Patch(
    id="topology-check",
    target="sglang.srt.runtime_context._validate_parallel",
    kind=Kind.AROUND,
    hook=check_apart_from_cp,
    processes=(Process.RANK,),
    why="a CP group spans data-parallel replicas, so tp_size = attn_tp * attn_dp * attn_cp "
    "cannot hold; all other clauses still must",
    upstream="the check assumes that CP divides the TP group",
    remove_when="SGLang accepts a CP group that is not part of the TP group",
    signature=("parallel", "source"),
    fingerprint="3d28f90fe038a3f3",
)
