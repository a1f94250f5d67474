"""The last ten minutes, in steps."""

import pytest
from vertumnus_router.core.types import RequestId
from vertumnus_router.io.observe.timeline import STEP_S, STEPS, Timeline
from vertumnus_router.io.observe.trail import Trail


def ended(outcome: str) -> Trail:
    trail = Trail(RequestId("r"), b"r", "POST", "/generate", 0.0)
    trail.outcome = outcome
    return trail


def test_percentiles_are_at_most_a_seventh_off() -> None:
    timeline = Timeline()
    times = [0.0005 * 1.013**n for n in range(1000)]
    for seconds in times:
        timeline.first_token(100.0, seconds, 1, met=True)
    now = timeline.content(100.0)["now"]
    assert now["ttft_p50_s"] == pytest.approx(times[499], rel=1 / 7)
    assert now["ttft_p90_s"] == pytest.approx(times[899], rel=1 / 7)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 1e9])
def test_no_time_is_too_short_or_too_long(seconds: float) -> None:
    timeline = Timeline()
    timeline.first_token(0.0, seconds, 1, met=True)
    assert timeline.content(0.0)["now"]["ttft_p50_s"] > 0


def test_attainment_is_weighted_by_tokens() -> None:
    timeline = Timeline()
    timeline.first_token(1.0, 0.1, 300, met=True)
    timeline.first_token(2.0, 9.0, 100, met=False)
    timeline.no_token(3.0, 600)
    assert timeline.content(4.0)["now"]["slo"] == 0.3


def test_steps_are_in_order_and_old_ones_are_forgotten() -> None:
    timeline = Timeline()
    for step in range(3 * STEPS):
        timeline.ended(step * STEP_S, ended("ok" if step % 2 else "worker_lost"))
    told = timeline.content(3 * STEPS * STEP_S - 0.1)
    assert len(told["finished"]) == STEPS
    assert sum(told["finished"]) == sum(told["failed"]) == STEPS / 2
    assert (told["finished"][-1], told["finished"][-2]) == (1, 0)
    assert told["now"]["failures"] == {"worker_lost": 6}
    assert len(timeline._steps) == STEPS
    later = timeline.content(1e6)
    assert later["slo"] == [None] * STEPS
    assert later["now"]["finished"] == 0


def test_a_step_goes_on_until_the_next_one() -> None:
    timeline = Timeline()
    timeline.first_token(0.0, 0.1, 1, met=True)
    before = timeline.content(1.0)["ttft_p50_s"][-1]
    for _ in range(9):
        timeline.first_token(2.0, 10.0, 1, met=True)
    assert timeline.content(3.0)["ttft_p50_s"][-1] > 10 * before
    whole = timeline.content(4.0)["ttft_p50_s"][-1]
    assert timeline.content(STEP_S)["ttft_p50_s"][-2:] == [whole, None]


def test_who_leaves_has_not_failed() -> None:
    timeline = Timeline()
    timeline.ended(0.0, ended("cancelled"))
    now = timeline.content(0.0)["now"]
    assert (now["finished"], now["failures"]) == (0, {})
