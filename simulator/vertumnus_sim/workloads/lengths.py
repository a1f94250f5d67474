"""Lengths in tokens, drawn so that every seed has the same distribution.

A sample of ``n`` takes the middle of each of ``n`` equally likely strata, in random order: what
differs between seeds is which request is long, not how many are.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()


class Lengths(Protocol):
    """A distribution of lengths."""

    def at(self, quantile: float) -> float:
        """The length that this share (between 0 and 1, both excluded) does not exceed."""
        ...


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Known at some percentages, which begin with 0 and end with 100; geometric in between."""

    percents: Sequence[float]
    tokens: Sequence[float]

    def at(self, quantile: float) -> float:
        percent = quantile * 100
        upper = min(bisect_right(self.percents, percent), len(self.percents) - 1)
        low, high = self.percents[upper - 1], self.percents[upper]
        share = (percent - low) / (high - low)
        return float(self.tokens[upper - 1] ** (1 - share) * self.tokens[upper] ** share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """``median`` and ``sigma`` of the logarithm, within bounds."""

    median: float
    sigma: float
    least: float = 1.0
    most: float = math.inf

    def at(self, quantile: float) -> float:
        found = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(quantile))
        return min(max(found, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Between:
    """Evenly between two lengths."""

    least: float
    most: float

    def at(self, quantile: float) -> float:
        return self.least + (self.most - self.least) * quantile


def sample(lengths: Lengths, count: int, source: Random) -> list[int]:
    """``count`` lengths of at least one token."""
    found = [max(1, round(lengths.at((stratum + 0.5) / count))) for stratum in range(count)]
    source.shuffle(found)
    return found
