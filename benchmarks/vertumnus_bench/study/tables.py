"""The figures of a study as Markdown."""

from collections.abc import Iterable, Sequence

from vertumnus_bench.study.aggregate import Figures, by_name
from vertumnus_bench.study.summary import Summary
from vertumnus_bench.study.tuning import Case


def tables(of: Summary) -> str:
    """All of them; every number is simulated, and they say so."""
    parts = [_about(of), _goals(of), _components(of)]
    parts += [_case(case, list(rows.values())) for case, rows in by_name(of.rows).items()]
    parts += [_phases(of), _sensitivity(of)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(of: Summary) -> str:
    lines = [of.note, ""]
    if of.quick:
        lines += ["**A quick run: it proves that the study runs, its figures mean nothing.**", ""]
    seeds = ", ".join(map(str, of.seeds))
    lines.append(
        f"{of.gpus} GPUs, profile `{of.profile}`, the first {of.requests:,} requests of each "
        f"workload, seeds {seeds}; baselines tuned with seed {of.tuning_seed}. Code {of.code}. "
        f"{of.sim_requests_per_s:,.0f} simulated requests per second of one core."
    )
    lines += [f"- {name}: {origin}" for name, origin in of.origins.items()]
    lines += [f"- {name} was left out: {why}" for name, why in of.skipped.items()]
    if of.validity is None:
        lines.append("- How far the simulator is from a real pool was not given (`--validity`).")
    else:
        lines.append(
            f"- Against a real pool the simulator's mean TTFT is off by "
            f"{of.validity['mean_err_pct']:.1f} %, its P90 by {of.validity['p90_err_pct']:.1f} %."
        )
    lines.append(f"- {of.oracle_note}")
    return "\n".join(lines)


def _goals(of: Summary) -> str:
    """A row for each goal and load, a column for each of ours."""
    policies = list(dict.fromkeys(goal.policy for goal in of.goals))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    # Ours in the order of arrival is another one for each of ours.
    against: dict[tuple[str, ...], dict[str, None]] = {}
    for goal in of.goals:
        place = _place((goal.workload, goal.rate))
        value = "not run" if goal.found is None else f"{goal.found:.1f}"
        named = goal.goal, place, goal.target
        found.setdefault(named, {})[goal.policy] = f"{value}{' ✓' if goal.met else ''}"
        if goal.against is not None:
            against.setdefault(named, {})[goal.against] = None
    rows = [
        (
            *named[:2],
            ", ".join(against.get(named, ())),
            named[2],
            *(cells.get(policy, "") for policy in policies),
        )
        for named, cells in found.items()
    ]
    met = [
        f"{policy} {sum(goal.met is True for goal in mine)} of "
        f"{sum(goal.met is not None for goal in mine)}"
        for policy in policies
        if (mine := [goal for goal in of.goals if goal.policy == policy])
    ]
    head = ("goal", "load", "against", "target, %", *policies)
    return f"### Goals met (simulated): {', '.join(met)}\n\n" + _table(head, rows)


def _components(of: Summary) -> str:
    if not of.components:
        return ""
    rows = [
        (
            part.part,
            f"{part.mean_ms:,.0f}",
            "" if part.to_previous is None else f"{100 * (part.to_previous - 1):+.1f}",
            f"{100 * (part.to_first - 1):+.1f}",
        )
        for part in of.components
    ]
    points = of.components[0].points
    return (
        f"### Which part gives how much (simulated, geometric mean over {points} points)\n\n"
        + _table(("", "mean TTFT, ms", "to the row above, %", "to the first, %"), rows)
    )


def _case(case: Case, rows: Sequence[Figures]) -> str:
    cells = [
        (
            row.policy,
            f"{row.mean_ms:,.0f}" + ("" if row.ci_ms is None else f" ± {row.ci_ms:,.0f}"),
            f"{row.p50_ms:,.0f}",
            f"{row.p90_ms:,.0f}",
            f"{row.p99_ms:,.0f}",
            f"{row.slo_pct:.1f}",
            f"{row.hit_pct:.1f}",
            f"{row.gpu_s:,.0f}",
            f"{row.refused}",
            row.composition,
            " ".join(f"{name}={value}" for name, value in sorted(row.settings.items()))
            # They are long, and said above.
            if row.policy != "oracle"
            else "see above",
        )
        for row in rows
    ]
    title = f"### {_place(case)} (simulated)"
    if rows[0].saturated:
        title += ": saturated, counts for no goal"
    head = (
        *("", "mean, ms", "P50", "P90", "P99", "SLO, %", "hits, %", "GPU-s", "refused"),
        *("composition", "settings"),
    )
    return f"{title}\n\n" + _table(head, cells)


def _phases(of: Summary) -> str:
    if not of.over_time:
        return ""
    count = len(of.over_time[0].phases_ms)
    rows = [
        (one.policy, *("" if m is None else f"{m:,.0f}" for m in one.phases_ms))
        for one in of.over_time
    ]
    head = ("", *(f"phase {number + 1}" for number in range(count)))
    return "### Mean TTFT by phase of the varying workload, ms (simulated)\n\n" + _table(head, rows)


def _sensitivity(of: Summary) -> str:
    if not of.sensitivity:
        return ""
    rows = [
        (one.assumption, f"{one.value:g}", one.series, f"{one.mean_ms:,.0f}", f"{one.p90_ms:,.0f}")
        for one in of.sensitivity
    ]
    return f"### What hangs on the assumptions, {of.sensitivity_at} (simulated)\n\n" + _table(
        ("assumption", "value", "policy", "mean, ms", "P90, ms"), rows
    )


def _place(case: Case) -> str:
    workload, rate = case
    return workload if rate is None else f"{workload}, {rate:g}/s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
