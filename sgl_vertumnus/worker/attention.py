"""Attention over a paged KV pool on CPU, with work proportional to what the mask lets through.

A *segment* is n queries that are the last n positions of m keys, as in a prefill chunk behind a
cached prefix and in each half of a zigzag split. Its cost is n·(m − n/2) scores: the keys that all
its queries see go through torch's flash kernel unmasked, the triangle at the end through matrix
products over narrow tiles, and the two are merged by their log-sum-exp. Queries are folded,
[T, Hq, D] → [Hkv, n·G, D] with G = Hq/Hkv, so that grouped heads share one pass over their K/V
head and nothing is repeated.

Shapes: q [T, Hq, D], K cache [S, Hkv, D], V cache [S, Hkv, Dv], out [T, Hq, Dv].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Query tokens that share one call for the keys before them.
_BLOCK_TOKENS = 512
# Folded rows from which the flash kernel works in its largest blocks.
_BLOCK_ROWS = 768
# Query tokens of one product with a masked square at its end: half a tile per query is wasted.
_TILE_TOKENS = 64
# Folded rows beyond which a taller tile no longer makes the products faster.
_TILE_ROWS = 256
# So few keys ahead of a block are cheaper inside its tiles than through a second call and a merge.
_LEAD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class KeySlots:
    """Where the keys of one sequence lie in the pool, in sequence order.

    slots: int32 or int64 [L]. start: the first slot when all L follow each other, so that K and V
    are read in place; None when they have to be gathered. Build it once per forward pass: segments
    that carry the same object share one gather per layer.
    """

    slots: torch.Tensor
    start: int | None

    @classmethod
    def of(cls, slots: torch.Tensor) -> KeySlots:
        """Look whether the slots form one run. Raises ValueError unless they are 1-D."""
        if slots.dim() != 1:
            raise ValueError(f"slots must be 1-D, got shape {tuple(slots.shape)}")
        length = len(slots)
        if length == 0:
            return cls(slots, None)
        first = int(slots[0])
        # The ends settle most scattered sequences without a pass over them.
        if int(slots[-1]) - first != length - 1:
            return cls(slots, None)
        in_order = bool((slots[1:] - slots[:-1] == 1).all())
        return cls(slots, first if in_order else None)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Segment:
    """n = query_tokens queries at the end of the first m = key_tokens keys of a sequence.

    Raises ValueError unless 0 ≤ n ≤ m ≤ len(keys).
    """

    query_tokens: int
    key_tokens: int
    keys: KeySlots

    def __post_init__(self) -> None:
        if not 0 <= self.query_tokens <= self.key_tokens <= len(self.keys):
            raise ValueError(
                f"need 0 <= queries <= keys <= slots, got {self.query_tokens} queries, "
                f"{self.key_tokens} keys, {len(self.keys)} slots"
            )


@dataclass(slots=True)
class Workspace:
    """Buffers that grow to the largest use and stay; one per thread that computes attention.

    Large fresh allocations go back to the kernel when freed, and faulting their pages in again at
    every layer costs as much as a decode's attention.
    """

    _buffers: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)
    _triangles: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised tensor; valid until the next take of the same name and dtype."""
        elements = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < elements:
            # A tensor born in inference mode could not be written outside it later.
            with torch.inference_mode(False):
                buffer = torch.empty(elements, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:elements].view(shape)

    def triangle(self, tokens: int, group: int) -> torch.Tensor:
        """fp32 [tokens·group, tokens]: −inf where a folded query row must not look."""
        mask = self._triangles.get((tokens, group))
        if mask is None:
            with torch.inference_mode(False):
                mask = torch.full((tokens, tokens), -math.inf).triu_(1)
                mask = mask.repeat_interleave(group, dim=0)
            self._triangles[tokens, group] = mask
        return mask


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    out: torch.Tensor,
    workspace: Workspace,
) -> torch.Tensor:
    """Causal attention of every segment; returns out.

    The segments' queries follow each other in q, in the order of segments; rows of out past the
    last are zeroed. Sums are fp32, whatever the dtype of q; a cache of another dtype is converted.
    Raises ValueError when q has fewer rows than the segments or Hq is no multiple of Hkv.
    """
    total_tokens = sum(segment.query_tokens for segment in segments)
    if total_tokens > len(q):
        raise ValueError(f"segments hold {total_tokens} queries, q has {len(q)} rows")
    _check_heads(q, k_cache)
    for keys, placed in _by_sequence(segments):
        key_tokens = max(segment.key_tokens for _, segment in placed)
        k, v = _read(k_cache, v_cache, keys, key_tokens, q.dtype, workspace)
        for begin, segment in placed:
            rows = slice(begin, begin + segment.query_tokens)
            limit = segment.key_tokens
            _attend(q[rows], k[:, :limit], v[:, :limit], scale, out[rows], workspace)
    out[total_tokens:].zero_()
    return out


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sequences: Sequence[KeySlots],
    *,
    scale: float,
    out: torch.Tensor,
    workspace: Workspace,
) -> torch.Tensor:
    """Attention of one query per sequence over all its keys; returns out.

    Row i of q belongs to sequences[i], which holds at least one key; rows of out past the last
    sequence are zeroed. Raises ValueError as extend_attention does, and for an empty sequence.
    """
    if len(sequences) > len(q):
        raise ValueError(f"{len(sequences)} sequences, q has {len(q)} rows")
    _check_heads(q, k_cache)
    kv_heads = k_cache.shape[1]
    for row, keys in enumerate(sequences):
        if len(keys) == 0:
            raise ValueError(f"sequence {row} has no keys")
        k, v = _read(k_cache, v_cache, keys, len(keys), q.dtype, workspace)
        folded = _widen(q[row].view(kv_heads, -1, q.shape[-1]), k.shape[-1])
        attended, _ = _over_all(folded, k, v, scale)
        out[row].view(kv_heads, -1, out.shape[-1]).copy_(attended[..., : out.shape[-1]])
    out[len(sequences) :].zero_()
    return out


def _check_heads(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k_cache.shape[1]} KV heads")


def _by_sequence(
    segments: Sequence[Segment],
) -> Iterator[tuple[KeySlots, list[tuple[int, Segment]]]]:
    """Segments that have queries, with the first row of each in q, gathered per KeySlots object."""
    groups: dict[int, list[tuple[int, Segment]]] = {}
    begin = 0
    for segment in segments:
        if segment.query_tokens:
            groups.setdefault(id(segment.keys), []).append((begin, segment))
        begin += segment.query_tokens
    for placed in groups.values():
        yield placed[0][1].keys, placed


def _read(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: KeySlots,
    tokens: int,
    dtype: torch.dtype,
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first tokens of a sequence, each [Hkv, tokens, max(D, Dv)]."""
    # The flash kernel wants one width; zeros change neither the scores nor the columns kept.
    width = max(k_cache.shape[-1], v_cache.shape[-1])
    read = []
    for name, cache in (("keys", k_cache), ("values", v_cache)):
        if keys.start is not None:
            rows = cache[keys.start : keys.start + tokens]
        else:
            rows = workspace.take(name, (tokens, *cache.shape[1:]), cache.dtype)
            torch.index_select(cache, 0, keys.slots[:tokens], out=rows)
        read.append(_widen(rows.to(dtype), width).transpose(0, 1))
    return read[0], read[1]


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _over_all(
    folded: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unmasked attention [Hkv, rows, width] and its log-sum-exp, fp32 [Hkv, rows]."""
    attended, log_sum = _flash(folded[:, None], k[:, None], v[:, None], scale=scale)
    return attended[:, 0], log_sum[:, 0]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """One segment: q [n, Hq, D] at the end of k, v [Hkv, m, width], into out [n, Hq, Dv]."""
    tokens = len(q)
    kv_heads, key_tokens, width = k.shape
    group = q.shape[1] // kv_heads
    rows = tokens * group
    folded = workspace.take("folded", (kv_heads, rows, width), q.dtype)
    folded.view(kv_heads, tokens, group, width).copy_(
        _widen(q.view(tokens, kv_heads, group, -1), width).transpose(0, 1)
    )
    result = workspace.take("result", (kv_heads, rows, width), torch.float32)
    block_tokens = max(_BLOCK_TOKENS, _BLOCK_ROWS // group)
    for begin in range(0, tokens, block_tokens):
        end = min(tokens, begin + block_tokens)
        block = slice(begin * group, end * group)
        visible = key_tokens - tokens + end
        before = visible - (end - begin)
        if end - begin == 1:
            attended, _ = _over_all(folded[:, block], k[:, :visible], v[:, :visible], scale)
            result[:, block] = attended
            continue
        lead = 0 if before <= _LEAD_TOKENS else before
        log_sum = workspace.take("log_sum", (kv_heads, rows), torch.float32)[:, block]
        _triangle(
            folded[:, block],
            k[:, lead:visible],
            v[:, lead:visible],
            group,
            scale,
            result[:, block],
            log_sum if lead else None,
            workspace,
        )
        if lead:
            attended, log_sum_before = _over_all(folded[:, block], k[:, :lead], v[:, :lead], scale)
            weight = torch.sigmoid_(log_sum_before - log_sum).unsqueeze(-1)
            result[:, block].lerp_(attended.float(), weight)
    out.view(tokens, kv_heads, group, -1).transpose(0, 1).copy_(
        result.view(kv_heads, tokens, group, width)[..., : out.shape[-1]]
    )


def _triangle(
    folded: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: int,
    scale: float,
    result: torch.Tensor,
    log_sum: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Causal attention of a block into result, fp32 [Hkv, n·G, width].

    folded [Hkv, n·G, width] are the queries of the last n of the keys k, v [Hkv, w, width]. Tile by
    tile, the keys up to the tile's end are multiplied and its last square masked. log_sum, fp32
    [Hkv, n·G], receives the log-sum-exp for those who merge.
    """
    folded = _as_float("queries32", folded, workspace)
    k = _as_float("keys32", k, workspace).transpose(1, 2)
    v = _as_float("values32", v, workspace)
    kv_heads, rows, _ = folded.shape
    tokens = rows // group
    ahead = v.shape[1] - tokens
    tile = min(_TILE_TOKENS, max(1, _TILE_ROWS // group))
    mask = workspace.triangle(tile, group)
    for begin in range(0, tokens, tile):
        end = min(tokens, begin + tile)
        part = slice(begin * group, end * group)
        visible = ahead + end
        scores = workspace.take("scores", (kv_heads, (end - begin) * group, visible), torch.float32)
        torch.baddbmm(scores, folded[:, part], k[:, :, :visible], beta=0, alpha=scale, out=scores)
        scores[..., ahead + begin :].add_(mask[: (end - begin) * group, : end - begin])
        if log_sum is not None:
            log_sum[:, part] = scores.amax(-1)
        # In place: a second buffer of scores would push the first out of the cache.
        torch._softmax(scores, -1, False, out=scores)
        if log_sum is not None:
            # The largest weight is 1/Σ exp(score − peak): the sum without exponentials.
            log_sum[:, part].sub_(scores.amax(-1).log_())
        torch.bmm(scores, v[:, :visible], out=result[:, part])


def _as_float(name: str, x: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    if x.dtype == torch.float32:
        return x
    return workspace.take(name, tuple(x.shape), torch.float32).copy_(x)
