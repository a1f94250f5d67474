"""Plan arrays of a paged prefill kernel, for query segments that end inside their sequences.

A *segment* is n queries that are the last n positions of the first m keys of a sequence, as in a
prefill chunk behind a cached prefix and in each half of a zigzag split. A kernel that aligns its
causal mask with the end of the keys computes any number of them in one run: each is a request of
its own, with the pages of those m keys. Both halves of a sequence share its pages; only their
numbers stand there twice.

The arrays are those of ``flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`` (0.7.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """n = query_tokens queries at the end of the first m = key_tokens keys of a sequence.

    Raises ValueError unless 0 ≤ n ≤ m.
    """

    sequence: int
    query_tokens: int
    key_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.query_tokens <= self.key_tokens:
            raise ValueError(
                f"need 0 <= queries <= keys, got {self.query_tokens} queries, "
                f"{self.key_tokens} keys"
            )


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What a step's segments read, S of them with at least one query.

    ``qo_indptr`` [S + 1], in tokens, and ``kv_indptr`` [S + 1], in pages, say where each segment
    begins; ``last_page_tokens`` [S] how much of its last page it reads, 1 to a whole page. All are
    int32 on the host, where the kernel's scheduler reads them without waiting for the device.
    ``kv_indices`` [kv_indptr[-1]], int32 on the device of the slots, are page numbers of the pool.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_tokens: torch.Tensor
    kv_indices: torch.Tensor
    page_tokens: int

    @property
    def query_tokens(self) -> int:
        """Rows of q that are computed; what lies behind them is padding."""
        return int(self.qo_indptr[-1])


def zigzag_segments(
    early_queries: Sequence[int],
    early_keys: Sequence[int],
    late_queries: Sequence[int],
    late_keys: Sequence[int],
) -> list[Segment]:
    """The 2·bs segments of one rank, in the order of its rows of q: the early halves of all
    sequences, then the late ones. Each list has an entry per sequence, in tokens."""
    halves = ((early_queries, early_keys), (late_queries, late_keys))
    return [
        Segment(sequence, query_tokens, key_tokens)
        for queries, keys in halves
        for sequence, (query_tokens, key_tokens) in enumerate(zip(queries, keys, strict=True))
    ]


def paged_plan(
    segments: Sequence[Segment], slots: torch.Tensor, rows: torch.Tensor, *, page_tokens: int
) -> PagedPlan:
    """The plan of ``segments``, those without a query left out.

    slots: int [R, L], the pool's slot of every position, a row per request; the slots of a page
    follow each other from a multiple of ``page_tokens`` on. rows: int [bs], the row of each
    sequence, on the same device. Nothing is read back from that device.
    """
    planned = [segment for segment in segments if segment.query_tokens]
    pages = [-(-segment.key_tokens // page_tokens) for segment in planned]
    qo_indptr = [0, *accumulate(segment.query_tokens for segment in planned)]
    kv_indptr = [0, *accumulate(pages)]
    last = [(segment.key_tokens - 1) % page_tokens + 1 for segment in planned]
    return PagedPlan(
        qo_indptr=torch.tensor(qo_indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        last_page_tokens=torch.tensor(last, dtype=torch.int32),
        kv_indices=_page_numbers(planned, pages, kv_indptr, slots, rows, page_tokens),
        page_tokens=page_tokens,
    )


def _page_numbers(
    planned: Sequence[Segment],
    pages: Sequence[int],
    kv_indptr: Sequence[int],
    slots: torch.Tensor,
    rows: torch.Tensor,
    page_tokens: int,
) -> torch.Tensor:
    def per_page(values: Sequence[int]) -> torch.Tensor:
        repeats = torch.tensor(pages, dtype=torch.int64).to(slots.device, non_blocking=True)
        each = torch.tensor(values, dtype=torch.int64).to(slots.device, non_blocking=True)
        # With the size given, the device need not be asked for the sum.
        return each.repeat_interleave(repeats, output_size=kv_indptr[-1])

    sequence = per_page([segment.sequence for segment in planned])
    begins = per_page(kv_indptr[:-1])
    page = torch.arange(kv_indptr[-1], device=slots.device) - begins
    first_slots = slots[rows[sequence], page * page_tokens]
    return torch.div(first_slots, page_tokens, rounding_mode="floor").to(torch.int32)
