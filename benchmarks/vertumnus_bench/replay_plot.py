"""A figure of a replay; needs matplotlib (the ``bench`` extra)."""

from collections.abc import Sequence
from pathlib import Path

from vertumnus_bench.matplotlib_svg import svg_pyplot
from vertumnus_bench.replay_report import CLASSES, Deadlines, length_class
from vertumnus_bench.replaying import Answer

_COLOURS = ("#9ecae1", "#4292c6", "#084594")


def plot_replay(
    answers: Sequence[Answer],
    trace_tokens: Sequence[int],
    deadlines: Deadlines,
    warmup_s: float,
    path: Path,
) -> Path | None:
    """TTFT of every request by its due time and by rank, one colour per length class; failures
    along the bottom. Written to ``path``, an SVG. None without matplotlib, which is said."""
    if (pyplot := svg_pyplot()) is None:
        return None
    figure, (over_time, ranked) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for kind, name in enumerate(CLASSES):
        of_kind = [a for a in answers if length_class(trace_tokens[a.number]) == kind]
        served = [(a.due_s, a.first_s) for a in of_kind if a.failure is None and a.first_s]
        if not served:
            continue
        at_s, ttft_s = zip(*served, strict=True)
        over_time.plot(at_s, ttft_s, ".", color=_COLOURS[kind], label=name, markersize=3)
        over_time.axhline(deadlines.seconds[kind], color=_COLOURS[kind], linewidth=0.7)
        measured = sorted(ttft for due_s, ttft in served if due_s >= warmup_s)
        shares = [(rank + 1) / len(measured) for rank in range(len(measured))]
        ranked.step(measured, shares, where="post", color=_COLOURS[kind], label=name)
    failed_s = [answer.due_s for answer in answers if answer.failure is not None]
    if failed_s:
        transform = over_time.get_xaxis_transform()
        over_time.plot(failed_s, [0.01] * len(failed_s), "rx", transform=transform, label="failed")
    over_time.axvspan(0, warmup_s, color="#eeeeee", zorder=0)
    over_time.set(xlabel="due, s", ylabel="TTFT, s", yscale="log")
    ranked.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
    for axes in (over_time, ranked):
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return path
