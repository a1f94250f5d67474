"""What arrived in one window, counted in seconds of prefill work at every degree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: ``Ê_C(R, P)`` of a degree, uncached and cached tokens, in seconds.
ServiceTime = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand D(k) of a window, scaled to its nominal length.

    ``seconds`` is Σ Ê of the arrivals at the reference degree, the smallest of the ladder, so it
    does not change with the composition. ``squares`` is Σ Ê², in s²: the variance that chance
    gives a sum of that many independent arrivals of those sizes.
    """

    requests: int
    long_requests: int
    seconds: float
    squares: float


@dataclass(slots=True)
class Window:
    """Arrivals since ``start_s``. Sums only, so a window costs the same however much arrives."""

    start_s: float
    ladder: tuple[int, ...] = ()
    requests: int = 0
    long_requests: int = 0
    #: Σ Ê_C by degree
    service_s: dict[int, float] = field(default_factory=dict)
    squares: float = 0.0

    def add(
        self, service_s: ServiceTime, uncached_tokens: int, cached_tokens: int, *, is_long: bool
    ) -> None:
        """Count one arrival at every degree of the ladder."""
        for degree in self.ladder:
            own_s = service_s(degree, uncached_tokens, cached_tokens)
            self.service_s[degree] = self.service_s.get(degree, 0.0) + own_s
            if degree == self.ladder[0]:
                self.squares += own_s * own_s
        self.requests += 1
        self.long_requests += is_long

    def demand(self, window_s: float, now: float) -> Demand:
        """The demand until ``now``, per ``window_s`` seconds."""
        scale = window_s / (now - self.start_s)
        reference_s = self.service_s.get(self.ladder[0], 0.0) if self.ladder else 0.0
        return Demand(self.requests, self.long_requests, reference_s * scale, self.squares * scale)

    def kappa(self, limits: Mapping[int, float], rho: float, window_s: float) -> dict[int, float]:
        """κ_C by degree: the largest demand that one worker still meets the SLO at.

        ``limits`` says, where it was profiled, how many seconds of work Ê_C a degree-C worker may
        be given per second; elsewhere ``rho`` is taken. Σ Ê_ref / Σ Ê_C over the arrivals, how
        much faster than the reference a worker gets through this mix, makes reference seconds of
        it. Empty for a window without work.
        """
        if not self.ladder or not self.service_s:
            return {}
        reference_s = self.service_s[self.ladder[0]]
        return {
            degree: limits.get(degree, rho) * window_s * reference_s / own_s
            for degree, own_s in self.service_s.items()
            if own_s > 0
        }
