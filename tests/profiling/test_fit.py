"""Known coefficients through noisy samples, and samples that determine none."""

from collections.abc import Callable
from random import Random

import pytest

from sgl_vertumnus.profiling.fit import Fit, FitError, fit, held_out, medians, summary
from sgl_vertumnus.profiling.plan import Cell
from sgl_vertumnus.profiling.record import Sample
from tests.profiling.model_pool import A_S, ALPHA_S, B_S, C_S, D_S, true_seconds

pytest.importorskip("scipy", reason="needs scipy")

LENGTHS = (32, 128, 512, 2048, 8192)


def cells(
    degrees: tuple[int, ...] = (1, 2, 4),
    lengths: tuple[int, ...] = LENGTHS,
    prefixes: Callable[[int], tuple[int, ...]] = lambda uncached: (0, 1024, 9 * uncached),
) -> list[Cell]:
    return [
        Cell(degree=degree, uncached_tokens=uncached, cached_tokens=cached)
        for degree in degrees
        for uncached in lengths
        for cached in prefixes(uncached)
    ]


def seconds(cell: Cell) -> float:
    return true_seconds(cell.degree, cell.uncached_tokens, cell.cached_tokens)


def noisy(repetitions: int, spread: float, asked: list[Cell] | None = None) -> list[Sample]:
    source = Random(3)
    return [
        Sample(
            cell=cell,
            repetition=repetition,
            seconds=seconds(cell) * (1 + source.uniform(-spread, spread)),
        )
        for repetition in range(repetitions)
        for cell in asked or cells()
    ]


def assert_known(model: Fit, rel: float) -> None:
    assert model.c_s_per_token == pytest.approx(C_S, rel=rel)
    assert model.alpha_s_per_pair == pytest.approx(ALPHA_S, rel=rel)
    assert model.b_s_per_token == pytest.approx(B_S, rel=4 * rel)
    for degree, at in model.degrees.items():
        assert at.d_s == pytest.approx(D_S[degree], rel=rel)
        # A part of a slope whose larger part the degree divides.
        assert at.a_s_per_token == pytest.approx(A_S[degree], abs=rel * C_S / degree)


def test_exact_times_give_the_exact_coefficients() -> None:
    assert_known(fit({cell: seconds(cell) for cell in cells()}), rel=1e-5)


def test_noise_of_five_percent_moves_them_by_less() -> None:
    samples = noisy(5, 0.05)
    model = fit(medians(samples))
    assert_known(model, rel=0.05)
    errors = held_out(samples)
    assert set(errors) == {1, 2, 4}
    assert all(0 < one.mean < 0.05 and one.max < 0.12 for one in errors.values())


def test_short_prompts_count_as_much_as_long_ones() -> None:
    """Of absolute errors the longest prompt, ten thousand times the shortest, would decide."""
    samples = noisy(5, 0.1)
    model = fit(medians(samples))
    for cell in cells(lengths=(32,)):
        assert model.seconds(cell) == pytest.approx(seconds(cell), rel=0.06)


def test_no_coefficient_is_negative() -> None:
    """A line that meets zero at 100 tokens has no start."""
    found = fit({cell: max(1e-4, (cell.uncached_tokens - 100) * 1e-4) for cell in cells()})
    values = [v for at in found.degrees.values() for v in (at.d_s, at.a_s_per_token)]
    assert min(*values, found.b_s_per_token, found.c_s_per_token, found.alpha_s_per_pair) >= 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (cells(lengths=(32,)), "fewer than two --lengths"),
        (cells(lengths=(32, 512)), "three --lengths"),
        (cells(prefixes=lambda uncached: (0,)), "only one prefix"),
        (cells(lengths=(4096, 4097, 4098)), "do not tell the terms of the model apart"),
    ],
)
def test_samples_that_determine_nothing_are_refused(asked: list[Cell], says: str) -> None:
    with pytest.raises(FitError, match=says):
        fit({cell: seconds(cell) for cell in asked})


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_is_a_time(wrong: float) -> None:
    measured = {cell: seconds(cell) for cell in cells()}
    with pytest.raises(FitError, match="above 0"):
        fit(measured | {cells()[0]: wrong})


def test_times_that_do_not_depend_on_the_length_are_no_prefill_times() -> None:
    with pytest.raises(FitError, match="no part of a prefill is faster"):
        fit(dict.fromkeys(cells(), 0.01))


def test_one_repetition_leaves_nothing_out() -> None:
    assert held_out(noisy(1, 0.05)) == {}


def test_errors_are_summed_up_by_nearest_rank() -> None:
    errors = [n / 100 for n in range(-10, 10)]
    found = summary(errors)
    assert found.mean == pytest.approx(0.05) and found.max == pytest.approx(0.10)
    assert found.p90 == pytest.approx(0.09)  # the 18th of 0, .01, .01, … .09, .09, .10
