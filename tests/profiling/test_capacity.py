"""κ by bisection, worked out by hand."""

import pytest

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.profiling.capacity import Outcome, Slo, attainment, largest_load, poisson


def test_deadlines_go_by_length() -> None:
    slo = Slo()
    lengths = (1, 8191, 8192, 32767, 32768, 10**6)
    assert [slo.deadline_s(tokens) for tokens in lengths] == [1, 1, 5, 5, 10, 10]


def test_attainment_is_weighted_with_tokens() -> None:
    outcomes = [Outcome(100, 0.9), Outcome(300, 1.1), Outcome(8192, 4.9), Outcome(8, None)]
    assert attainment(Slo(), outcomes) == pytest.approx((100 + 8192) / 8600)


@pytest.mark.parametrize(
    ("deadlines", "target"), [((1, 0, 1), 0.9), ((1, 1, float("inf")), 0.9), ((1, 1, 1), 0.0)]
)
def test_an_slo_can_be_met(deadlines: tuple[float, float, float], target: float) -> None:
    with pytest.raises(ConfigurationError):
        Slo(deadlines, target)


@pytest.mark.parametrize(
    ("limit", "tried", "found"),
    [
        (0.6, [0.7, 0.35, 0.525, 0.6125], 0.525),
        (0.9, [0.7, 1.05, 0.875, 0.9625], 0.875),
        (9.9, [0.7, 1.05, 1.575, 2.3625], 2.3625),
        (0.0, [0.7, 0.35, 0.175, 0.0875], None),
    ],
)
def test_the_bisection_closes_in(limit: float, tried: list[float], found: float | None) -> None:
    loads: list[float] = []

    def meets(load: float) -> bool:
        loads.append(load)
        return load <= limit

    assert largest_load(meets, 4) == found
    assert loads == pytest.approx(tried)


def test_it_ends_when_it_is_close() -> None:
    loads: list[float] = []

    def meets(load: float) -> bool:
        loads.append(load)
        return load <= 0.9

    assert largest_load(meets, 50) == pytest.approx(0.9, rel=0.05)
    assert len(loads) < 8


def test_a_load_is_exactly_what_was_asked_and_keeps_its_order() -> None:
    def service_s(tokens: int) -> float:
        return tokens / 1000

    for load in (0.35, 0.7, 1.4):
        arrivals = poisson((100, 900), service_s, load=load, seconds=30.0, seed=1)
        work_s = sum(service_s(tokens) for _, tokens in arrivals)
        assert load * 30 <= work_s < load * 30 + 0.9
        times = [at_s for at_s, _ in arrivals]
        assert times[0] == 0 and times == sorted(times)
        assert times[-1] < work_s / load
    few, many = (
        [n for _, n in poisson((100, 900), service_s, load=x, seconds=30.0, seed=1)]
        for x in (0.35, 1.4)
    )
    assert many[: len(few)] == few
