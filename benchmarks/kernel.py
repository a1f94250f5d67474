"""Time the CPU attention kernel against the one that SGLang's torch_native backend runs.

Everything is measured in this process, one compute thread, on the tensors of one layer. Ratios
come from runs that alternate, so that what else the machine does hits both sides alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sgl_vertumnus.worker.attention import (
    KeySlots,
    Segment,
    Workspace,
    decode_attention,
    extend_attention,
)

PAGE_TOKENS = 16
GRID_SUFFIX_TOKENS = (512, 1024, 2048, 4096)
GRID_PREFIX_TOKENS = (0, 512, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one layer; the default is the embedded model's."""

    query_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64


class Layer:
    """q, a KV pool with shuffled pages, and the sequences in it, as one layer sees them."""

    def __init__(
        self, shape: Shape, query_tokens: int, key_tokens: Sequence[int], dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = sum(-(-tokens // PAGE_TOKENS) for tokens in key_tokens) + 8
        pool = (pages * PAGE_TOKENS, shape.kv_heads, shape.head_dim)
        self.k = torch.randn(pool, generator=generator).to(dtype)
        self.v = torch.randn(pool, generator=generator).to(dtype)
        q = (query_tokens, shape.query_heads, shape.head_dim)
        self.q = torch.randn(q, generator=generator).to(dtype)
        self.out = torch.empty_like(self.q)
        self.scale = shape.head_dim**-0.5
        self.workspace = Workspace()
        order = torch.randperm(pages, generator=generator)
        slots = (order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        # Upstream's table of slots by sequence.
        self.table = torch.zeros(len(key_tokens), max(key_tokens), dtype=torch.int32)
        self.sequences = []
        begin = 0
        for row, tokens in enumerate(key_tokens):
            own = slots[begin : begin + tokens]
            begin += -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
            self.table[row, :tokens] = own
            self.sequences.append(KeySlots.of(own))

    def extend(self, segments: Sequence[Segment]) -> None:
        extend_attention(
            self.q,
            self.k,
            self.v,
            segments,
            scale=self.scale,
            out=self.out,
            workspace=self.workspace,
        )

    def decode(self) -> None:
        decode_attention(
            self.q,
            self.k,
            self.v,
            self.sequences,
            scale=self.scale,
            out=self.out,
            workspace=self.workspace,
        )


def upstream_backend() -> Any:
    """TorchNativeAttnBackend without a model runner, which its SDPA functions never look at."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return object.__new__(TorchNativeAttnBackend)


def seconds(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def paired_speedup(ours: Callable[[], None], theirs: Callable[[], None], repeats: int) -> float:
    """Median of theirs/ours over alternating runs, after one of each to warm up."""
    theirs()
    ours()
    return statistics.median(seconds(theirs) / seconds(ours) for _ in range(repeats))


def extend_speedup(
    shape: Shape, suffix_tokens: int, prefix_tokens: int, dtype: torch.dtype, *, repeats: int
) -> float:
    """Upstream's time over ours for one prompt: R new tokens behind a cached prefix of P."""
    total = suffix_tokens + prefix_tokens
    layer = Layer(shape, suffix_tokens, [total], dtype)
    segments = [Segment(suffix_tokens, total, layer.sequences[0])]
    backend = upstream_backend()
    expected = torch.empty_like(layer.out)

    def upstream() -> None:
        backend._run_sdpa_forward_extend(
            layer.q,
            expected,
            layer.k,
            layer.v,
            layer.table,
            torch.tensor([0]),
            torch.tensor([total]),
            torch.tensor([prefix_tokens]),
            torch.tensor([suffix_tokens]),
            scaling=layer.scale,
            enable_gqa=shape.query_heads != shape.kv_heads,
            causal=True,
        )

    ratio = paired_speedup(partial(layer.extend, segments), upstream, repeats)
    _check_equal(layer.out, expected)
    return ratio


def decode_speedup(
    shape: Shape, key_tokens: Sequence[int], dtype: torch.dtype, *, repeats: int
) -> float:
    """Upstream's time over ours for a batch that decodes one token per sequence."""
    layer = Layer(shape, len(key_tokens), key_tokens, dtype)
    backend = upstream_backend()
    expected = torch.empty_like(layer.out)
    rows, lengths = torch.arange(len(key_tokens)), torch.tensor(key_tokens)

    def upstream() -> None:
        backend._run_sdpa_forward_decode(
            layer.q,
            expected,
            layer.k,
            layer.v,
            layer.table,
            rows,
            lengths,
            scaling=layer.scale,
            enable_gqa=shape.query_heads != shape.kv_heads,
            causal=False,
        )

    ratio = paired_speedup(layer.decode, upstream, repeats)
    _check_equal(layer.out, expected)
    return ratio


def _check_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours.float() - theirs.float()).abs().max())
    limit = 1e-4 if ours.dtype == torch.float32 else 4e-2
    if not difference <= limit:
        raise RuntimeError(f"the kernels disagree by {difference}: their times mean nothing")


def proportionality(shape: Shape, dtype: torch.dtype, *, repeats: int) -> dict[str, Any]:
    """Fit time = c·R·(P + R/2) on the grid by least squares of the relative error."""
    points = [(r, p) for r in GRID_SUFFIX_TOKENS for p in GRID_PREFIX_TOKENS]
    layers = {(r, p): Layer(shape, r, [r + p], dtype) for r, p in points}
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(repeats):
        for r, p in points:
            layer = layers[r, p]
            segments = [Segment(r, r + p, layer.sequences[0])]
            # Short points as often as makes them count as much as the long ones.
            for _ in range(max(GRID_SUFFIX_TOKENS) // r):
                times[r, p].append(seconds(partial(layer.extend, segments)))
    # Whatever else the machine does only ever adds to a time.
    fastest = {point: min(samples) for point, samples in times.items()}
    speeds = {(r, p): r * (p + r / 2) / fastest[r, p] for r, p in points}
    seconds_per_score = sum(speeds.values()) / sum(speed**2 for speed in speeds.values())
    deviation = {f"{r}+{p}": round(seconds_per_score * speeds[r, p] - 1, 3) for r, p in points}
    flops = 4 * shape.query_heads * shape.head_dim
    return {
        "gflops": round(flops / seconds_per_score / 1e9, 1),
        "max_deviation": max(abs(value) for value in deviation.values()),
        "predicted_over_measured_minus_1": deviation,
    }


def zigzag_imbalance(
    shape: Shape, tokens: int, degree: int, dtype: torch.dtype, *, repeats: int
) -> float:
    """Slowest over fastest rank, minus 1, of one cold prompt split into 2·degree blocks."""
    layer = Layer(shape, tokens // degree, [tokens], dtype)
    keys = layer.sequences[0]
    block = tokens // (2 * degree)
    ranks = [
        [Segment(block, block * (b + 1), keys) for b in (rank, 2 * degree - 1 - rank)]
        for rank in range(degree)
    ]
    samples: list[list[float]] = [[] for _ in ranks]
    for _ in range(repeats):
        for rank, segments in enumerate(ranks):
            samples[rank].append(seconds(partial(layer.extend, segments)))
    fastest = [min(times) for times in samples]
    return max(fastest) / min(fastest) - 1


def measure(dtype: torch.dtype = torch.float32, shape: Shape | None = None) -> dict[str, Any]:
    """All figures of the kernel for one dtype; takes about two minutes."""
    shape = shape or Shape()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": [shape.query_heads, shape.kv_heads, shape.head_dim],
                "kernel_speedup": round(extend_speedup(shape, 64, 8192, dtype, repeats=5), 1),
                "cold_4096_speedup": round(extend_speedup(shape, 4096, 0, dtype, repeats=7), 3),
                "decode_speedup": {
                    f"{batch}x{tokens}": round(
                        decode_speedup(shape, [tokens] * batch, dtype, repeats=31), 2
                    )
                    for batch, tokens in ((1, 128), (1, 1024), (1, 8192), (8, 1024))
                },
                "proportionality": proportionality(shape, dtype, repeats=3),
                "zigzag_imbalance": {
                    f"{degree}x{tokens}": round(
                        zigzag_imbalance(shape, tokens, degree, dtype, repeats=7), 3
                    )
                    for degree in (2, 4)
                    for tokens in (1024, 4096, 8192)
                },
            }
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--heads", default="9,3,64", help="query heads, KV heads, head dimension")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    shape = Shape(*(int(part) for part in arguments.heads.split(",")))
    result = measure(getattr(torch, arguments.dtype), shape)
    print(json.dumps(result, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
