"""From the runs of several seeds to one row of figures; which points are saturated."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from vertumnus_sim.metrics import Row

from vertumnus_bench.study.contenders import Contender, Role
from vertumnus_bench.study.point import Bin
from vertumnus_bench.study.tuning import Case, Choice

#: Where the best baseline's mean TTFT is more than so many times that at its lowest load.
SATURATED = 10.0
#: Student's t for 95 %, two-sided, by degrees of freedom from 1 on.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one case: means over ``seeds`` runs. ``ci_ms``: half the width of the 95 %
    confidence interval of ``mean_ms`` over seeds (Student's t), None for a single one.
    ``rate`` is None for a workload that comes as it is; ``refused`` is the sum over all runs,
    ``tuned_ms`` the mean TTFT that the choice was made by."""

    simulated: bool = True
    workload: str
    rate: float | None
    policy: str
    role: Role
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    slo_pct: float
    hit_pct: float
    gpu_s: float
    ci_ms: float | None
    seeds: int
    composition: str
    settings: dict[str, str]
    tuned_ms: float | None
    requests: int
    refused: int
    extrapolated: int
    utilisation_pct: float
    moves: float
    pulls: float
    saturated: bool


@dataclass(frozen=True, slots=True)
class Runs:
    """What is to become a row."""

    contender: Contender
    case: Case
    choice: Choice
    rows: Sequence[Row]


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of their mean; None for one value. Raises
    ``ValueError`` for none, or more than the table has."""
    if not 1 <= len(values) <= len(_T95) + 1:
        raise ValueError(f"{len(values)} seeds: an interval is known for 1 to {len(_T95) + 1}")
    if len(values) == 1:
        return None
    return _T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def aggregate(runs: Iterable[Runs]) -> list[Figures]:
    """A row for each, in the same order."""
    rows = [_figures(of) for of in runs]
    saturated = saturated_cases(rows)
    return [
        msgspec.structs.replace(row, saturated=(row.workload, row.rate) in saturated)
        for row in rows
    ]


def saturated_cases(rows: Iterable[Figures]) -> set[Case]:
    """The cases beyond the knee of the best baseline: its mean TTFT is more than ``SATURATED``
    times its own at the workload's lowest load."""
    means: dict[str, dict[Case, float]] = {}
    for row in rows:
        if row.role is Role.BASELINE:
            means.setdefault(row.policy, {})[row.workload, row.rate] = row.mean_ms
    found: set[Case] = set()
    for case in {case for of in means.values() for case in of}:
        workload, _ = case
        best = min((of for of in means.values() if case in of), key=lambda of: of[case])
        lowest = min((c for c in best if c[0] == workload), key=_by_rate)
        if best[case] > SATURATED * best[lowest]:
            found.add(case)
    return found


def merge_bins(runs: Iterable[Sequence[Bin]]) -> list[Bin]:
    """The bins of several seeds as one series."""
    found: dict[float, Bin] = {}
    for bins in runs:
        for one in bins:
            before = found.get(one.start_s, Bin(one.start_s, one.seconds, 0, 0.0))
            found[one.start_s] = Bin(
                one.start_s,
                one.seconds,
                before.requests + one.requests,
                before.total_s + one.total_s,
            )
    return [found[start_s] for start_s in sorted(found)]


def phase_means_ms(bins: Sequence[Bin], phase_s: Sequence[float]) -> list[float | None]:
    """Mean TTFT of the requests that arrived in each phase; None for one without any."""
    found: list[float | None] = []
    begin_s = 0.0
    for seconds in phase_s:
        # A bin lies within one phase, but its start may be off by a rounding error.
        within = [b for b in bins if begin_s <= b.start_s + b.seconds / 2 < begin_s + seconds]
        count = sum(one.requests for one in within)
        found.append(1000 * sum(one.total_s for one in within) / count if count else None)
        begin_s += seconds
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Raises ``ValueError`` for none, or one that is not above 0."""
    if not values or min(values) <= 0:
        raise ValueError("a geometric mean is of values above 0")
    return math.exp(statistics.fmean(map(math.log, values)))


def by_name(rows: Iterable[Figures]) -> dict[Case, dict[str, Figures]]:
    """The rows of each case by contender, in the order of the rows."""
    found: dict[Case, dict[str, Figures]] = {}
    for row in rows:
        found.setdefault((row.workload, row.rate), {})[row.policy] = row
    return found


def _by_rate(case: Case) -> float:
    return case[1] or 0.0


def _figures(of: Runs) -> Figures:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(row, name) for row in of.rows)

    workload, rate = of.case
    return Figures(
        workload=workload,
        rate=rate,
        policy=of.contender.name,
        role=of.contender.role,
        mean_ms=mean("mean_ms"),
        p50_ms=mean("p50_ms"),
        p90_ms=mean("p90_ms"),
        p99_ms=mean("p99_ms"),
        slo_pct=mean("slo_pct"),
        hit_pct=mean("hit_pct"),
        gpu_s=mean("gpu_s"),
        ci_ms=half_width([row.mean_ms for row in of.rows]),
        seeds=len(of.rows),
        composition=of.choice.composition,
        settings=dict(of.choice.settings),
        tuned_ms=of.choice.mean_ms,
        requests=sum(row.requests for row in of.rows),
        refused=sum(row.refused for row in of.rows),
        extrapolated=sum(row.extrapolated for row in of.rows),
        utilisation_pct=mean("utilisation_pct"),
        moves=mean("moves"),
        pulls=mean("pulls"),
        saturated=False,
    )


def speeds(rows: Iterable[tuple[str, Row]]) -> Mapping[str, float]:
    """Simulated requests per CPU second of each contender, and of ``all`` together."""
    spent: dict[str, tuple[float, float]] = {}
    for name, row in rows:
        for key in (name, "all"):
            requests, seconds = spent.get(key, (0.0, 0.0))
            spent[key] = requests + row.requests, seconds + row.requests / row.sim_requests_per_s
    return {name: requests / seconds for name, (requests, seconds) in spent.items()}
