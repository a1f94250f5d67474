"""Run the model-agnostic CP prefill on a machine that has no CUDA streams."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process


def without_cuda_stream(
    original: Callable[..., Any], runner: Any, forward_batch: Any, kwargs: Any
) -> Any:
    import torch

    if torch.cuda.is_available():
        return original(runner, forward_batch, kwargs)
    real = torch.cuda.current_stream
    torch.cuda.current_stream = _no_stream
    try:
        return original(runner, forward_batch, kwargs)
    finally:
        torch.cuda.current_stream = real


def _no_stream(device: Any = None) -> None:
    """The zigzag strategy accepts a stream and does not use it."""


PATCH = Patch(
    id="cp-stream",
    target="sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend_cp",
    kind=Kind.AROUND,
    hook=without_cuda_stream,
    processes=(Process.RANK,),
    why="it asks torch.cuda for the current stream, which raises without a GPU",
    upstream="prefill CP is only run on accelerators upstream",
    remove_when="the runner asks the platform for its stream",
    signature=("self", "forward_batch", "kwargs"),
    fingerprint="55863c4cda9e1236",
)
