"""Rates, the share of waiting, and deadlines: what is turned down at the door."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.core.admission import Admission, AdmissionConfig, Refusal, lateness
from vertumnus_router.core.config import ConfigError

from tests.router.core.scene import Scene, request


def code(refusal: Refusal | None) -> str | None:
    return None if refusal is None else refusal.code


def test_requests_come_at_a_rate_in_bursts_of_a_minute() -> None:
    door = Admission(AdmissionConfig(requests_per_minute=3))
    assert [code(door.admit("a", 1, 1, 0.0)) for _ in range(4)] == [None] * 3 + ["rate_limited"]
    refusal = door.admit("a", 1, 1, 5.0)
    assert refusal is not None and refusal.retry_s == pytest.approx(15.0)
    assert door.admit("a", 1, 1, 20.0) is None
    assert code(door.admit("a", 1, 1, 20.0)) == "rate_limited"
    assert door.admit("b", 1, 1, 20.0) is None, "each client has a rate of its own"
    assert [code(door.admit("a", 1, 1, 1000.0)) for _ in range(4)] == [None] * 3 + ["rate_limited"]


def test_tokens_come_at_a_rate_and_a_prompt_beyond_it_when_nothing_else_does() -> None:
    door = Admission(AdmissionConfig(tokens_per_minute=600))
    assert door.admit("a", 500, 1, 0.0) is None
    refusal = door.admit("a", 200, 1, 0.0)
    assert refusal is not None and refusal.retry_s == pytest.approx(10.0)
    assert code(door.admit("a", 6000, 1, 40.0)) == "rate_limited"
    assert door.admit("a", 6000, 1, 50.0) is None
    # The debt is paid off: 5400 tokens at 10 a second.
    refusal = door.expect("a", 50.0)
    assert refusal is not None and refusal.retry_s == pytest.approx(540.1)
    assert door.expect("a", 591.0) is None


def test_a_batch_counts_as_its_prompts() -> None:
    door = Admission(AdmissionConfig(requests_per_minute=10))
    assert door.admit("a", 1, 8, 0.0) is None
    assert code(door.admit("a", 1, 3, 0.0)) == "rate_limited"
    assert door.admit("a", 1, 2, 0.0) is None


def test_what_is_refused_costs_nothing() -> None:
    door = Admission(AdmissionConfig(requests_per_minute=10, tokens_per_minute=100, waiting=2))
    assert door.admit("a", 90, 1, 0.0) is None
    for _ in range(50):
        assert code(door.admit("a", 20, 1, 0.0)) == "rate_limited"
    assert door.admit("a", 10, 1, 0.0) is None
    assert door.waiting() == {"a": 2}


def test_one_client_may_have_so_many_waiting() -> None:
    door = Admission(AdmissionConfig(waiting=2))
    assert [code(door.admit("a", 1, 1, 0.0)) for _ in range(3)] == [
        None,
        None,
        "too_many_waiting",
    ]
    assert door.admit("b", 1, 1, 0.0) is None
    door.began("a")
    assert door.expect("a", 0.0) is None
    assert door.admit("a", 1, 1, 0.0) is None
    for _ in range(2):
        door.began("a")
    door.began("b")
    assert door.waiting() == {}


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 300)), max_size=60),
)
def test_no_more_is_let_in_than_a_minute_and_the_time_give(
    rate: float, asked: list[tuple[float, int]]
) -> None:
    door = Admission(AdmissionConfig(tokens_per_minute=rate))
    now, taken, largest = 0.0, 0, 0
    for wait_s, tokens in asked:
        now += wait_s
        refusal = door.admit("a", tokens, 1, now)
        if refusal is None:
            taken += tokens
            largest = max(largest, tokens)
        else:
            assert refusal.retry_s is not None and refusal.retry_s > 0
            # By then it is let in.
            assert door._refusal("a", tokens, 1, now + refusal.retry_s + 1e-6) is None
            now += refusal.retry_s + 1e-6
    assert taken <= rate + rate * now / 60 + largest


@pytest.mark.parametrize(
    "fields",
    [
        {"requests_per_minute": 0},
        {"tokens_per_minute": -1},
        {"tokens_per_minute": float("nan")},
        {"requests_per_minute": float("inf")},
        {"waiting": 0},
    ],
)
def test_limits_that_let_nothing_in_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        AdmissionConfig(**fields)  # type: ignore[arg-type]


def test_a_deadline_is_held_against_the_soonest_worker() -> None:
    scene = Scene("2x1", policy="paper")
    scene.arrive("a", 8000)
    scene.arrive("b", 3000)
    decision = scene.control.explain(request("x", 2000), scene.now)  # 3 s queue, 2 s prefill
    assert lateness(decision, 5.01) is None
    late = lateness(decision, 4.0)
    assert late is not None and late.code == "deadline_unmeetable"
    assert late.retry_s == pytest.approx(1.0)
    never = lateness(decision, 1.9)
    assert never is not None and never.retry_s is None, "the prefill alone takes longer"


def test_without_a_worker_there_is_nothing_to_predict() -> None:
    scene = Scene(None, policy="paper")
    assert lateness(scene.control.explain(request("x", 2000), scene.now), 0.001) is None
