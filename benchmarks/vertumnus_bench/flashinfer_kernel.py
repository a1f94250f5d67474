"""flashinfer's paged prefill kernel on this machine's GPU, called as the adapter calls it."""

import time
from collections.abc import Callable
from typing import Any

import torch

from sgl_vertumnus.worker.paged_plan import PagedPlan
from vertumnus_bench.zigzag_kernel import Shape

_WORKSPACE_BYTES = 512 * 2**20


def missing() -> str | None:
    """What this machine lacks; None: nothing."""
    if not torch.cuda.is_available():
        return "an NVIDIA GPU that torch can use (torch.cuda.is_available() is False here)"
    try:
        import flashinfer  # noqa: F401
    except ImportError as exc:
        return f"flashinfer-python, which the worker extra installs ({exc})"
    return None


class FlashinferKernel:
    def __init__(self, workspace: torch.Tensor) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    def plan(self, plan: PagedPlan, shape: Shape, q_dtype: Any, kv_dtype: Any) -> None:
        self._wrapper.plan(
            plan.qo_indptr,
            plan.kv_indptr,
            plan.kv_indices,
            plan.last_page_tokens,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            plan.page_tokens,
            causal=True,
            sm_scale=1.0,
            q_data_type=q_dtype,
            kv_data_type=kv_dtype,
            non_blocking=True,
        )

    def run(self, q: Any, k_pages: Any, v_pages: Any, *, scale: float, out: Any) -> None:
        self._wrapper.run(q, (k_pages, v_pages), q_scale=scale, out=out)


class GpuBackend:
    """The current GPU; times are the device's, from idle to idle."""

    device = "cuda"
    q_dtype = torch.bfloat16

    def __init__(self) -> None:
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def kernel(self) -> FlashinferKernel:
        return FlashinferKernel(self._workspace)

    def seconds(self, function: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - begin
