"""Figures of a profile, after the paper's Figures 2 and 4; needs matplotlib (extra ``bench``)."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.profiling.fit import fit, medians, relative_errors
from sgl_vertumnus.profiling.plan import Cell
from sgl_vertumnus.profiling.record import Sample


def plot(samples: Sequence[Sample], folder: Path) -> tuple[Path, Path]:
    """``speedup.svg`` and ``fit.svg``. Raises ``ConfigurationError`` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("no plots without matplotlib: pip install 'sgl-vertumnus[bench]'")
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    measured = medians(samples)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "speedup.svg", folder / "fit.svg"
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    _plot_speedups(axes, measured)
    figure.savefig(paths[0], metadata={"Date": None})
    pyplot.close(figure)
    figure, (against, errors) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _plot_fit(against, errors, measured)
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def speedups(measured: dict[Cell, float]) -> dict[int, list[tuple[int, float]]]:
    """By degree: (R, how many times faster than at the smallest degree) of cold prompts, by R."""
    cold = {cell: seconds for cell, seconds in measured.items() if not cell.cached_tokens}
    base_degree = min(cell.degree for cell in measured)
    base = {c.uncached_tokens: s for c, s in cold.items() if c.degree == base_degree}
    found: dict[int, list[tuple[int, float]]] = {}
    for cell, seconds in sorted(cold.items(), key=lambda one: one[0]):
        if cell.uncached_tokens in base:
            gain = base[cell.uncached_tokens] / seconds
            found.setdefault(cell.degree, []).append((cell.uncached_tokens, gain))
    return found


def _plot_speedups(axes: Any, measured: dict[Cell, float]) -> None:
    for degree, points in speedups(measured).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"degree {degree}")
    axes.set(xscale="log", xlabel="uncached tokens, nothing cached", ylabel="speed-up")
    axes.legend()


def _plot_fit(against: Any, errors: Any, measured: dict[Cell, float]) -> None:
    model = fit(measured)
    for degree in sorted(model.degrees):
        mine = {cell: seconds for cell, seconds in measured.items() if cell.degree == degree}
        predicted = [model.seconds(cell) for cell in mine]
        against.scatter(mine.values(), predicted, s=12, label=f"degree {degree}")
        sizes = sorted(abs(error) * 100 for error in relative_errors(model, mine.items()))
        shares = [(n + 1) / len(sizes) for n in range(len(sizes))]
        errors.step(sizes, shares, where="post", label=f"degree {degree}")
    ends = min(measured.values()), max(measured.values())
    against.plot(ends, ends, color="#bdbdbd", linewidth=1)
    against.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    errors.set(xlabel="|error|, %", ylabel="part of the cells", ylim=(0, 1))
    errors.legend()
