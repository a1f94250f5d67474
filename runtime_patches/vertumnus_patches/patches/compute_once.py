"""Let the leader compute what is not worth sharding; members take its KV and tokens."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def compute_once(
    original: Callable[..., Any],
    runner: Any,
    forward_batch: Any,
    pp_proxy_tensors: Any = None,
    **kwargs: Any,
) -> Any:
    return seams.rank.compute_once(
        runner, forward_batch, lambda: original(runner, forward_batch, pp_proxy_tensors, **kwargs)
    )


PATCH = Patch(
    id="compute-once",
    target="sglang.srt.model_executor.runner.eager_runner.EagerRunner.execute",
    kind=Kind.AROUND,
    hook=compute_once,
    processes=(Process.RANK,),
    why="decodes and very short prefills of a block are computed alike on all its ranks; where "
    "ranks share cores and memory bandwidth, doing it once and copying the new KV is faster",
    upstream="every rank of a CP group decodes everything",
    remove_when="upstream shards decode over the CP group",
    signature=("self", "forward_batch", "pp_proxy_tensors", "kwargs"),
    fingerprint="dde9d41541632b76",
)
