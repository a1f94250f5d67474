import pytest
from vertumnus_bench.figures import percentile, spread


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([7.0], 1) == percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_no_percentile_without_values_or_outside_the_range(
    values: list[float], percent: float
) -> None:
    with pytest.raises(ValueError):
        percentile(values, percent)


def test_a_spread_says_how_many_there_were() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0]) == {"p50": 2.0, "p99": 4.0, "max": 4.0, "n": 4}
    assert spread([]) == {"n": 0}
