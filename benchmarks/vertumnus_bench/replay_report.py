"""What a replay measured, or why it may not say so."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vertumnus_bench.figures import percentile
from vertumnus_bench.replaying import Answer, Replayed

#: Prompts below 8K tokens, below 32K, and longer ones.
_BOUNDS_TOKENS = (8_192, 32_768)
CLASSES = ("short", "middle", "long")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds to the first token, by the length of the prompt (the paper's τ)."""

    seconds: tuple[float, float, float]

    def of(self, input_tokens: int) -> float:
        return self.seconds[length_class(input_tokens)]


#: Section 9 of the paper.
DEADLINES: Mapping[str, Deadlines] = {
    "qwen3-30b-a3b": Deadlines((1.0, 5.0, 10.0)),
    "deepseek-v4-flash": Deadlines((0.5, 2.0, 5.0)),
}


def length_class(input_tokens: int) -> int:
    """Index into ``CLASSES``."""
    return sum(input_tokens >= bound for bound in _BOUNDS_TOKENS)


def report(
    replayed: Replayed,
    trace_tokens: Sequence[int],
    *,
    deadlines: Deadlines,
    warmup_s: float = 0.0,
    max_lag_s: float,
) -> dict[str, Any]:
    """Figures of the requests that were due from ``warmup_s`` on.

    ``trace_tokens``: the lengths of the prompts in the trace, which deadlines and weights go by,
    however the prompts were scaled. ``refused`` is None, or why there are no times: the client
    was itself too late for them to be the server's.
    """
    answers = [answer for answer in replayed.answers if answer.due_s >= warmup_s]
    warm = [answer for answer in replayed.answers if answer.due_s < warmup_s]
    lags_s = [answer.sent_s - answer.due_s for answer in answers if answer.sent_s is not None]
    refused = _refusal(answers, lags_s, replayed.loop_delays_s, max_lag_s)
    served = [answer for answer in answers if answer.failure is None]
    found: dict[str, Any] = {
        "refused": refused,
        "requests": len(answers),
        "served": len(served),
        "failed": _causes(answers),
        "failures": _details(answers),
        "warm_up": {"seconds": warmup_s, "requests": len(warm), "failed": _causes(warm)},
        "rate_per_s": _rate(answers),
        "most_open": replayed.most_open,
        "lag_s": _spread(lags_s),
        "loop_delay_s": _spread(replayed.loop_delays_s),
        "max_lag_s": max_lag_s,
    }
    if refused is not None:
        return found
    return found | {
        "ttft_s": _spread(_ttft_s(served)),
        "tpot_s": _spread(_tpot_s(served)),
        "slo": _slo(answers, trace_tokens, deadlines),
        "hit_rate": _hit_rate(served),
        "usage": _usage(served),
    }


def _refusal(
    answers: Sequence[Answer],
    lags_s: Sequence[float],
    loop_delays_s: Sequence[float],
    max_lag_s: float,
) -> str | None:
    if not answers:
        return "no request was due after the warm-up"
    for values, what in ((lags_s, "requests left"), (loop_delays_s, "the client's loop ran")):
        if values and (late_s := percentile(values, 99)) > max_lag_s:
            return (
                f"{what} {late_s * 1000:.0f} ms late (P99, {max_lag_s * 1000:.0f} ms are allowed): "
                "the times would be the client's own; lower the rate, raise --max-open, or give "
                "the client a core to itself"
            )
    return None


def _causes(answers: Iterable[Answer]) -> dict[str, int]:
    return dict(Counter(a.failure[0] for a in answers if a.failure is not None).most_common())


def _details(answers: Iterable[Answer]) -> dict[str, str]:
    """Of each cause the first."""
    found: dict[str, str] = {}
    for answer in answers:
        if answer.failure is not None:
            found.setdefault(*answer.failure)
    return found


def _rate(answers: Sequence[Answer]) -> float | None:
    """Due requests per second; None when all are due at once."""
    if not answers or not (seconds := answers[-1].due_s - answers[0].due_s):
        return None
    return round((len(answers) - 1) / seconds, 3)


def _ttft_s(served: Iterable[Answer]) -> list[float]:
    return [answer.first_s for answer in served if answer.first_s is not None]


def _tpot_s(served: Iterable[Answer]) -> list[float]:
    """Of answers of at least two tokens, whose server counts them."""
    return [
        (a.last_s - a.first_s) / (a.usage.completion_tokens - 1)
        for a in served
        if a.usage is not None
        and a.usage.completion_tokens > 1
        and a.first_s is not None
        and a.last_s is not None
    ]


def _slo(
    answers: Iterable[Answer], trace_tokens: Sequence[int], deadlines: Deadlines
) -> dict[str, Any]:
    """Σ L·1[TTFT ≤ τ] / Σ L over all requests: one that failed has met nothing."""
    asked = [0] * len(CLASSES)
    met = [0] * len(CLASSES)
    for answer in answers:
        tokens = trace_tokens[answer.number]
        kind = length_class(tokens)
        asked[kind] += tokens
        in_time = answer.first_s is not None and answer.first_s <= deadlines.of(tokens)
        met[kind] += tokens if in_time and answer.failure is None else 0
    return {
        "attainment": _share(sum(met), sum(asked)),
        "by_length": {
            name: _share(of, all_) for name, of, all_ in zip(CLASSES, met, asked, strict=True)
        },
        "deadlines_s": list(deadlines.seconds),
        "bounds_tokens": list(_BOUNDS_TOKENS),
    }


def _hit_rate(served: Iterable[Answer]) -> float | None:
    """Cached of all prompt tokens, of answers that tell; None when none does."""
    told = [a.usage for a in served if a.usage is not None and a.usage.cached_tokens is not None]
    cached = sum(usage.cached_tokens or 0 for usage in told)
    return _share(cached, sum(usage.prompt_tokens for usage in told))


def _usage(served: Sequence[Answer]) -> dict[str, int]:
    """What the servers counted, and how many answers told it."""
    told = [answer.usage for answer in served if answer.usage is not None]
    return {
        "told": len(told),
        "cached_told": sum(usage.cached_tokens is not None for usage in told),
        "prompt_tokens": sum(usage.prompt_tokens for usage in told),
        "completion_tokens": sum(usage.completion_tokens for usage in told),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, P50, P90, P99, maximum and number; only ``n`` when there are none."""
    if not values:
        return {"n": 0}
    return {
        "mean": round(sum(values) / len(values), 5),
        **{f"p{p}": round(percentile(values, p), 5) for p in (50, 90, 99)},
        "max": round(max(values), 5),
        "n": len(values),
    }
