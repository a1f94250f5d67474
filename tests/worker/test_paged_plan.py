"""Plan arrays of zigzag halves, executed page by page, against dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_bench.paged_reference import run_plan

from sgl_vertumnus.worker.paged_plan import PagedPlan, Segment, paged_plan, zigzag_segments

QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.3
PAGES = [1, 16, 64]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More threads than free cores would make small products crawl."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Step:
    """Sequences of (cached prefix, new tokens) in a pool whose pages are shuffled."""

    lengths: list[tuple[int, int]]
    page_tokens: int
    dtype: torch.dtype = torch.float64
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    slots: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    queries: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.lengths))
        totals = [prefix + new for prefix, new in self.lengths]
        pages = [-(-total // self.page_tokens) for total in totals]
        order = torch.randperm(sum(pages) + 3, generator=generator)
        shape = (len(order), self.page_tokens, KV_HEADS, HEAD_DIM)
        # Whatever no sequence owns is not a number, and shows in whatever reads it.
        self.k = torch.full(shape, float("nan"), dtype=torch.float64)
        self.v = self.k.clone()
        self.slots = torch.full((len(totals) + 2, max(totals) + 5), 10**6, dtype=torch.int32)
        self.rows = torch.randperm(len(totals) + 2, generator=generator)[: len(totals)]
        begin = 0
        for row, total, count in zip(self.rows, totals, pages, strict=True):
            own = order[begin : begin + count]
            begin += count
            slots = (own[:, None] * self.page_tokens + torch.arange(self.page_tokens)).flatten()
            self.slots[row, :total] = slots[:total]
            for cache in (self.k, self.v):
                values = torch.randn(total, KV_HEADS, HEAD_DIM, generator=generator)
                cache.view(-1, KV_HEADS, HEAD_DIM)[slots[:total]] = values.double()
        self.k, self.v = self.k.to(self.dtype), self.v.to(self.dtype)
        self.queries = [
            torch.randn(new, QUERY_HEADS, HEAD_DIM, generator=generator).double()
            for _, new in self.lengths
        ]

    def expected(self) -> list[torch.Tensor]:
        """Dense attention of each sequence's new tokens, by torch."""
        outputs = []
        for row, (prefix, new), q in zip(self.rows, self.lengths, self.queries, strict=True):
            own = self.slots[row, : prefix + new].long()
            k, v = (
                cache.double().view(-1, KV_HEADS, HEAD_DIM)[own].transpose(0, 1)
                for cache in (self.k, self.v)
            )
            mask = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix)
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1), k, v, attn_mask=mask, scale=SCALE, enable_gqa=True
            )
            outputs.append(out.transpose(0, 1))
        return outputs

    def rank_share(self, degree: int, rank: int) -> tuple[list[Segment], list[list[slice]]]:
        """A rank's segments and, as early and late halves, the new tokens in each."""
        halves: list[list[slice]] = []
        for block in (rank, 2 * degree - 1 - rank):
            halves.append([])
            for _, new in self.lengths:
                sizes = [new // (2 * degree) + (b < new % (2 * degree)) for b in range(2 * degree)]
                begin = sum(sizes[:block])
                halves[-1].append(slice(begin, begin + sizes[block]))
        counts = [
            ([s.stop - s.start for s in half], [p + s.stop for (p, _), s in self.paired(half)])
            for half in halves
        ]
        return zigzag_segments(*counts[0], *counts[1]), halves

    def paired(self, half: list[slice]) -> list[tuple[tuple[int, int], slice]]:
        return list(zip(self.lengths, half, strict=True))

    def computed(self, degree: int) -> list[torch.Tensor]:
        """The same by the ranks of a block, each with its plan."""
        outputs = [torch.full_like(q, float("nan")) for q in self.queries]
        for rank in range(degree):
            segments, halves = self.rank_share(degree, rank)
            plan = paged_plan(segments, self.slots, self.rows, page_tokens=self.page_tokens)
            parts = [(sequence, part) for half in halves for sequence, part in enumerate(half)]
            q = torch.cat([self.queries[sequence][part] for sequence, part in parts])
            assert plan.query_tokens == len(q)
            out = execute(plan, q, self.k, self.v)
            for sequence, part in parts:
                size = part.stop - part.start
                outputs[sequence][part], out = out[:size], out[size:]
        return outputs


def execute(plan: PagedPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return run_plan(
        q,
        k,
        v,
        qo_indptr=plan.qo_indptr,
        kv_indptr=plan.kv_indptr,
        kv_indices=plan.kv_indices,
        last_page_tokens=plan.last_page_tokens,
        scale=SCALE,
    )


def assert_equal(step: Step, degree: int) -> None:
    for got, expected in zip(step.computed(degree), step.expected(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


#: Fewer new tokens than segments, one token behind a prefix, page ends, one long among short ones.
ADVERSARIAL = [
    [(0, 1)],
    [(0, 3)],
    [(64, 1)],
    [(63, 1)],
    [(0, 64)],
    [(65, 129)],
    [(0, 2), (31, 1), (0, 200), (16, 7)],
    [(128, 1), (127, 2), (0, 1), (15, 1)],
    [(17, 8), (0, 9), (1, 7)],
]


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", ADVERSARIAL, ids=str)
def test_the_halves_of_a_block_are_the_whole(
    lengths: list[tuple[int, int]], degree: int, page_tokens: int
) -> None:
    assert_equal(Step(lengths, page_tokens), degree)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 150)), min_size=1, max_size=4),
    degree=st.sampled_from([2, 4, 8]),
    page_tokens=st.sampled_from(PAGES),
)
def test_any_lengths(lengths: list[tuple[int, int]], degree: int, page_tokens: int) -> None:
    assert_equal(Step(lengths, page_tokens), degree)


def test_a_cache_of_eight_bits_is_read_as_it_is() -> None:
    assert_equal(Step([(20, 40), (0, 5)], 16, dtype=torch.float8_e4m3fn), 2)


def test_the_arrays_of_one_prompt() -> None:
    """By hand: 10 new tokens behind 20 cached ones, degree 2, rank 1: its blocks are 1 and 2 of
    four of sizes 3, 3, 2, 2, which end at keys 26 and 28."""
    segments = zigzag_segments([3], [26], [2], [28])
    slots = torch.arange(160, 192)[None]
    plan = paged_plan(segments, slots, torch.tensor([0]), page_tokens=16)
    assert plan.qo_indptr.tolist() == [0, 3, 5]
    assert plan.kv_indptr.tolist() == [0, 2, 4]
    assert plan.kv_indices.tolist() == [10, 11, 10, 11]
    assert plan.last_page_tokens.tolist() == [10, 12]
    arrays = (plan.qo_indptr, plan.kv_indptr, plan.last_page_tokens, plan.kv_indices)
    assert {array.dtype for array in arrays} == {torch.int32}


def test_segments_without_a_query_are_left_out() -> None:
    segments = zigzag_segments([1, 0], [5, 9], [0, 1], [5, 9])
    slots = torch.arange(32).view(2, 16)
    plan = paged_plan(segments, slots, torch.tensor([1, 0]), page_tokens=1)
    assert plan.qo_indptr.tolist() == [0, 1, 2]
    assert plan.kv_indices.tolist() == [*range(16, 21), *range(9)]


def test_a_rank_without_any_query_has_an_empty_plan() -> None:
    slots = torch.arange(16)[None]
    plan = paged_plan(zigzag_segments([0], [1], [0], [1]), slots, torch.tensor([0]), page_tokens=16)
    assert plan.query_tokens == 0 and len(plan.kv_indices) == 0


@pytest.mark.parametrize(("queries", "keys"), [(3, 2), (-1, 2)])
def test_more_queries_than_keys_are_refused(queries: int, keys: int) -> None:
    with pytest.raises(ValueError, match="0 <= queries <= keys"):
        Segment(0, queries, keys)
