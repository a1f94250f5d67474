"""The figures of a study as pictures; needs matplotlib (the ``bench`` extra)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vertumnus_bench.matplotlib_svg import svg_pyplot
from vertumnus_bench.study.aggregate import Figures
from vertumnus_bench.study.contenders import CONTROLLER, FIXED, FLUID, Role
from vertumnus_bench.study.sensitivity import SWITCH
from vertumnus_bench.study.summary import Series, Summary

_DRAWN = (Role.BASELINE, Role.PAPER, Role.OURS, Role.BOUND)
_OURS = {"fluid": "#084594", "late": "#4292c6", "paper": "#d94801", "oracle": "#238b45"}
_OTHERS = ("#cccccc", "#8c8c8c", "#404040", "#8c6bb1", "#41ae76", "#df65b0", "#ce9c5a")


def plot_study(of: Summary, folder: Path) -> list[Path]:
    """``ttft.svg``, ``slo.svg``, ``hits.svg``, ``components.svg``, ``varying.svg`` and
    ``sensitivity.svg``, those that there are figures for. None without matplotlib, which is
    said."""
    if (pyplot := svg_pyplot()) is None:
        return []
    # Equal figures give equal files.
    pyplot.rcParams["svg.hashsalt"] = "study"
    kind = "simulated, a quick run" if of.quick else "simulated"
    drawn: list[tuple[str, Any]] = []
    rows = [row for row in of.rows if row.rate is not None and row.role in _DRAWN]
    if rows:
        drawn += [
            ("ttft", _by_load(pyplot, rows, kind, "TTFT", _TTFT)),
            ("slo", _by_load(pyplot, rows, kind, "SLO attainment by input tokens", _SLO)),
            ("hits", _by_load(pyplot, rows, kind, "prefix hit rate", _HITS)),
        ]
    if of.components:
        drawn.append(("components", _components(pyplot, of, kind)))
    if of.over_time:
        drawn.append(("varying", _varying(pyplot, of.over_time, kind)))
    if of.sensitivity:
        drawn.append(("sensitivity", _sensitivity(pyplot, of, kind)))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in drawn:
        path = folder / f"{name}.svg"
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)
        paths.append(path)
    return paths


_Measure = tuple[str, str, Callable[[Figures], float]]
_TTFT: tuple[_Measure, ...] = (
    ("mean, ms", "log", lambda row: row.mean_ms),
    ("P90, ms", "log", lambda row: row.p90_ms),
)
_SLO: tuple[_Measure, ...] = (("% of input tokens in time", "linear", lambda row: row.slo_pct),)
_HITS: tuple[_Measure, ...] = (("% of input tokens", "linear", lambda row: row.hit_pct),)


def _by_load(
    pyplot: Any, rows: Sequence[Figures], kind: str, title: str, measures: Sequence[_Measure]
) -> Any:
    """A column for each workload, a row for each measure, a line for each contender."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    names = list(dict.fromkeys(row.policy for row in rows))
    others = [name for name in names if name not in _OURS]
    colours = _OURS | {name: _OTHERS[at % len(_OTHERS)] for at, name in enumerate(others)}
    figure, grid = pyplot.subplots(
        len(measures),
        len(workloads),
        figsize=(2.9 * len(workloads) + 2, 2.8 * len(measures) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for line, (label, scale, value) in enumerate(measures):
        for column, workload in enumerate(workloads):
            axes = grid[line][column]
            for name in names:
                of = [row for row in rows if (row.workload, row.policy) == (workload, name)]
                of.sort(key=lambda row: row.rate or 0.0)
                axes.plot(
                    [row.rate for row in of],
                    [value(row) for row in of],
                    marker="o" if name in _OURS else ".",
                    linewidth=2.0 if name in _OURS else 1.0,
                    linestyle=":" if name == "oracle" else "-",
                    color=colours[name],
                    label=name,
                )
            axes.set(
                yscale=scale, xticks=sorted({r.rate or 0.0 for r in rows if r.workload == workload})
            )
            if line == 0:
                axes.set_title(workload)
            if line == len(measures) - 1:
                axes.set_xlabel("requests/s, 40 GPUs")
            if column == 0:
                axes.set_ylabel(label)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.suptitle(f"{title} by load ({kind})")
    return figure


def _components(pyplot: Any, of: Summary, kind: str) -> Any:
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    parts = of.components
    bars = axes.barh(
        [part.part for part in parts], [part.to_first for part in parts], color=_OURS["late"]
    )
    axes.bar_label(
        bars,
        [
            "1" if p.to_previous is None else f"{p.to_first:.2f} ({p.to_previous - 1:+.0%})"
            for p in parts
        ],
        padding=3,
    )
    axes.invert_yaxis()
    axes.set(
        xlabel=f"mean TTFT, geometric mean over {parts[0].points} points, paper's policy = 1",
        title=f"Which part gives how much ({kind})",
        xlim=(0, 1.25 * max(part.to_first for part in parts)),
    )
    return figure


def _varying(pyplot: Any, over_time: Sequence[Series], kind: str) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for one in over_time:
        shown = {FLUID: "#084594", CONTROLLER: "#4292c6", _best_fixed(over_time): "#737373"}
        if one.policy in shown and one.bins:
            axes.plot(
                [b.start_s + b.seconds / 2 for b in one.bins],
                [1000 * b.total_s / b.requests for b in one.bins],
                label=one.policy,
                color=shown[one.policy],
                marker=".",
            )
    axes.set(
        xlabel="arrival, s",
        ylabel="mean TTFT, ms",
        yscale="log",
        title=f"A workload that changes, and the best fixed mix of all of it ({kind})",
    )
    axes.legend(fontsize="small")
    return figure


def _best_fixed(over_time: Sequence[Series]) -> str | None:
    """That of the lowest mean TTFT over all phases."""

    def mean_s(one: Series) -> float:
        return sum(b.total_s for b in one.bins) / sum(b.requests for b in one.bins)

    fixed = [one for one in over_time if one.policy.startswith(FIXED) and one.bins]
    return min(fixed, key=mean_s).policy if fixed else None


def _sensitivity(pyplot: Any, of: Summary, kind: str) -> Any:
    assumptions = list(dict.fromkeys(one.assumption for one in of.sensitivity))
    figure, row = pyplot.subplots(
        1,
        len(assumptions),
        figsize=(3.2 * len(assumptions), 3.4),
        squeeze=False,
        layout="constrained",
    )
    for axes, assumption in zip(row[0], assumptions, strict=True):
        found = [one for one in of.sensitivity if one.assumption == assumption]
        for series in dict.fromkeys(one.series for one in found):
            line = [one for one in found if one.series == series]
            axes.plot(
                [one.value for one in line], [one.mean_ms for one in line], "o-", label=series
            )
        values = [one.value for one in found]
        if assumption != SWITCH and max(values) >= 10 * min(values):
            axes.set_xscale("log")
        axes.set(xlabel=assumption, ylim=(0, None))
        axes.legend(fontsize="small")
    row[0][0].set_ylabel("mean TTFT, ms")
    figure.suptitle(f"What hangs on the assumptions, {of.sensitivity_at} ({kind})")
    return figure
