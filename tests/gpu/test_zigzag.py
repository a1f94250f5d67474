"""Zigzag prefill attention by flashinfer, all ranks of a block in turn, against float64."""

import pytest
import torch
from vertumnus_bench.flashinfer_kernel import GpuBackend
from vertumnus_bench.zigzag_kernel import Case, Layer, Shape, largest_error, segment_of

#: Relative. Outputs are rounded to bfloat16's 8 bits, and so are the weights of the values.
TOLERANCE = 0.01
SHAPES = [Shape(), Shape(query_heads=16, kv_heads=16, head_dim=64), Shape(query_heads=40)]
LENGTHS = [(1, 0), (1, 777), (7, 0), (130, 64), (1000, 0), (4096, 1), (2049, 8191)]


@pytest.fixture(scope="module")
def gpu() -> GpuBackend:
    return GpuBackend()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(("new_tokens", "prefix_tokens"), LENGTHS)
def test_all_ranks_compute_the_whole(
    gpu: GpuBackend,
    new_tokens: int,
    prefix_tokens: int,
    degree: int,
    page_tokens: int,
    kv_dtype: str,
) -> None:
    case = Case(new_tokens, degree, prefix_tokens, page_tokens, kv_dtype)
    assert largest_error(Layer(case, Shape(), gpu)) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_of_any_number(gpu: GpuBackend, shape: Shape) -> None:
    assert largest_error(Layer(Case(1000, 4, 100), shape, gpu)) < TOLERANCE


def test_neither_a_plan_nor_a_run_waits_for_the_device(gpu: GpuBackend) -> None:
    """Both must only enqueue. torch hears of its own waits only, so the device is kept busy here,
    and the host must be through while it still is."""
    layer = Layer(Case(4096, 2), Shape(), gpu)
    kernel = gpu.kernel()

    def plan_and_run() -> None:
        layer.plan_for(kernel, [segment_of(layer.case, (0, 4096))])
        layer.run(kernel, layer.q, layer.out)

    plan_and_run()  # what is compiled on first use
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    plan_and_run()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
