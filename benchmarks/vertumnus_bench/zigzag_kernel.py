"""One rank's share of a zigzag prefill, as the paged kernel gets it: correctness, time, distance
from what the device could do at best. What differs between devices is a ``Backend``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from sgl_vertumnus.worker.paged_plan import PagedPlan, Segment, paged_plan
from vertumnus_bench.paged_reference import full_causal

#: Shares above this are checked by fewer queries: the reference keeps all scores.
CHECKED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one layer; the default is Qwen3-30B-A3B's."""

    query_heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of ``new_tokens`` behind ``prefix_tokens`` cached ones, prefilled by ``degree``
    ranks. ``kv_dtype`` is torch's name of the cache's."""

    new_tokens: int
    degree: int
    prefix_tokens: int = 0
    page_tokens: int = 64
    kv_dtype: str = "bfloat16"

    @property
    def total_tokens(self) -> int:
        return self.prefix_tokens + self.new_tokens


class Kernel(Protocol):
    """A paged prefill kernel; ``run`` computes what the latest ``plan`` says."""

    def plan(self, plan: PagedPlan, shape: Shape, q_dtype: Any, kv_dtype: Any) -> None: ...

    def run(self, q: Any, k_pages: Any, v_pages: Any, *, scale: float, out: Any) -> None: ...


class Backend(Protocol):
    """The device, a kernel on it, and how time is taken there."""

    device: str
    q_dtype: torch.dtype

    def kernel(self) -> Kernel: ...

    def seconds(self, function: Callable[[], None]) -> float: ...


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense 16-bit tensor throughput and memory bandwidth of a device."""

    flops_per_s: float
    bytes_per_s: float


#: From NVIDIA's data sheets, without sparsity, by the driver's name behind "NVIDIA": a GH200 and an
#: H200 NVL are slower than an H200.
PEAKS = {
    "H200": Peak(989e12, 4.8e12),
    "H100 80GB HBM3": Peak(989e12, 3.35e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "A100-SXM4-80GB": Peak(312e12, 2.039e12),
    "A100-SXM4-40GB": Peak(312e12, 1.555e12),
}


def peak_of(device_name: str) -> Peak | None:
    """None: nothing is known of the device, and nothing is made up."""
    return PEAKS.get(device_name.removeprefix("NVIDIA "))


def blocks_of(case: Case) -> list[tuple[int, int]]:
    """(begin, end) of the 2·degree blocks of new tokens, as SGLang's zigzag strategy cuts them."""
    count = 2 * case.degree
    base, more = divmod(case.new_tokens, count)
    ends = [base * (b + 1) + min(b + 1, more) for b in range(count)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def halves_of(case: Case, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(begin, end) of the early and the late half of a rank's new tokens."""
    blocks = blocks_of(case)
    return blocks[rank], blocks[-1 - rank]


def segment_of(case: Case, half: tuple[int, int]) -> Segment:
    begin, end = half
    return Segment(0, end - begin, case.prefix_tokens + end)


@dataclass(frozen=True, slots=True)
class Work:
    """The least that segments take: multiply-adds as two FLOPs, each byte moved once a segment."""

    flops: int
    bytes: int

    @classmethod
    def of(cls, segments: Sequence[Segment], shape: Shape, kv_bytes: int, q_bytes: int) -> Work:
        pairs = sum(
            s.query_tokens * s.key_tokens - s.query_tokens * (s.query_tokens - 1) // 2
            for s in segments
        )
        queries = sum(s.query_tokens for s in segments)
        keys = sum(s.key_tokens for s in segments)
        return cls(
            flops=4 * pairs * shape.query_heads * shape.head_dim,
            bytes=2 * queries * shape.query_heads * shape.head_dim * q_bytes
            + 2 * keys * shape.kv_heads * shape.head_dim * kv_bytes,
        )

    def least_s(self, peak: Peak) -> float:
        return max(self.flops / peak.flops_per_s, self.bytes / peak.bytes_per_s)


class Layer:
    """q of all new tokens, and a KV pool with shuffled pages that holds the whole prompt."""

    def __init__(self, case: Case, shape: Shape, backend: Backend) -> None:
        generator = torch.Generator(backend.device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=backend.device)

        self.case, self.shape, self.backend = case, shape, backend
        pages = -(-case.total_tokens // case.page_tokens) + 1
        pool = (pages, case.page_tokens, shape.kv_heads, shape.head_dim)
        dtype = getattr(torch, case.kv_dtype)
        self.k, self.v = normal(*pool).to(dtype), normal(*pool).to(dtype)
        self.q = normal(case.new_tokens, shape.query_heads, shape.head_dim).to(backend.q_dtype)
        self.out = torch.empty_like(self.q)
        self.scale = shape.head_dim**-0.5
        order = torch.randperm(pages, generator=generator, device=backend.device)
        within = torch.arange(case.page_tokens, device=backend.device)
        slots = (order[:, None] * case.page_tokens + within).flatten()
        self.slots = slots[None, : case.total_tokens].to(torch.int32)

    def plan_for(self, kernel: Kernel, segments: Sequence[Segment]) -> None:
        row = torch.zeros(1, dtype=torch.int64, device=self.backend.device)
        plan = paged_plan(segments, self.slots, row, page_tokens=self.case.page_tokens)
        kernel.plan(plan, self.shape, self.q.dtype, self.k.dtype)

    def run(self, kernel: Kernel, q: torch.Tensor, out: torch.Tensor) -> None:
        kernel.run(q, self.k, self.v, scale=self.scale, out=out)

    def expected(self, begin: int, end: int) -> torch.Tensor:
        """Float64 attention of new tokens [begin, end), by a reference that knows no pages."""
        own = self.slots[0, : self.case.prefix_tokens + end].long()
        k, v = (cache.flatten(0, 1)[own] for cache in (self.k, self.v))
        return full_causal(self.q[begin:end], k, v, scale=self.scale)


def largest_error(layer: Layer) -> float:
    """Over all ranks in turn, of the outputs of one plan a rank, relative to the larger of what is
    expected and one; those of long shares are sampled at the ends of their halves."""
    kernel, worst = layer.backend.kernel(), 0.0
    for rank in range(layer.case.degree):
        halves = halves_of(layer.case, rank)
        segments = [segment_of(layer.case, half) for half in halves]
        q = torch.cat([layer.q[begin:end] for begin, end in halves])
        if not len(q):
            continue
        out = torch.full_like(q, float("nan"))
        layer.plan_for(kernel, segments)
        layer.run(kernel, q, out)
        at = 0
        for begin, end in halves:
            part = out[at : at + end - begin]
            at += end - begin
            first = max(begin, end - CHECKED_TOKENS // layer.case.degree)
            expected = layer.expected(first, end)
            difference = (part[first - begin :].double() - expected).abs()
            difference /= expected.abs().clamp(min=1)
            if difference.numel():
                worst = max(worst, float(difference.max().nan_to_num(float("inf"))))
    return worst


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one rank's share. ``run_of_least`` is the time over the least that the device
    could take; None where its peak is not known."""

    plan_s: float
    run_s: float
    two_calls_s: float
    single_rank_s: float
    flops: int
    bytes: int
    run_of_least: float | None

    @property
    def speedup(self) -> float:
        return self.single_rank_s / self.run_s


def time_share(layer: Layer, peak: Peak | None, *, rank: int = 0, repeats: int = 20) -> Timing:
    """One run of a rank's two halves, against two separate runs, against a rank alone with all."""
    case, backend = layer.case, layer.backend
    halves = halves_of(case, rank)
    segments = [segment_of(case, half) for half in halves]
    q = torch.cat([layer.q[begin:end] for begin, end in halves])
    out = torch.empty_like(q)
    cut = segments[0].query_tokens
    together, alone = backend.kernel(), backend.kernel()
    apart = [(backend.kernel(), q[:cut], out[:cut]), (backend.kernel(), q[cut:], out[cut:])]
    for (kernel, _, _), segment in zip(apart, segments, strict=True):
        if segment.query_tokens:  # flashinfer plans no empty batch
            layer.plan_for(kernel, [segment])
    layer.plan_for(alone, [segment_of(case, (0, case.new_tokens))])

    def plan() -> None:
        layer.plan_for(together, segments)

    def run() -> None:
        layer.run(together, q, out)

    def two_calls() -> None:
        for kernel, part, target in apart:
            if len(part):
                layer.run(kernel, part, target)

    def single_rank() -> None:
        layer.run(alone, layer.q, layer.out)

    # In turns, so that what else the device does hits all alike; the first is to warm up.
    rounds = [
        [backend.seconds(function) for function in (plan, run, two_calls, single_rank)]
        for _ in range(repeats + 1)
    ][1:]
    plan_s, run_s, two_calls_s, single_rank_s = map(statistics.median, zip(*rounds, strict=True))
    work = Work.of(segments, layer.shape, layer.k.itemsize, layer.q.itemsize)
    return Timing(
        plan_s=plan_s,
        run_s=run_s,
        two_calls_s=two_calls_s,
        single_rank_s=single_rank_s,
        flops=work.flops,
        bytes=work.bytes,
        run_of_least=run_s / work.least_s(peak) if peak else None,
    )


def report(
    cases: Sequence[Case], shape: Shape, backend: Backend, peak: Peak | None, *, repeats: int = 20
) -> list[dict[str, Any]]:
    """A row a case: what it was, its largest error, its times."""
    rows = []
    for case in cases:
        layer = Layer(case, shape, backend)
        error = largest_error(layer)
        timing = time_share(layer, peak, repeats=repeats)
        rows.append({**asdict(case), "error": error, **asdict(timing), "speedup": timing.speedup})
    return rows
