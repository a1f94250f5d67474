"""What a paged prefill kernel must compute, in plain torch, on any device.

``run_plan`` executes plan arrays position by position, as the kernel documents them;
``full_causal`` knows nothing of plans, pages or halves. The two must agree.
"""

import torch

#: Scores that exist at a time, 8 bytes each and twice that while they become weights.
_SCORES = 2**28


def run_plan(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_tokens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every request of a plan, its queries at the end of its keys.

    q [T, Hq, D]; k_pages, v_pages [pages, tokens of a page, Hkv, D]. Returns [T, Hq, D], float64.
    """
    page_tokens = k_pages.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for request, last in enumerate(last_page_tokens.tolist()):
        begin, end = qo_indptr[request : request + 2].tolist()
        pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
        keys = (len(pages) - 1) * page_tokens + last
        k = k_pages[pages].flatten(0, 1)[:keys]
        v = v_pages[pages].flatten(0, 1)[:keys]
        out[begin:end] = full_causal(q[begin:end], k, v, scale=scale)
    return out


def full_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attention of n queries that are the last n of m positions, in float64.

    q [n, Hq, D]; k, v [m, Hkv, D] with Hq a multiple of Hkv. Returns [n, Hq, D].
    """
    queries, keys = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    k64 = k.double().repeat_interleave(group, dim=1).permute(1, 2, 0)
    v64 = v.double().repeat_interleave(group, dim=1).transpose(0, 1)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    positions = torch.arange(keys, device=q.device)
    step = max(1, _SCORES // (q.shape[1] * max(keys, 1)))
    for begin in range(0, queries, step):
        rows = slice(begin, min(queries, begin + step))
        scores = q[rows].double().transpose(0, 1) @ k64 * scale
        own = positions[keys - queries + rows.start : keys - queries + rows.stop, None]
        scores.masked_fill_(positions[None, :] > own, float("-inf"))
        out[rows] = (scores.softmax(-1) @ v64).transpose(0, 1)
    return out
