"""Prefill time by degree: the profile's formula, corrected by what the ranks report.

``Ê_C(R, P) = f_C · [d_C + a_C·R + b·P + (1/C)·(c·R + α·(R·P + R(R+1)/2))]`` with R uncached and
P cached tokens; ``f_C`` is the correction, 1 until the first report.
"""

import math
from dataclasses import dataclass

from vertumnus_router.core.profile import Profile, ProfileError


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """``gain``: weight of a new report; ``limit``: the factor stays in [1/limit, limit]."""

    gain: float = 0.1
    limit: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.gain <= 1:
            raise ValueError(f"correction gain {self.gain}: choose from 0 (off) to 1")
        if not self.limit >= 1:
            raise ValueError(f"correction limit {self.limit}: choose 1 or more")


@dataclass(frozen=True, slots=True)
class Correction:
    """``factor`` = reported over profiled time at one degree, after ``samples`` reports."""

    factor: float = 1.0
    samples: int = 0


class PrefillModel:
    """Seconds that a prefill takes at a degree. Mutable only through ``observe``."""

    def __init__(self, profile: Profile, correction: CorrectionConfig | None = None) -> None:
        self.profile = profile
        self._config = correction or CorrectionConfig()
        self._coefficients: dict[int, tuple[float, float, float, float]] = {}
        self._corrections: dict[int, Correction] = {}

    def fault(self, degree: int) -> str | None:
        """Why ``degree`` cannot be priced, or None."""
        try:
            self._at(degree)
        except ProfileError as exc:
            return str(exc)
        return None

    def service_s(self, degree: int, uncached_tokens: int, cached_tokens: int) -> float:
        """``Ê_C(R, P)`` in seconds; ``ProfileError`` for a degree outside the profile."""
        base_s = self.profiled_s(degree, uncached_tokens, cached_tokens)
        correction = self._corrections.get(degree) if self._corrections else None
        return base_s if correction is None else base_s * correction.factor

    def compared_s(self, degree: int, uncached_tokens: int, cached_tokens: int) -> float:
        """The same for comparing degrees: one that has no reports takes the correction of the
        nearest that has, or the error of the profile would speak for, or against, what was never
        tried."""
        base_s = self.profiled_s(degree, uncached_tokens, cached_tokens)
        if not self._corrections:
            return base_s
        nearest = min(self._corrections, key=lambda known: (abs(math.log2(known / degree)), known))
        return base_s * self._corrections[nearest].factor

    def profiled_s(self, degree: int, uncached_tokens: int, cached_tokens: int) -> float:
        """The same without the correction."""
        if uncached_tokens < 0 or cached_tokens < 0:
            raise ValueError(
                f"no prefill has {uncached_tokens} uncached and {cached_tokens} cached tokens"
            )
        d_s, linear, b, alpha = self._coefficients.get(degree) or self._at(degree)
        pairs = uncached_tokens * (cached_tokens + (uncached_tokens + 1) / 2)
        return d_s + linear * uncached_tokens + b * cached_tokens + alpha * pairs

    def observe(
        self, degree: int, uncached_tokens: int, cached_tokens: int, compute_s: float
    ) -> None:
        """A prefill that had its worker to itself took ``compute_s``.

        A moving geometric mean: a report of twice the time and one of half of it cancel out.
        """
        if compute_s <= 0 or uncached_tokens <= 0 or not self._config.gain:
            return
        expected_s = self.profiled_s(degree, uncached_tokens, cached_tokens)
        bound = math.log(self._config.limit)
        report = min(bound, max(-bound, math.log(compute_s / expected_s)))
        before = self._corrections.get(degree, Correction())
        level = math.log(before.factor)
        level += self._config.gain * (report - level)
        self._corrections[degree] = Correction(math.exp(level), before.samples + 1)

    def corrections(self) -> dict[int, Correction]:
        """The correction of every degree that has reports."""
        return dict(self._corrections)

    def _at(self, degree: int) -> tuple[float, float, float, float]:
        """The coefficients of the formula, worked out once."""
        at, shared = self.profile.coefficients(degree), self.profile
        found = self._coefficients[degree] = (
            at.d_s,
            at.a_s_per_token + shared.c_s_per_token / degree,
            shared.b_s_per_token,
            shared.alpha_s_per_pair / degree,
        )
        return found
