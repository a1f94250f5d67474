"""The last ten minutes in steps of five seconds: what the live page draws."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from vertumnus_router.io.observe.trail import Trail

STEP_S = 5.0
STEPS = 120
#: How many of the last steps the figures of now are made of.
_NOW_STEPS = 12

#: Times are counted in classes, each a seventh wider than the one before, from 1 ms to an hour.
_LEAST_S = 0.001
_RATIO = 1.15
_CLASSES = 110


class _Step:
    """What happened in one step."""

    __slots__ = (
        "_percentiles",
        "actual_tokens",
        "failures",
        "finished",
        "judged_tokens",
        "met_tokens",
        "number",
        "predicted_tokens",
        "prompt_tokens",
        "ttft",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.finished = 0
        self.failures: Counter[str] = Counter()
        self.judged_tokens = self.met_tokens = 0
        self.prompt_tokens = self.predicted_tokens = self.actual_tokens = 0
        self.ttft = [0] * _CLASSES
        self._percentiles: tuple[float | None, float | None] | None = None

    def percentiles(self, now: int) -> tuple[float | None, float | None]:
        """P50 and P90 in step number ``now``; worked out once when this step is over."""
        if self._percentiles is not None:
            return self._percentiles
        found = percentile(self.ttft, 50), percentile(self.ttft, 90)
        if self.number < now:
            self._percentiles = found
        return found


class Timeline:
    """Bounded: what is older than ``STEPS`` steps is forgotten. ``now`` never goes back."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._last: _Step | None = None

    def first_token(self, now: float, seconds: float, input_tokens: int, *, met: bool) -> None:
        """A request got its first token; ``met``: as soon as it should."""
        step = self._step(now)
        step.ttft[_class(seconds)] += 1
        step.judged_tokens += input_tokens
        step.met_tokens += input_tokens * met

    def no_token(self, now: float, input_tokens: int) -> None:
        """A request failed without one."""
        self._step(now).judged_tokens += input_tokens

    def ended(self, now: float, trail: Trail) -> None:
        step = self._step(now)
        if trail.outcome == "ok":
            step.finished += 1
        elif trail.outcome is not None and trail.outcome != "cancelled":
            step.failures[trail.outcome] += 1
        if trail.prefill is not None and trail.dispatch is not None:
            step.prompt_tokens += trail.prefill.input_tokens
            step.actual_tokens += trail.prefill.cached_tokens
            step.predicted_tokens += trail.dispatch.decision.chosen.cached_tokens

    def content(self, now: float) -> dict[str, Any]:
        """Columns, oldest step first, the last one still going on; and the figures of the last
        minute. None where there is nothing to tell. Shares are between 0 and 1."""
        last = _number(now)
        steps = [self._steps.get(number) for number in range(last - STEPS + 1, last + 1)]
        recent = [step for step in steps[-_NOW_STEPS:] if step is not None]
        ttft = _sum(step.ttft for step in recent)
        percentiles = [step.percentiles(last) if step else (None, None) for step in steps]
        return {
            "step_s": STEP_S,
            "ttft_p50_s": [p50 for p50, _ in percentiles],
            "ttft_p90_s": [p90 for _, p90 in percentiles],
            "slo": [step and _share(step.met_tokens, step.judged_tokens) for step in steps],
            "finished": [step.finished if step else 0 for step in steps],
            "failed": [step.failures.total() if step else 0 for step in steps],
            "now": {
                "over_s": _NOW_STEPS * STEP_S,
                "ttft_p50_s": percentile(ttft, 50),
                "ttft_p90_s": percentile(ttft, 90),
                "slo": _share(
                    sum(step.met_tokens for step in recent),
                    sum(step.judged_tokens for step in recent),
                ),
                "finished": sum(step.finished for step in recent),
                "failures": dict(sum((step.failures for step in recent), Counter())),
                "cached": _share(
                    sum(step.actual_tokens for step in recent),
                    prompt := sum(step.prompt_tokens for step in recent),
                ),
                "cached_predicted": _share(sum(step.predicted_tokens for step in recent), prompt),
            },
        }

    def _step(self, now: float) -> _Step:
        number = _number(now)
        step = self._last
        if step is None or step.number != number:
            step = self._last = self._steps[number] = _Step(number)
            for old in [one for one in self._steps if one <= number - STEPS]:
                del self._steps[old]
        return step


def percentile(counts: Sequence[int], percent: float) -> float | None:
    """Of times counted in classes, seconds; at most a seventh off. None without any."""
    wanted = math.ceil(sum(counts) * percent / 100)
    if wanted == 0:
        return None
    seen = 0
    for number, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return float(_LEAST_S * _RATIO ** (number - 0.5))
    raise AssertionError("more wanted than there are")


def _class(seconds: float) -> int:
    """Class n holds times above _LEAST_S·_RATIO^(n-1), up to _LEAST_S·_RATIO^n."""
    if seconds <= _LEAST_S:
        return 0
    return min(_CLASSES - 1, math.ceil(math.log(seconds / _LEAST_S, _RATIO)))


def _number(now: float) -> int:
    return int(now // STEP_S)


def _sum(columns: Iterable[Sequence[int]]) -> list[int]:
    total = [0] * _CLASSES
    for column in columns:
        total = [a + b for a, b in zip(total, column, strict=True)]
    return total


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
