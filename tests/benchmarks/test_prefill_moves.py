"""Drains against prefill steps."""

from vertumnus_bench.moves import Move
from vertumnus_bench.prefill_moves import figures


def move(drain_ms: float) -> Move:
    stages = {"drain": drain_ms, "vote": 1.0, "switch": 2.0, "publish": 0.5}
    return Move(0.0, "4x1", "2x1,1x2", "committed", None, stages, drain_ms + 3.5, drain_ms + 5)


def test_the_longest_drain_is_held_against_the_longest_step() -> None:
    found = figures([move(10.0), move(90.0), move(30.0)], [40.0, 100.0])
    assert found["drain_max_over_step_max"] == 0.9
    assert found["move_ms"]["p50"] == 33.5 and found["move_ms"]["p99"] == 93.5
    assert found["stages_ms"]["drain"]["max"] == 90.0
    assert found["prefill_step_ms"]["n"] == 2


def test_without_a_timed_step_there_is_no_ratio() -> None:
    assert figures([move(10.0)], [])["drain_max_over_step_max"] is None
