"""Made-up figures and a study small enough to be made in a test."""

from collections.abc import Iterable, Mapping
from typing import Any

from vertumnus_bench.study.aggregate import Figures
from vertumnus_bench.study.contenders import Role
from vertumnus_bench.study.point import Bin, Point, Result
from vertumnus_sim.metrics import Row


def row(mean_ms: float = 100.0, **rest: Any) -> Row:
    """One run, as the simulator gives it."""
    found: dict[str, Any] = {
        "workload": "production",
        "rate": 26.0,
        "policy": "fluid",
        "composition": "40x1",
        "gpus": 40,
        "seed": 1,
        "requests": 90,
        "refused": 0,
        "mean_ms": mean_ms,
        "p50_ms": mean_ms / 2,
        "p90_ms": mean_ms * 2,
        "p99_ms": mean_ms * 4,
        "slo_pct": 90.0,
        "hit_pct": 50.0,
        "gpu_s": 10.0,
        "utilisation_pct": 40.0,
        "by_degree": {1: 90},
        "moves": 2,
        "copies": 0,
        "pulls": 3,
        "copied_blocks": 0,
        "reclaims": 0,
        "extrapolated": 0,
        "sim_requests_per_s": 1000.0,
        "profile": "p",
        "settings": {},
    }
    return Row(**(found | rest))


def figures(
    policy: str, mean_ms: float, *, role: Role = Role.OURS, rate: float | None = 26, **rest: Any
) -> Figures:
    """One contender in one case."""
    found: dict[str, Any] = {
        "workload": "production",
        "p50_ms": mean_ms / 2,
        "p90_ms": mean_ms * 2,
        "p99_ms": mean_ms * 4,
        "slo_pct": 90.0,
        "hit_pct": 50.0,
        "gpu_s": 10.0,
        "ci_ms": None,
        "seeds": 1,
        "composition": "40x1",
        "settings": {},
        "tuned_ms": None,
        "requests": 90,
        "refused": 0,
        "extrapolated": 0,
        "utilisation_pct": 40.0,
        "moves": 0.0,
        "pulls": 0.0,
        "saturated": False,
    }
    return Figures(policy=policy, mean_ms=mean_ms, role=role, rate=rate, **(found | rest))


def bins(*sums: tuple[int, float]) -> list[Bin]:
    """One bin of ten seconds after the other: requests, Σ of seconds."""
    return [Bin(10.0 * at, 10.0, count, total_s) for at, (count, total_s) in enumerate(sums)]


class FakeRuns:
    """Gives every point the row that ``rows`` has for its composition and settings, and notes the
    points."""

    def __init__(self, rows: Mapping[tuple[str, tuple[tuple[str, str], ...]], Row]) -> None:
        self._rows = rows
        self.points: list[Point] = []

    def __call__(self, title: str, points: Iterable[Point]) -> dict[Point, Result]:
        points = list(points)
        self.points += points
        return {p: Result(self._rows[p.composition, p.settings]) for p in points}
