"""What the study is to show: each goal, what was found, whether it is met."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from vertumnus_bench.study.aggregate import Figures, by_name
from vertumnus_bench.study.contenders import (
    CONTROLLER,
    FCFS,
    FIXED,
    FLUID,
    LATE,
    ORACLE,
    PAPER,
    Role,
)
from vertumnus_bench.study.tuning import Case

#: Mean TTFT over time of each contender, by phase of the varying workload.
Phases = Mapping[str, Sequence[float | None]]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What ``policy``, one of ours or late binding with the controller, is to reach: ``found`` in
    percent (of SLO attainment in points) is to be as ``target`` says. None, with ``met``: what it
    takes was not run."""

    goal: str
    policy: str
    workload: str
    rate: float | None
    against: str | None
    target: str
    found: float | None
    met: bool | None


def goals(rows: Sequence[Figures], phases: Phases, varying: str) -> list[Goal]:
    """All goals, point by point; saturated points are left out."""
    cases = by_name(row for row in rows if not row.saturated)
    found: list[Goal] = []
    for policy in (LATE, FLUID):
        for case in highest_loads(cases):
            found += _at_the_highest_load(policy, case, cases[case])
        for case, of in cases.items():
            found += _at_every_load(policy, case, of)
    found += [_in_every_phase(name, phases, varying) for name in (LATE, FLUID, CONTROLLER)]
    return found


def highest_loads(cases: Iterable[Case]) -> list[Case]:
    """The case of highest rate of each workload."""
    found: dict[str, Case] = {}
    for case in cases:
        other = found.get(case[0])
        if other is None or (case[1] or 0.0) > (other[1] or 0.0):
            found[case[0]] = case
    return list(found.values())


def strongest(of: Mapping[str, Figures], roles: Sequence[Role]) -> Figures | None:
    """That of the lowest mean TTFT."""
    among = [row for row in of.values() if row.role in roles]
    return min(among, key=lambda row: row.mean_ms) if among else None


def reduction_pct(ours: float, theirs: float) -> float:
    """How much less ``ours`` is."""
    return 100 * (1 - ours / theirs)


def excess_pct(ours: float, theirs: float) -> float:
    """How much more ``ours`` is."""
    return 100 * (ours / theirs - 1)


def _at_the_highest_load(policy: str, case: Case, of: Mapping[str, Figures]) -> list[Goal]:
    ours, baseline = of.get(policy), strongest(of, (Role.BASELINE,))
    paper = of.get(PAPER)
    return [
        _goal(
            policy,
            "mean TTFT below the strongest baseline's",
            case,
            (ours, baseline),
            lambda a, b: reduction_pct(a.mean_ms, b.mean_ms),
            (">= 40", lambda found: found >= 40),
        ),
        _goal(
            policy,
            "P90 TTFT below the strongest baseline's",
            case,
            (ours, baseline),
            lambda a, b: reduction_pct(a.p90_ms, b.p90_ms),
            (">= 50", lambda found: found >= 50),
        ),
        _goal(
            policy,
            "SLO attainment above the strongest baseline's",
            case,
            (ours, baseline),
            lambda a, b: a.slo_pct - b.slo_pct,
            ("> 0, or 0 at 100 %", _is_up(baseline)),
        ),
        _goal(
            policy,
            "mean TTFT below the paper's policy on its best mix",
            case,
            (ours, paper),
            lambda a, b: reduction_pct(a.mean_ms, b.mean_ms),
            (">= 25", lambda found: found >= 25),
        ),
    ]


def _at_every_load(policy: str, case: Case, of: Mapping[str, Figures]) -> list[Goal]:
    ours = of.get(policy)
    return [
        _goal(
            policy,
            "mean TTFT above the best of all baselines and the paper's policy",
            case,
            (ours, strongest(of, (Role.BASELINE, Role.PAPER))),
            lambda a, b: excess_pct(a.mean_ms, b.mean_ms),
            ("<= 2", lambda found: found <= 2),
        ),
        _goal(
            policy,
            "mean TTFT above the oracle's",
            case,
            (ours, of.get(ORACLE)),
            lambda a, b: excess_pct(a.mean_ms, b.mean_ms),
            ("<= 10", lambda found: found <= 10),
        ),
        _goal(
            policy,
            "P99 TTFT above first come, first served",
            case,
            (ours, of.get(FCFS[policy])),
            lambda a, b: excess_pct(a.p99_ms, b.p99_ms),
            ("<= 20", lambda found: found <= 20),
        ),
    ]


def _goal(
    policy: str,
    title: str,
    case: Case,
    pair: tuple[Figures | None, Figures | None],
    measure: Callable[[Figures, Figures], float],
    target: tuple[str, Callable[[float], bool]],
) -> Goal:
    ours, theirs = pair
    text, is_met = target
    found = None if ours is None or theirs is None else measure(ours, theirs)
    return Goal(
        goal=title,
        policy=policy,
        workload=case[0],
        rate=case[1],
        against=None if theirs is None else theirs.policy,
        target=text,
        found=found,
        met=None if found is None else is_met(found),
    )


def _is_up(baseline: Figures | None) -> Callable[[float], bool]:
    perfect = baseline is not None and baseline.slo_pct >= 100
    return lambda found: found > 0 or (perfect and found == 0)


def _in_every_phase(name: str, phases: Phases, varying: str) -> Goal:
    """Against the best fixed mix of each phase, which may be another one every time."""
    ours = phases.get(name, ())
    fixed = [of for other, of in phases.items() if other.startswith(FIXED)]
    worst: float | None = None
    for at, mean_ms in enumerate(ours):
        best = min((m for of in fixed if (m := of[at]) is not None), default=None)
        if mean_ms is None or best is None:
            worst = None
            break
        excess = excess_pct(mean_ms, best)
        worst = excess if worst is None else max(worst, excess)
    return Goal(
        goal="mean TTFT above the best fixed mix of a phase, in the worst phase",
        policy=name,
        workload=varying,
        rate=None,
        against="late binding on the best fixed mix of each phase" if fixed else None,
        target="<= 3",
        found=worst,
        met=None if worst is None else worst <= 3,
    )
