import pytest
from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.demand import Demand
from vertumnus_router.core.evidence import Evidence, LongShare


def window(seconds: float, size_s: float = 1.0) -> Demand:
    return Demand(round(seconds / size_s), 0, seconds, seconds * size_s)


def evidence(*windows: Demand, utilisation: float = 0.5) -> Evidence:
    found = Evidence(ControllerConfig())
    for one in windows:
        found.add(one, utilisation)
    return found


def test_nothing_is_forecast_from_nothing() -> None:
    forecast = evidence().forecast()
    assert (forecast.mean, forecast.peak, forecast.windows) == (0.0, 0.0, 0)


def test_the_peak_is_a_prediction_interval() -> None:
    forecast = evidence(window(8.0), window(12.0)).forecast()
    assert forecast.mean == pytest.approx(10.0)
    assert forecast.peak == pytest.approx(10 + 3 * (10 * 1.0 * 1.5) ** 0.5)
    assert forecast.windows == 2


def test_large_requests_make_a_demand_noisier() -> None:
    small = evidence(window(10.0, 0.1), window(10.0, 0.1)).forecast()
    large = evidence(window(10.0, 5.0), window(10.0, 5.0)).forecast()
    assert large.peak - 10 == pytest.approx((small.peak - 10) * 50**0.5)


def test_quiet_windows_do_not_hide_the_large_requests_before_them() -> None:
    found = evidence(*[window(20.0, 5.0)] * 10)
    found.forget()
    for _ in range(2):
        found.add(window(10.0, 0.1), 0.5)
    forecast = found.forecast()
    assert forecast.mean == pytest.approx(10.0)
    assert forecast.peak > 10 + 3 * (10 * 4.0 * 1.5) ** 0.5


def test_a_streak_is_forecast_as_a_whole() -> None:
    found = evidence(window(30.0))
    for seconds in (3.0, 4.0, 5.0, 8.0):
        found.add(window(seconds), 0.1)
    assert (found.below, found.above) == (4, 0)
    assert found.forecast().mean == pytest.approx(5.0)


def moved_and_reversed(first: float, then: float) -> Evidence:
    found = evidence(window(first), window(first))
    found.moved()
    found.forget()
    for _ in range(2):
        found.add(window(then), 0.5)
    found.reversed()
    return found


def test_a_reversal_within_chance_doubles_the_patience() -> None:
    found = moved_and_reversed(10.0, 18.0)
    assert found.patience == 4
    for _ in range(6):
        found.reversed()
    assert found.patience == 30  # and no further


def test_a_reversal_for_a_reason_makes_it_short_again() -> None:
    found = moved_and_reversed(10.0, 18.0)
    found.moved()
    found.forget()
    for _ in range(2):
        found.add(window(100.0), 0.9)
    found.reversed()
    assert found.patience == 2


def test_the_deviation_of_two_fractions() -> None:
    # 3 of 20 together: √(0.15·0.85·(1/5 + 1/15))
    few, many = LongShare(1, 5), LongShare(2, 15)
    assert few.deviation(many) == pytest.approx((0.15 * 0.85 * (1 / 5 + 1 / 15)) ** 0.5)
    assert LongShare(0, 5).deviation(LongShare(0, 9)) == 0.0
