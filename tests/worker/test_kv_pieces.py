"""Which bytes go where."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vertumnus.worker.kv_service import pieces, transports
from sgl_vertumnus.worker.kv_service.pieces import SLICE_BYTES, SLICE_PIECES, slices
from sgl_vertumnus.worker.kv_service.transports import LocalReader, ReadError

PAGE_TOKENS = 4
SLOTS = 16 * PAGE_TOKENS


def buffer_of(memory: Any) -> Any:
    return SimpleNamespace(address=memory.ctypes.data, slot_bytes=memory.shape[1])


@settings(max_examples=60)
@given(st.permutations(range(16)), st.permutations(range(16)), st.integers(1, 16), st.data())
def test_every_byte_gets_to_its_place_and_no_other(
    theirs: list[int], ours: list[int], count: int, data: Any
) -> None:
    limits = pieces.SLICE_BYTES, pieces.SLICE_PIECES
    pieces.SLICE_BYTES, pieces.SLICE_PIECES = data.draw(
        st.sampled_from([(7, 2), (64, 3), (1000, 5), limits])
    )
    try:
        widths = [8, 6, 8]
        sources = [
            np.random.default_rng(number).integers(0, 255, (SLOTS, width), dtype=np.uint8)
            for number, width in enumerate(widths)
        ]
        targets = [np.full((SLOTS, width), 77, dtype=np.uint8) for width in widths]
        source_pages, target_pages = np.array(theirs[:count]), np.array(ours[:count])
        reader = LocalReader(SimpleNamespace(pid=os.getpid()))  # type: ignore[arg-type]
        for part in slices(
            [buffer_of(memory) for memory in sources],
            [buffer_of(memory) for memory in targets],
            source_pages,
            target_pages,
            PAGE_TOKENS,
        ):
            assert part.bytes <= pieces.SLICE_BYTES and len(part.lengths) <= pieces.SLICE_PIECES
            reader.put(part)
        for source, target in zip(sources, targets, strict=True):
            expected = np.full_like(target, 77).reshape(16, -1)
            expected[target_pages] = source.reshape(16, -1)[source_pages]
            assert (target.reshape(16, -1) == expected).all()
    finally:
        pieces.SLICE_BYTES, pieces.SLICE_PIECES = limits


def test_neighbours_go_in_one_piece() -> None:
    far = [SimpleNamespace(address=0, slot_bytes=8)]
    (part,) = slices(far, far, np.array([3, 4, 5, 9]), np.array([0, 1, 2, 3]), PAGE_TOKENS)
    assert part.lengths.tolist() == [3 * 32, 32] and part.sources.tolist() == [3 * 32, 9 * 32]


def test_slices_are_small_enough_for_the_kernel() -> None:
    far = [SimpleNamespace(address=0, slot_bytes=100_000)]
    apart = np.arange(0, 4000, 2)
    parts = list(slices(far, far, apart, apart, PAGE_TOKENS))
    assert sum(part.bytes for part in parts) == 2000 * PAGE_TOKENS * 100_000
    assert max(part.bytes for part in parts) <= SLICE_BYTES
    assert max(len(part.lengths) for part in parts) <= SLICE_PIECES


@pytest.mark.parametrize(
    ("error", "reason"), [(1, r"one user.*ptrace_scope.*SYS_PTRACE"), (3, "is gone"), (14, "Bad")]
)
def test_what_cannot_be_read_says_why(
    monkeypatch: pytest.MonkeyPatch, error: int, reason: str
) -> None:
    def fail(*_: Any) -> int:
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(transports, "_readv", fail)
    part = pieces.Slice(*(np.zeros(1, dtype=np.uint64) for _ in range(3)))
    with pytest.raises(ReadError, match=reason):
        LocalReader(SimpleNamespace(pid=1)).put(part)  # type: ignore[arg-type]


def test_memory_that_is_not_there() -> None:
    ours = np.zeros(8192, dtype=np.uint8)
    here = ours.ctypes.data
    reader = LocalReader(SimpleNamespace(pid=os.getpid()))  # type: ignore[arg-type]
    lengths = np.array([16, 16], dtype=np.uint64)
    bad = pieces.Slice(
        np.array([here, 8], dtype=np.uint64), np.array([here, here], dtype=np.uint64), lengths
    )
    with pytest.raises(ReadError, match=r"gone|Bad address"):
        reader.put(bad)
