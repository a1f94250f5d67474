"""The CPU attention kernel against a dense float64 reference, and the work it dispatches."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_vertumnus.worker.attention import (
    KeySlots,
    Segment,
    Workspace,
    decode_attention,
    extend_attention,
)

HEADS = [(9, 3), (8, 2), (4, 4), (8, 1)]
EDGES = [0, 1, 2, 31, 63, 64, 65, 129, 255, 256, 257, 511, 512, 513, 769]
LAYOUTS = ["shuffled", "one run", "pages", "backwards"]
# One for the whole module: what an earlier shape left behind must never show.
WORKSPACE = Workspace()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As a rank runs; more threads than free cores would make small products crawl."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_slots(layout: str, tokens: int, start: int, generator: torch.Generator) -> torch.Tensor:
    """Slots of one sequence, distinct and within [start, start + tokens + 16)."""
    if layout == "one run":
        slots = torch.arange(tokens)
    elif layout == "backwards":
        slots = torch.arange(tokens).flip(0)
    elif layout == "pages":
        pages = torch.randperm(-(-tokens // 16), generator=generator)
        slots = (pages[:, None] * 16 + torch.arange(16)).flatten()[:tokens]
    else:
        slots = torch.randperm(tokens, generator=generator)
    return slots + start


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, float]:
    """Float64 attention of queries at the end of the keys, and the largest score."""
    n, query_heads, _ = q.shape
    m, kv_heads, _ = k.shape
    group = query_heads // kv_heads
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * scale
    largest = float(scores.abs().max())
    hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v), largest


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, largest_score: float, largest_value: float
) -> None:
    # A score is off by a few ulps of itself, which is the relative error of its weight.
    tolerance = (2e-6 + 1e-6 * largest_score) * largest_value
    if actual.dtype == torch.bfloat16:
        tolerance += 2.0**-7 * largest_value
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected).abs().max() <= tolerance


class Pool:
    """A KV pool whose unused slots are NaN, so that a stray read shows."""

    def __init__(
        self, slots: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.k = torch.full((slots, kv_heads, dims[0]), math.nan, dtype=dtype)
        self.v = torch.full((slots, kv_heads, dims[1]), math.nan, dtype=dtype)

    def fill(self, slots: torch.Tensor, generator: torch.Generator) -> None:
        for cache in (self.k, self.v):
            values = torch.randn(len(slots), *cache.shape[1:], generator=generator)
            cache[slots] = values.to(cache.dtype)


lengths = st.one_of(st.sampled_from(EDGES), st.integers(0, 700))


@st.composite
def batches(draw: Callable[..., Any]) -> dict[str, Any]:
    dim = draw(st.sampled_from([16, 64]))
    return {
        "shapes": draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=3)),
        "heads": draw(st.sampled_from(HEADS)),
        "dims": draw(st.sampled_from([(dim, dim), (dim, dim // 2), (dim, dim + 8)])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "sharpness": draw(st.sampled_from([0.01, 1.0, 8.0])),
        "padding": draw(st.integers(0, 3)),
        "int32_slots": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=150, deadline=None)
@given(batches())
def test_extend_equals_dense_reference(batch: dict[str, Any]) -> None:
    query_heads, kv_heads = batch["heads"]
    dim, value_dim = batch["dims"]
    generator = torch.Generator().manual_seed(batch["seed"])
    pool = Pool(
        sum(n + prefix + 16 for n, prefix in batch["shapes"]),
        kv_heads,
        batch["dims"],
        batch["dtype"],
    )
    segments: list[Segment] = []
    start = 0
    for n, prefix in batch["shapes"]:
        slots = make_slots(batch["layout"], n + prefix, start, generator)
        start += n + prefix + 16
        pool.fill(slots, generator)
        slots = slots.int() if batch["int32_slots"] else slots
        segments.append(Segment(n, n + prefix, KeySlots.of(slots)))
    total = sum(segment.query_tokens for segment in segments)
    rows = total + batch["padding"]
    # As the rows of a fused qkv product come: heads together, tokens apart.
    fused = torch.randn(rows, query_heads * dim + 7, generator=generator)
    q = fused[:, : query_heads * dim].view(rows, query_heads, dim).to(batch["dtype"])
    out = torch.full((rows, query_heads, value_dim), math.nan, dtype=batch["dtype"])
    scale = batch["sharpness"] * dim**-0.5

    returned = extend_attention(
        q, pool.k, pool.v, segments, scale=scale, out=out, workspace=WORKSPACE
    )

    assert returned is out
    assert not out[total:].any()
    begin = 0
    for segment in segments:
        end = begin + segment.query_tokens
        if segment.query_tokens:
            slots = segment.keys.slots.long()
            expected, largest = dense(q[begin:end], pool.k[slots], pool.v[slots], scale)
            assert_close(out[begin:end], expected, largest, float(pool.v[slots].abs().max()))
        begin = end


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([1, 2, 511, 513]), st.integers(1, 900)), min_size=1),
    st.sampled_from(HEADS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(64, 64), (64, 32), (16, 24)]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**31),
)
def test_decode_equals_dense_reference(
    key_tokens: list[int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    dims: tuple[int, int],
    layout: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = Pool(sum(key_tokens) + 16 * len(key_tokens), heads[1], dims, dtype)
    sequences = []
    start = 0
    for tokens in key_tokens:
        slots = make_slots(layout, tokens, start, generator)
        start += tokens + 16
        pool.fill(slots, generator)
        sequences.append(KeySlots.of(slots))
    rows = len(key_tokens) + 1
    q = torch.randn(rows, heads[0], dims[0], generator=generator).to(dtype)
    out = torch.full((rows, heads[0], dims[1]), math.nan, dtype=dtype)
    decode_attention(q, pool.k, pool.v, sequences, scale=0.3, out=out, workspace=WORKSPACE)
    assert not out[-1].any()
    for row, keys in enumerate(sequences):
        expected, largest = dense(q[row : row + 1], pool.k[keys.slots], pool.v[keys.slots], 0.3)
        largest_value = float(pool.v[keys.slots].abs().max())
        assert_close(out[row : row + 1], expected, largest, largest_value)


def test_a_prefix_that_outweighs_the_block_and_the_reverse() -> None:
    """Merging two parts whose sums differ by hundreds of e-folds keeps every weight."""
    generator = torch.Generator().manual_seed(0)
    for prefix_gain, own_gain in ((40.0, 0.1), (0.1, 40.0), (40.0, 40.0)):
        n, prefix = 70, 600
        q, k, v = (torch.randn(n + prefix, 2, 16, generator=generator) for _ in range(3))
        k[:prefix] *= prefix_gain
        k[prefix:] *= own_gain
        out = torch.empty(n, 2, 16)
        segment = Segment(n, n + prefix, KeySlots.of(torch.arange(n + prefix)))
        extend_attention(q[prefix:], k, v, [segment], scale=1.0, out=out, workspace=WORKSPACE)
        expected, largest = dense(q[prefix:], k, v, 1.0)
        assert_close(out, expected, largest, float(v.abs().max()))


def zigzag(tokens: int, prefix: int, degree: int, rank: int) -> list[tuple[int, int, int]]:
    """(first query, queries, keys) of a rank's early and late block of one sequence."""
    base, extra = divmod(tokens, 2 * degree)
    sizes = [base + (block < extra) for block in range(2 * degree)]
    blocks = (rank, 2 * degree - 1 - rank)
    return [(sum(sizes[:b]), sizes[b], prefix + sum(sizes[: b + 1])) for b in blocks]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zigzag_ranks_reassemble_the_dense_result(degree: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(degree)
    shapes = [(2 * degree, 0), (701, 300), (1030, 5), (9, 700)]
    pool = Pool(sum(n + p + 16 for n, p in shapes), 3, (64, 64), dtype)
    sequences = []
    start = 0
    for n, prefix in shapes:
        slots = make_slots("pages", n + prefix, start, generator)
        start += n + prefix + 16
        pool.fill(slots, generator)
        sequences.append(KeySlots.of(slots))
    queries = [torch.randn(n, 9, 64, generator=generator).to(dtype) for n, _ in shapes]
    results = [torch.full_like(q, math.nan) for q in queries]
    for rank in range(degree):
        # A rank holds the early blocks of the whole batch, then the late ones, then padding.
        placed = [
            (index, *zigzag(n, prefix, degree, rank)[half])
            for half in (0, 1)
            for index, (n, prefix) in enumerate(shapes)
        ]
        segments = [Segment(n, m, sequences[index]) for index, _, n, m in placed]
        q = torch.cat([queries[index][first : first + n] for index, first, n, _ in placed])
        q = torch.cat([q, q.new_full((3, 9, 64), math.nan)])
        out = extend_attention(
            q,
            pool.k,
            pool.v,
            segments,
            scale=0.125,
            out=torch.empty_like(q),
            workspace=WORKSPACE,
        )
        begin = 0
        for index, first, n, _ in placed:
            results[index][first : first + n] = out[begin : begin + n]
            begin += n
    for q, result, keys in zip(queries, results, sequences, strict=True):
        k, v = pool.k[keys.slots], pool.v[keys.slots]
        expected, largest = dense(q, k, v, 0.125)
        assert_close(result, expected, largest, float(v.abs().max()))


class Dispatched(TorchDispatchMode):  # type: ignore[misc]
    """Counts the scores that torch is asked for, per query head, and the gathers."""

    def __init__(self, query_heads: int, head_dim: int) -> None:
        super().__init__()
        self._multiply_adds = 2 * query_heads * head_dim
        self._work = 0
        self.gathers = 0
        self.widest_scores = 0

    @property
    def scores(self) -> float:
        return self._work / self._multiply_adds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("bmm", "baddbmm", "mm", "addmm"):
            a, b = args[-2:]
            self._work += a.numel() * b.shape[-1]
            self.widest_scores = max(self.widest_scores, b.shape[-1])
        elif "attention" in name:
            q, k, v = args[:3]
            self._work += q.shape[:-1].numel() * k.shape[2] * (q.shape[-1] + v.shape[-1])
        elif name in ("index_select", "index"):
            self.gathers += 1
        return func(*args, **(kwargs or {}))


def dispatched(
    shapes: Sequence[tuple[int, int]],
    slots: torch.Tensor,
    dtype: torch.dtype,
    heads: tuple[int, int],
) -> Dispatched:
    """What segments (n, m) of one sequence dispatch."""
    keys = KeySlots.of(slots)
    pool = torch.zeros(len(slots), heads[1], 16, dtype=dtype)
    q = torch.zeros(sum(n for n, _ in shapes), heads[0], 16, dtype=dtype)
    counted = Dispatched(heads[0], 16)
    with counted:
        extend_attention(
            q,
            pool,
            pool,
            [Segment(n, m, keys) for n, m in shapes],
            scale=1.0,
            out=torch.empty_like(q),
            workspace=Workspace(),
        )
    return counted


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (16, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dispatched_work_is_the_unmasked_scores(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for n in (1, 64, 500, 1600):
        for prefix in (0, 200, 257, 4096):
            m = n + prefix
            counted = dispatched([(n, m)], torch.arange(m), dtype, heads)
            unmasked = n * m - n * (n - 1) / 2
            # Half a tile of 64 keys per query is the price of the masked squares.
            assert unmasked <= counted.scores <= unmasked + 32 * n, (n, prefix)


def test_scores_of_a_long_prefix_are_never_materialised() -> None:
    for n in (2, 100, 1500):
        m = n + 4096
        counted = dispatched([(n, m)], torch.arange(m), torch.float32, (4, 1))
        assert counted.widest_scores <= 1024


@pytest.mark.parametrize("degree", [2, 4])
def test_zigzag_ranks_dispatch_equal_work(degree: int) -> None:
    tokens, prefix = 4096, 1024
    slots = torch.arange(tokens + prefix)
    work = [
        dispatched(
            [(n, m) for _, n, m in zigzag(tokens, prefix, degree, rank)],
            slots,
            torch.float32,
            (3, 1),
        ).scores
        for rank in range(degree)
    ]
    assert max(work) <= 1.001 * min(work)


def test_segments_of_one_sequence_share_a_gather_and_a_run_needs_none() -> None:
    shapes = [(50, 100), (60, 400)]
    scattered = torch.arange(400).flip(0)
    assert dispatched(shapes, scattered, torch.float32, (4, 2)).gathers == 2
    assert dispatched(shapes, torch.arange(400), torch.float32, (4, 2)).gathers == 0


def test_runs_are_recognised_only_when_every_slot_follows() -> None:
    assert KeySlots.of(torch.arange(5, 25)).start == 5
    assert KeySlots.of(torch.tensor([7])).start == 7
    assert KeySlots.of(torch.empty(0, dtype=torch.int64)).start is None
    # Ends that fit a run, but not what lies between.
    assert KeySlots.of(torch.tensor([0, 2, 1, 3])).start is None
    assert KeySlots.of(torch.arange(20).flip(0)).start is None


def test_stale_buffers_do_not_leak_into_a_result() -> None:
    workspace = Workspace()
    keys = KeySlots.of(torch.arange(600).flip(0))
    q, cache = torch.randn(300, 4, 16), torch.randn(600, 2, 16)

    def run(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return extend_attention(
            q,
            cache,
            cache,
            [Segment(len(q), 600, keys)],
            scale=0.25,
            out=torch.empty_like(q),
            workspace=workspace,
        )

    before = run(q, cache)
    assert run(q * math.nan, cache * math.nan).isnan().all()
    assert torch.equal(run(q, cache), before)


def test_buffers_born_in_inference_mode_serve_outside_it() -> None:
    workspace = Workspace()
    segment = Segment(70, 600, KeySlots.of(torch.arange(600).flip(0)))
    q, cache = torch.randn(70, 4, 16), torch.randn(600, 2, 16)
    results = []
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            out = extend_attention(
                q,
                cache,
                cache,
                [segment],
                scale=0.25,
                out=torch.empty_like(q),
                workspace=workspace,
            )
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_impossible_arguments_are_refused() -> None:
    keys = KeySlots.of(torch.arange(8))
    with pytest.raises(ValueError, match="queries"):
        Segment(5, 4, keys)
    with pytest.raises(ValueError, match="slots"):
        Segment(2, 9, keys)
    with pytest.raises(ValueError, match="1-D"):
        KeySlots.of(torch.zeros(2, 2, dtype=torch.int64))
    cache = torch.zeros(8, 2, 16)
    q = torch.zeros(3, 4, 16)
    with pytest.raises(ValueError, match="4 queries"):
        extend_attention(
            q, cache, cache, [Segment(4, 8, keys)], scale=1.0, out=q, workspace=WORKSPACE
        )
    with pytest.raises(ValueError, match="heads"):
        decode_attention(
            torch.zeros(1, 3, 16), cache, cache, [keys], scale=1.0, out=q, workspace=WORKSPACE
        )
    empty = KeySlots.of(torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="no keys"):
        decode_attention(q, cache, cache, [empty], scale=1.0, out=q, workspace=WORKSPACE)


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "kernel.py"
    spec = importlib.util.spec_from_file_location("vertumnus_kernel_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_short_suffix_behind_a_long_prefix_is_many_times_faster_than_upstream() -> None:
    pytest.importorskip("sglang")
    benchmark = load_benchmark()
    ratio = benchmark.extend_speedup(benchmark.Shape(), 64, 8192, torch.float32, repeats=2)
    assert ratio >= 5.0
