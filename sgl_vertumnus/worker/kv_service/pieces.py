"""Which bytes of one rank's KV go where in another's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: What is copied between two looks at whether the copy is still wanted: some milliseconds.
SLICE_BYTES = 4 << 20
#: What Linux and Mooncake take at once.
SLICE_PIECES = 512


class Buffer(Protocol):
    """Keys or values of one layer: slot s is at ``address + s * slot_bytes``."""

    @property
    def address(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """Pieces of memory: addresses at the source, addresses here, lengths; [pieces] each."""

    sources: NDArray[np.uint64]
    targets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


def slices(
    source: Sequence[Buffer],
    target: Sequence[Buffer],
    source_pages: NDArray[np.int64],
    target_pages: NDArray[np.int64],
    page_tokens: int,
) -> Iterator[Slice]:
    """The KV of ``source_pages`` to ``target_pages``, in slices of limited size; neighbouring pages
    in one piece."""
    starts, counts = _runs(source_pages, target_pages)
    for theirs, ours in zip(source, target, strict=True):
        page_bytes = ours.slot_bytes * page_tokens
        yield from _cut(
            theirs.address + source_pages[starts] * page_bytes,
            ours.address + target_pages[starts] * page_bytes,
            counts * page_bytes,
        )


def _runs(
    source_pages: NDArray[np.int64], target_pages: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs of pages that are neighbours on both sides begin, and how long each is."""
    breaks = (np.diff(source_pages) != 1) | (np.diff(target_pages) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)
    return starts, np.diff(np.append(starts, len(source_pages)))


def _cut(sources: Any, targets: Any, lengths: Any) -> Iterator[Slice]:
    parts = -(-lengths // SLICE_BYTES)
    owner = np.repeat(np.arange(len(lengths)), parts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)) * SLICE_BYTES
    sizes = np.minimum(lengths[owner] - offset, SLICE_BYTES)
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        done = ends[first - 1] if first else 0
        fits = int(np.searchsorted(ends, done + SLICE_BYTES, side="right"))
        last = min(max(fits, first + 1), first + SLICE_PIECES)
        part = slice(first, last)
        yield Slice(
            (sources[owner] + offset)[part].astype(np.uint64),
            (targets[owner] + offset)[part].astype(np.uint64),
            sizes[part].astype(np.uint64),
        )
        first = last
