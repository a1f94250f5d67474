"""The figures of one run, as the paper defines them (section 9)."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from vertumnus_sim.simulation import Outcome

#: Qwen3-30B-A3B: seconds to the first token for inputs below 8K, below 32K, and longer ones.
DEADLINES_S = (1.0, 5.0, 10.0)
_BOUNDS = (8_192, 32_768)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run. TTFT from arrival at the router to the first token, percentiles by nearest rank;
    ``slo_pct`` weighs requests by input tokens, ``hit_pct`` is cached of all input tokens.
    ``extrapolated``: requests whose lengths lie outside what the profile was measured with."""

    simulated: bool = True
    workload: str
    rate: float
    policy: str
    composition: str
    gpus: int
    seed: int
    requests: int
    refused: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    slo_pct: float
    hit_pct: float
    gpu_s: float
    utilisation_pct: float
    by_degree: dict[int, int]
    moves: int
    copies: int
    pulls: int
    copied_blocks: int
    reclaims: int
    extrapolated: int
    sim_requests_per_s: float
    profile: str
    settings: dict[str, Any]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By nearest rank, of values in ascending order. Raises ``ValueError`` without any."""
    if not ordered:
        raise ValueError("no percentile of no values")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def slo_attainment(
    ttft_s: Sequence[float], input_tokens: Sequence[int], deadlines_s: Sequence[float]
) -> float:
    """Σ L·1[TTFT ≤ τ(L)] / Σ L."""
    met = total = 0
    for seconds, tokens in zip(ttft_s, input_tokens, strict=True):
        kind = sum(tokens >= bound for bound in _BOUNDS)
        total += tokens
        met += tokens * (seconds <= deadlines_s[kind])
    return met / total


def figures(outcome: Outcome, gpus: int, deadlines_s: Sequence[float]) -> dict[str, Any]:
    """The part of a ``Row`` that comes from the outcome. Raises ``ValueError`` when no request
    that counts was served."""
    if not outcome.ttft_s:
        refused = ", ".join(f"{count} refused: {code}" for code, count in outcome.refused.items())
        why = f" ({refused})" if refused else ": fewer to warm up, or more requests"
        raise ValueError(f"no request was served that counts{why}")
    ordered = sorted(outcome.ttft_s)
    total = sum(outcome.input_tokens)
    return {
        "requests": len(ordered),
        "refused": sum(outcome.refused.values()),
        "mean_ms": 1000 * sum(ordered) / len(ordered),
        "p50_ms": 1000 * percentile(ordered, 50),
        "p90_ms": 1000 * percentile(ordered, 90),
        "p99_ms": 1000 * percentile(ordered, 99),
        "slo_pct": 100 * slo_attainment(outcome.ttft_s, outcome.input_tokens, deadlines_s),
        "hit_pct": 100 * sum(outcome.cached_tokens) / total,
        "gpu_s": outcome.gpu_s,
        "utilisation_pct": 100 * outcome.gpu_s / (gpus * outcome.ended_s),
        "by_degree": dict(sorted(outcome.requests_by_degree.items())),
        "moves": outcome.moves,
        "copies": outcome.copies,
        "pulls": outcome.pulls,
        "copied_blocks": outcome.copied_blocks,
        "reclaims": outcome.reclaims,
        "extrapolated": outcome.extrapolated,
    }
