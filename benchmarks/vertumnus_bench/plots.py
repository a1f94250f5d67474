"""Figures of the measurements; needs matplotlib (the ``bench`` extra)."""

from pathlib import Path
from typing import Any

from vertumnus_router.lattice import parse_composition

from vertumnus_bench.matplotlib_svg import svg_pyplot
from vertumnus_bench.switching import DEGREES, SIZE
from vertumnus_bench.varying import CONTROLLED, Replay, VaryingPlan

_BIN_S = 2.0
_COLOURS = {1: "#9ecae1", 2: "#4292c6", 4: "#084594"}


def plot_varying(replays: list[Replay], plan: VaryingPlan, folder: Path) -> Path | None:
    """``varying.svg``: arrivals, composition and TTFT over time. None without matplotlib,
    which is said."""
    if (pyplot := svg_pyplot()) is None:
        return None
    by_name = {replay.name: replay for replay in replays}
    controlled = by_name[CONTROLLED]
    figure, (rate, composition, ttft) = pyplot.subplots(
        3, 1, sharex=True, figsize=(9, 7), height_ratios=(1, 1, 2), layout="constrained"
    )
    _plot_rate(rate, controlled)
    _plot_composition(composition, controlled, plan.seconds)
    for name, replay in by_name.items():
        at_s, mean_s = _binned(replay)
        label = f"{name}, mean {replay.mean_ttft_s():.2f} s"
        wide = 2.5 if name == CONTROLLED else 1.0
        ttft.plot(at_s, mean_s, label=label, linewidth=wide)
    ttft.set(xlabel="seconds", ylabel="TTFT, s", yscale="log", xlim=(0, plan.seconds))
    ttft.legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "varying.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _plot_rate(axes: Any, replay: Replay) -> None:
    """Prompt tokens that arrive per second."""
    tokens: dict[int, int] = {}
    for stream in replay.streams:
        at = int(stream.sent_at_s // _BIN_S)
        tokens[at] = tokens.get(at, 0) + len(stream.ask.prompt)
    axes.bar(
        [(at + 0.5) * _BIN_S for at in tokens],
        [count / _BIN_S for count in tokens.values()],
        width=_BIN_S,
        color="#bdbdbd",
    )
    axes.set(ylabel="prompt tokens/s")


def _plot_composition(axes: Any, replay: Replay, end_s: float) -> None:
    """Which degree every rank serves at."""
    ends_s = [*(sample.at_s for sample in replay.composition[1:]), end_s]
    for sample, until_s in zip(replay.composition, ends_s, strict=True):
        for block in parse_composition(sample.composition, SIZE, DEGREES):
            axes.barh(
                block.first + block.degree / 2,
                until_s - sample.at_s,
                left=sample.at_s,
                height=block.degree * 0.96,
                color=_COLOURS[block.degree],
            )
    for degree, colour in _COLOURS.items():
        axes.barh(0, 0, color=colour, label=f"degree {degree}")
    axes.legend(fontsize="small", ncols=len(_COLOURS), loc="upper right")
    axes.set(ylabel="rank", yticks=range(SIZE + 1), ylim=(0, SIZE))


def _binned(replay: Replay) -> tuple[list[float], list[float]]:
    """Mean TTFT of the requests that arrived in each bin."""
    found: dict[int, list[float]] = {}
    for stream in replay.streams:
        if stream.first_s is not None:
            found.setdefault(int(stream.sent_at_s // _BIN_S), []).append(stream.first_s)
    bins = sorted(found)
    return (
        [(at + 0.5) * _BIN_S for at in bins],
        [sum(found[at]) / len(found[at]) for at in bins],
    )
