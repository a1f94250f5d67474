"""Initial compositions, worked out by hand.

A request takes 1 s at degree 1 and 0.6 s at degree 2; κ is 0.7 of either's own time. In a window
of 10 s a degree-1 worker bears 7 s of work at degree 1, a degree-2 worker 0.7·10/0.6 = 11.67.
"""

import pytest
from vertumnus_router.core.initial import (
    InitialComposition,
    PastRequest,
    compositions,
    initial_composition,
)
from vertumnus_router.lattice import format_composition

KAPPA = {1: 0.7, 2: 0.7}


def service_s(degree: int, uncached: int, cached: int) -> float:
    return {1: 1.0, 2: 0.6}[degree] * (uncached - cached) / 100


def choose(
    requests: int, kappa: dict[int, float] = KAPPA, size: int = 4, upper: float = 0.75
) -> InitialComposition:
    """So many in the second window, two in the first and one in the fifth."""
    times = [0.0, 3.0, *(10.0 + i / 100 for i in range(requests)), 45.0]
    history = [PastRequest(at_s, 100, 0) for at_s in times]
    return initial_composition(size, (1, 2), history, service_s, kappa, window_s=10.0, upper=upper)


@pytest.mark.parametrize(
    ("requests", "expected", "capacity_s"),
    [
        (17, "2x2", 2 * 7 / 0.6),  # three quarters of it are 17.5
        (18, "1x2,2x1", 7 / 0.6 + 14),  # 19.25
        (20, "4x1", 28.0),  # 21
    ],
)
def test_the_most_large_workers_that_bear_the_busiest_window(
    requests: int, expected: str, capacity_s: float
) -> None:
    chosen = choose(requests)
    assert chosen.composition == expected and chosen.suffices
    assert chosen.demand_s == pytest.approx(requests)
    assert chosen.capacity_s == pytest.approx(capacity_s)
    assert chosen.windows == 3


def test_it_says_why() -> None:
    assert str(choose(18)) == (
        "the busiest of 3 windows of 10 s asks for 18.00 s of prefill at the smallest degree\n"
        "2x2: 77% of its capacity of 23.33 s, more than 75%\n"
        "1x2,2x1: 70% of its capacity of 25.67 s; the most large workers that have the capacity"
    )


def test_without_enough_capacity_it_is_the_largest_there_is() -> None:
    chosen = choose(30)
    assert (chosen.composition, chosen.suffices) == ("4x1", False)
    assert [name for name, _ in chosen.rejected] == ["2x2", "1x2,2x1"]
    assert "no composition has the capacity, this one has the most" in str(chosen)


def test_kappa_of_each_degree_counts() -> None:
    assert choose(17, {1: 0.7, 2: 0.6}).composition == "1x2,2x1"  # 2x2 bears 15


def test_what_was_cached_is_no_work() -> None:
    history = [PastRequest(0.0, 100, 50) for _ in range(17)]
    chosen = initial_composition(4, (1, 2), history, service_s, KAPPA, window_s=10.0, upper=0.75)
    assert chosen.demand_s == pytest.approx(8.5)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="κ is not known for degree 2"):
        choose(1, {1: 0.7})
    with pytest.raises(ValueError, match="no requests"):
        initial_composition(4, (1,), [], service_s, KAPPA, window_s=10.0, upper=0.75)


def test_compositions_with_many_large_workers_come_first() -> None:
    names = [format_composition(blocks) for blocks in compositions(6, (1, 2, 4))]
    assert names == ["1x4,1x2", "1x4,2x1", "3x2", "2x2,2x1", "1x2,4x1", "6x1"]
    assert [format_composition(b) for b in compositions(4, (2, 4))] == ["1x4", "2x2"]
    assert list(compositions(3, (2,))) == []
