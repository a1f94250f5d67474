"""What the windows so far say, and how much of it chance may have said."""

import math
from collections import deque
from dataclasses import dataclass

from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.demand import Demand

#: Windows that are remembered. Those further back narrow no interval worth mentioning.
_MEMORY = 30

#: Moves are chosen where the demand is extreme, which makes a difference of two such demands
#: look larger, by this factor, than chance makes that of any two.
_EXTREMES = 1.5


@dataclass(frozen=True, slots=True)
class Forecast:
    """``mean`` demand of the last ``windows``, and the ``peak`` that one more stays below unless
    chance exceeds the configured deviations: the upper end of a prediction interval. Seconds."""

    mean: float = 0.0
    peak: float = 0.0
    windows: int = 0


@dataclass(frozen=True, slots=True)
class LongShare:
    """``long`` of ``requests`` are long."""

    long: int
    requests: int

    @property
    def fraction(self) -> float:
        return self.long / self.requests

    def deviation(self, other: "LongShare") -> float:
        """Standard deviation of the difference of two fractions that are equal in truth."""
        pooled = (self.long + other.long) / (self.requests + other.requests)
        return math.sqrt(pooled * (1 - pooled) * (1 / self.requests + 1 / other.requests))


class Evidence:
    """The windows since the composition last changed, how long their demand has been outside the
    band, and what is known of the demand's noise, which no change of the composition touches.

    ``patience`` is how many windows below the band a merge needs. It doubles when a move is
    undone although the demand has not changed by more than chance explains: then the noise
    reaches over the whole band, and only a longer look can tell. A real change of the demand
    makes it short again.
    """

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self.above = 0
        self.below = 0
        self.patience = config.persistence
        self._recent: deque[Demand] = deque(maxlen=_MEMORY)
        self._seconds = 0.0
        self._squares = 0.0
        self._moved_at: Forecast | None = None

    def add(self, demand: Demand, utilisation: float) -> None:
        """A window with arrivals."""
        keep = 1 - 1 / _MEMORY
        self._seconds = self._seconds * keep + demand.seconds
        self._squares = self._squares * keep + demand.squares
        self._recent.append(demand)
        self.above = self.above + 1 if utilisation > self._config.upper else 0
        self.below = self.below + 1 if utilisation < self._config.lower else 0

    def add_idle(self) -> None:
        """A window without arrivals: no overload, and no evidence of a low demand either."""
        self.above = 0

    def forget(self) -> None:
        """Start over, with the same idea of the noise."""
        self._recent.clear()
        self.above = self.below = 0

    def forecast(self) -> Forecast:
        """From the present streak outside the band, or from as many windows as persist."""
        windows = self._last(max(self.above, self.below, self._config.persistence))
        if not windows:
            return Forecast()
        mean = sum(window.seconds for window in windows) / len(windows)
        spread = self._config.sigmas * self._deviation(mean, 1 + 1 / len(windows))
        return Forecast(mean, mean + spread, len(windows))

    def reversed(self) -> None:
        """A move against the direction of the last one is chosen at the present forecast."""
        now, then = self.forecast(), self._moved_at
        if then is None:
            return
        mean = (now.mean * now.windows + then.mean * then.windows) / (now.windows + then.windows)
        chance = self._deviation(mean, 1 / now.windows + 1 / then.windows)
        if abs(now.mean - then.mean) > _EXTREMES * self._config.sigmas * chance:
            self.patience = self._config.persistence
        else:
            self.patience = min(2 * self.patience, _MEMORY)

    def moved(self) -> None:
        """A move is chosen at the present forecast."""
        self._moved_at = self.forecast()

    def long_now(self) -> LongShare | None:
        """The long requests of the last windows; None until enough have passed."""
        windows = self._last(self._config.persistence)
        if len(windows) < self._config.persistence:
            return None
        return LongShare(
            sum(window.long_requests for window in windows),
            sum(window.requests for window in windows),
        )

    def long_each(self) -> list[float]:
        """The same fraction window by window."""
        windows = self._last(self._config.persistence)
        return [window.long_requests / window.requests for window in windows]

    def _last(self, count: int) -> list[Demand]:
        return list(self._recent)[-count:]

    def _deviation(self, mean: float, scale: float) -> float:
        """Standard deviation of a demand of ``mean`` seconds, its variance times ``scale``.

        Compound Poisson: the variance is the mean times Σ Ê² / Σ Ê, the size of a request. The
        size is taken from a long memory, for quiet windows are those that large requests miss.
        """
        size_s = self._squares / self._seconds if self._seconds else 0.0
        return math.sqrt(mean * size_s * scale)
