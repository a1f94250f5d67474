from random import Random

import pytest
from vertumnus_sim.workloads.arrivals import at_rate, at_speed, mean_rate, poisson, spread_ticks
from vertumnus_sim.workloads.traces import TraceRequest


def at(*times_s: float) -> list[TraceRequest]:
    return [TraceRequest(at_s, n + 1, 1, (n,), 512) for n, at_s in enumerate(times_s)]


def test_ticks_are_spread_in_order_and_within_their_width() -> None:
    requests = at(0, 0, 0, 1, 1, 9)
    found = spread_ticks(requests, seed=1)
    times_s = [request.arrival_s for request in found]
    assert times_s == sorted(times_s) and len(set(times_s)) == 6
    assert all(0 <= at_s < 1 for at_s in times_s[:3])
    assert all(1 <= at_s < 4 for at_s in times_s[3:5])
    assert 9 <= times_s[5] < 12
    assert [request.blocks for request in found] == [request.blocks for request in requests]
    assert found == spread_ticks(requests, seed=1) != spread_ticks(requests, seed=2)


def test_speed_and_rate() -> None:
    assert [r.arrival_s for r in at_speed(at(10, 12, 20), 2)] == [0, 1, 5]
    found = at_rate(at(10, 12, 20), 4)
    assert [r.arrival_s for r in found] == pytest.approx([0, 0.1, 0.5])
    assert mean_rate(found) == pytest.approx(4)


def test_what_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match="above 0"):
        at_speed(at(0, 1), 0)
    with pytest.raises(ValueError, match="at once"):
        at_rate(at(3, 3), 1)


def test_poisson_has_its_rate() -> None:
    found = poisson(10_000, 5, Random(1))
    assert found == sorted(found)
    assert found[-1] == pytest.approx(2_000, rel=0.05)
    assert found == poisson(10_000, 5, Random(1))
