"""What ``benchmarks/gpu.py`` does on a GPU, on a CPU with a kernel in plain torch."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vertumnus_bench import paged_reference
from vertumnus_bench.paged_reference import full_causal, run_plan
from vertumnus_bench.zigzag_kernel import (
    Case,
    Kernel,
    Layer,
    Peak,
    Shape,
    Work,
    blocks_of,
    largest_error,
    peak_of,
    report,
)

from sgl_vertumnus.worker.paged_plan import PagedPlan, Segment

SCALE = 0.3
SHAPE = Shape(query_heads=4, kv_heads=2, head_dim=8)


class TorchKernel:
    #: Keys that it overlooks at the end of each segment.
    skipped = 0

    def plan(self, plan: PagedPlan, shape: Shape, q_dtype: Any, kv_dtype: Any) -> None:
        # As flashinfer's plan does, which takes the largest of no lengths otherwise.
        assert len(plan.qo_indptr) > 1, "a plan without a request"
        self._plan = plan

    def run(self, q: Any, k_pages: Any, v_pages: Any, *, scale: float, out: Any) -> None:
        plan = self._plan
        out.copy_(
            run_plan(
                q,
                k_pages,
                v_pages,
                qo_indptr=plan.qo_indptr,
                kv_indptr=plan.kv_indptr,
                kv_indices=plan.kv_indices,
                last_page_tokens=(plan.last_page_tokens - self.skipped).clamp(min=1),
                scale=scale,
            )
        )


class WrongKernel(TorchKernel):
    skipped = 1


class CpuBackend:
    device = "cpu"
    q_dtype = torch.float32

    def __init__(self, kernel: Callable[[], Kernel] = TorchKernel) -> None:
        self.kernel = kernel

    def seconds(self, function: Callable[[], None]) -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin


CASES = [
    Case(100, 2, kv_dtype="float32", page_tokens=16),
    Case(3, 4, prefix_tokens=40, kv_dtype="float8_e4m3fn", page_tokens=1),
    Case(1, 2, prefix_tokens=64, kv_dtype="float32"),
]


def test_a_report_of_every_case() -> None:
    rows = report(CASES, SHAPE, CpuBackend(), Peak(1e12, 1e12), repeats=1)
    assert [row["new_tokens"] for row in rows] == [100, 3, 1]
    for row in rows:
        assert row["error"] < 1e-5 and row["run_of_least"] > 0 and row["speedup"] > 0


def test_a_kernel_that_overlooks_a_key_is_found_out() -> None:
    assert largest_error(Layer(CASES[0], SHAPE, CpuBackend(WrongKernel))) > 0.05


def test_the_blocks_of_a_prompt() -> None:
    assert blocks_of(Case(10, 2)) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert blocks_of(Case(1, 2)) == [(0, 1), (1, 1), (1, 1), (1, 1)]


def test_the_work_of_a_segment() -> None:
    """Two queries at the end of five keys see four and five."""
    work = Work.of([Segment(0, 2, 5)], SHAPE, kv_bytes=1, q_bytes=2)
    assert work.flops == 4 * (4 + 5) * 4 * 8
    assert work.bytes == 2 * 2 * 4 * 8 * 2 + 2 * 5 * 2 * 8
    assert work.least_s(Peak(1e3, 1e9)) == work.flops / 1e3


def test_nothing_is_made_up_of_a_device_that_is_not_known() -> None:
    assert peak_of("NVIDIA H200") == Peak(989e12, 4.8e12)
    for unknown in ("NVIDIA GeForce RTX 5090", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"):
        assert peak_of(unknown) is None


def test_the_reference_fits_into_a_gpu_beside_the_longest_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1024 rows of 32 heads over 128K keys would be 32 GiB, and as much again for their softmax."""
    largest = 0
    masked_fill = torch.Tensor.masked_fill_

    def seen(scores: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return masked_fill(scores, *arguments)

    q, k = torch.randn(40, 4, 8), torch.randn(50, 2, 8)
    whole = full_causal(q, k, k, scale=SCALE)
    monkeypatch.setattr(paged_reference, "_SCORES", 7 * 4 * 50)
    monkeypatch.setattr(torch.Tensor, "masked_fill_", seen)
    torch.testing.assert_close(full_causal(q, k, k, scale=SCALE), whole)
    assert largest == 7 * 4 * 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: run it there")
def test_without_a_gpu_the_benchmark_says_what_it_needs() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True)
    assert done.returncode == 2 and "needs an NVIDIA GPU" in done.stderr
