"""Ê_C(R, P) = d_C + a_C·R + b·P + (1/C)·(c·R + α·W(R, P)) from measured prefills.

Non-negative least squares on the relative error. A degree's samples show a_C + c/C only, as one
slope. Which part of it the degree divides is a convention: the largest share that no degree
contradicts, c = min over C of C·slope, so that the degree with the least overhead has a_C = 0.
Predictions do not depend on it.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vertumnus_router.core.profile import Coefficients, ErrorSummary

from sgl_vertumnus.errors import VertumnusError
from sgl_vertumnus.profiling.plan import Cell
from sgl_vertumnus.profiling.record import Sample

#: Columns of norm 1 whose matrix is worse conditioned than this do not tell two terms apart.
_WORST_CONDITION = 1e3


class FitError(VertumnusError):
    """The measurements do not determine the coefficients; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients in seconds, a token and a pair of tokens."""

    degrees: Mapping[int, Coefficients]
    b_s_per_token: float
    c_s_per_token: float
    alpha_s_per_pair: float

    def seconds(self, cell: Cell) -> float:
        at = self.degrees[cell.degree]
        shared = self.c_s_per_token * cell.uncached_tokens + self.alpha_s_per_pair * pairs(cell)
        own = at.d_s + at.a_s_per_token * cell.uncached_tokens
        return own + self.b_s_per_token * cell.cached_tokens + shared / cell.degree


def pairs(cell: Cell) -> float:
    """W(R, P) = R·P + R(R+1)/2."""
    return cell.uncached_tokens * (cell.cached_tokens + (cell.uncached_tokens + 1) / 2)


def fit(measured: Mapping[Cell, float]) -> Fit:
    """The coefficients that come closest to the seconds of every cell.

    Raises:
        FitError: when the cells do not tell the terms apart, or a time is not above 0.
    """
    import numpy
    from scipy.optimize import nnls

    check_cells(measured)
    for cell, seconds in measured.items():
        if not 0 < seconds < math.inf:
            raise FitError(f"{cell} took {seconds} s: a time is finite and above 0")
    ladder = sorted({cell.degree for cell in measured})
    # One column for d and one for the slope of every degree, then b, then α.
    rows = []
    for cell, seconds in measured.items():
        row = [0.0] * (2 * len(ladder) + 2)
        at = 2 * ladder.index(cell.degree)
        row[at : at + 2] = [1.0, float(cell.uncached_tokens)]
        row[-2:] = [float(cell.cached_tokens), pairs(cell) / cell.degree]
        rows.append([value / seconds for value in row])
    matrix = numpy.array(rows)
    scale = numpy.linalg.norm(matrix, axis=0)
    if not scale.all() or numpy.linalg.cond(matrix / scale) > _WORST_CONDITION:
        raise FitError(
            "these lengths do not tell the terms of the model apart: measure more --lengths, and "
            "prefixes that are not in proportion to them"
        )
    solution, _ = nnls(matrix / scale, numpy.ones(len(rows)))
    values = [float(value) for value in solution / scale]
    slopes = dict(zip(ladder, values[1:-2:2], strict=True))
    shared = min(degree * slope for degree, slope in slopes.items())
    if not shared and not values[-1]:
        raise FitError(
            "by these measurements no part of a prefill is faster at a larger degree: the lengths "
            "are too short, or the samples too noisy"
        )
    return Fit(
        degrees={
            degree: Coefficients(
                d_s=values[2 * index],
                a_s_per_token=max(0.0, slopes[degree] - shared / degree),
            )
            for index, degree in enumerate(ladder)
        },
        b_s_per_token=values[-2],
        c_s_per_token=shared,
        alpha_s_per_pair=values[-1],
    )


def medians(samples: Iterable[Sample]) -> dict[Cell, float]:
    """The median over the repetitions of each cell."""
    found: dict[Cell, list[float]] = defaultdict(list)
    for sample in samples:
        found[sample.cell].append(sample.seconds)
    return {cell: statistics.median(seconds) for cell, seconds in found.items()}


def relative_errors(model: Fit, measured: Iterable[tuple[Cell, float]]) -> list[float]:
    """predicted / measured − 1, signed."""
    return [model.seconds(cell) / seconds - 1 for cell, seconds in measured]


def summary(errors: Sequence[float]) -> ErrorSummary:
    """Of at least one relative error; p90 by nearest rank."""
    sizes = sorted(abs(error) for error in errors)
    return ErrorSummary(
        mean=statistics.fmean(sizes),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        max=sizes[-1],
    )


def held_out(samples: Sequence[Sample]) -> dict[int, ErrorSummary]:
    """By degree: how well a fit to all repetitions but the last predicts single prefills of the
    last one. Empty with a single repetition, or when the others do not determine a fit."""
    last = max(sample.repetition for sample in samples)
    try:
        model = fit(medians(sample for sample in samples if sample.repetition < last))
    except FitError:
        return {}
    found: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.repetition == last and sample.cell.degree in model.degrees:
            error = relative_errors(model, [(sample.cell, sample.seconds)])
            found[sample.cell.degree] += error
    return {degree: summary(errors) for degree, errors in found.items()}


def check_cells(cells: Collection[Cell]) -> None:
    """``FitError`` when they are too few to tell the terms of the model apart."""
    for degree in {cell.degree for cell in cells}:
        lengths = {cell.uncached_tokens for cell in cells if cell.degree == degree}
        if len(lengths) < 2:
            raise FitError(f"degree {degree} has fewer than two --lengths")
    if len({cell.uncached_tokens for cell in cells}) < 3:
        raise FitError("the model needs three --lengths at least, that fit the pool")
    if len({cell.cached_tokens for cell in cells}) < 2:
        raise FitError("there is only one prefix: add --cached-tokens or --hit-ratios")
