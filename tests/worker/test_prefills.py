"""Compute time of prefills over their chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches.engine import FinishedPrefill

from sgl_vertumnus.worker import prefills
from sgl_vertumnus.worker.prefills import PrefillLog


def done(*rids: str) -> list[FinishedPrefill]:
    return [FinishedPrefill(rid, input_tokens=10, cached_tokens=4) for rid in rids]


def compute_s(log: PrefillLog, rids: list[str], now_s: float, *finished: str) -> dict[str, float]:
    return {report.rid: report.compute_s for report in log.end(rids, now_s, done(*finished))}


def test_one_step() -> None:
    log = PrefillLog()
    assert log.begin(["a"], 1.0) == ("a",)
    (report,) = log.end(["a"], 1.5, done("a"))
    assert (report.rid, report.input_tokens, report.cached_tokens) == ("a", 10, 4)
    assert report.compute_s == pytest.approx(0.5)


def test_chunks_add_up_and_only_the_first_is_a_start() -> None:
    log = PrefillLog()
    assert log.begin(["a"], 0.0) == ("a",)
    assert compute_s(log, ["a"], 1.0) == {}
    assert log.begin(["a", "b"], 5.0) == ("b",)
    assert compute_s(log, ["a", "b"], 7.0, "a", "b") == {"a": 3.0, "b": 2.0}
    assert log.begin(["a"], 8.0) == ("a",), "the id is free again"


def test_a_step_that_began_while_another_ran_computes_after_it() -> None:
    """SGLang's overlap scheduler: begin, begin, end, end."""
    log = PrefillLog()
    log.begin(["a"], 0.0)
    log.begin(["b"], 0.1)
    assert compute_s(log, ["a"], 2.0, "a") == {"a": 2.0}
    log.begin(["c"], 2.1)
    assert compute_s(log, ["b"], 5.0, "b") == {"b": 3.0}
    log.other_step_ended(6.0)
    assert compute_s(log, ["c"], 6.5, "c") == {"c": 0.5}


def test_a_step_that_waited_for_a_decode_computes_after_it() -> None:
    log = PrefillLog()
    log.begin(["a"], 0.0)
    log.other_step_ended(1.0)
    assert compute_s(log, ["a"], 3.0, "a") == {"a": 2.0}


def test_what_began_elsewhere_is_not_reported() -> None:
    log = PrefillLog()
    assert log.end(["a"], 1.0, done("a")) == ()
    log.begin(["b"], 2.0)
    assert compute_s(log, ["b", "a"], 3.0, "a", "b") == {"b": 1.0}


def test_an_id_that_comes_twice_in_a_step_is_one_start() -> None:
    log = PrefillLog()
    assert log.begin(["a", "a"], 0.0) == ("a",)


def test_requests_that_never_finish_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefills, "MAX_TRACKED", 3)
    log = PrefillLog()
    for number in range(10):
        log.begin([str(number)], float(number))
        log.end([str(number)], number + 0.5, [])
    assert len(log._compute_s) == 3
    assert log.begin(["0"], 10.0) == ("0",)


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(0.001, 1), st.sets(st.sampled_from("abc"))),
        max_size=20,
    )
)
def test_time_is_charged_once_to_each_request_of_a_step(
    steps: list[tuple[float, float, set[str]]],
) -> None:
    log, now_s = PrefillLog(), 0.0
    charged = dict.fromkeys("abc", 0.0)
    for idle_s, step_s, rids in steps:
        log.begin(sorted(rids), now_s + idle_s)
        now_s += idle_s + step_s
        log.end(sorted(rids), now_s, [])
        for rid in rids:
            charged[rid] += step_s
    log.begin(["a", "b", "c"], now_s)
    assert compute_s(log, ["a", "b", "c"], now_s, "a", "b", "c") == pytest.approx(charged)
