"""Which part of the way gives how much."""

import pytest
from vertumnus_bench.study.components import components
from vertumnus_bench.study.contenders import CHAIN, CONTENDERS

from tests.benchmarks.study.study_scene import figures

_CHAIN = (("first", "where it begins"), ("second", "+ something"), ("third", "+ more"))


def test_ratios_are_geometric_means_over_the_points() -> None:
    rows = [
        *(figures(n, m, rate=20) for n, m in (("first", 100), ("second", 50), ("third", 25))),
        *(figures(n, m, rate=26) for n, m in (("first", 400), ("second", 400), ("third", 100))),
    ]
    first, second, third = components(rows, _CHAIN)
    assert (first.part, first.to_previous, first.to_first) == ("where it begins", None, 1)
    assert first.mean_ms == pytest.approx(200)
    assert second.to_previous == second.to_first == pytest.approx(0.5**0.5)
    # 1/2 and 1/4 of the step before, 1/4 and 1/4 of the first.
    assert third.to_previous == pytest.approx((1 / 8) ** 0.5)
    assert third.to_first == pytest.approx(0.25)
    assert {part.points for part in (first, second, third)} == {2}


def test_points_that_are_saturated_or_lack_a_part_do_not_count() -> None:
    rows = [
        *(figures(n, m, rate=20) for n, m in (("first", 100), ("second", 50), ("third", 25))),
        *(figures(n, 1, rate=26, saturated=True) for n, _ in _CHAIN),
        figures("first", 1, rate=32),
    ]
    assert [part.mean_ms for part in components(rows, _CHAIN)] == pytest.approx([100, 50, 25])
    assert components(rows[3:], _CHAIN) == []


def test_every_part_of_the_chain_is_run() -> None:
    assert {name for name, _ in CHAIN} <= {contender.name for contender in CONTENDERS}
