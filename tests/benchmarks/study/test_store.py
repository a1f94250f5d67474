"""Finished simulations that are found again, and those that must not be."""

from dataclasses import replace
from pathlib import Path

import pytest
from vertumnus_bench.study.point import Point, Result, Setup
from vertumnus_bench.study.store import Store, code_digest

from tests.benchmarks.study.study_scene import bins, row

_SETUP = Setup(Path("traces"), "p")
_POINT = Point.of(
    "production", 26.0, {"beta": 2}, requests=10, seed=1, policy="paper", composition="40x1"
)
_RESULT = Result(row(), bins((1, 2.0)))


def test_what_was_put_is_got_bit_by_bit(tmp_path: Path) -> None:
    Store(tmp_path, _SETUP, "a").put(_POINT, _RESULT)
    assert Store(tmp_path, _SETUP, "a").get(_POINT) == _RESULT
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_what_other_code_made_does_not_count_unless_asked_for(tmp_path: Path) -> None:
    Store(tmp_path, _SETUP, "a").put(_POINT, _RESULT)
    assert Store(tmp_path, _SETUP, "b").get(_POINT) is None
    assert Store(tmp_path, _SETUP, "b", any_code=True).get(_POINT) == _RESULT


def test_a_file_that_broke_off_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path, _SETUP, "a")
    store.put(_POINT, _RESULT)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert store.get(_POINT) is None


def test_clearing(tmp_path: Path) -> None:
    store = Store(tmp_path, _SETUP, "a")
    store.put(_POINT, _RESULT)
    store.clear()
    assert store.get(_POINT) is None


@pytest.mark.parametrize(
    "change",
    [
        {"workload": "l-eval"},
        {"rate": None},
        {"requests": 11},
        {"seed": 2},
        {"policy": "late"},
        {"composition": "20x2"},
        {"settings": ()},
        {"phase_share": 0.5},
        {"over_time": True},
    ],
)
def test_all_that_decides_a_point_is_in_its_name(change: dict[str, object]) -> None:
    other = replace(_POINT, **change)  # type: ignore[arg-type]
    assert other.digest(_SETUP) != _POINT.digest(_SETUP)
    assert _POINT.digest(Setup(Path("traces"), "q")) != _POINT.digest(_SETUP)
    assert _POINT.digest(Setup(Path("elsewhere"), "p")) == _POINT.digest(_SETUP)


def test_settings_have_no_order() -> None:
    rest: dict[str, object] = {"requests": 1, "seed": 1, "policy": "p", "composition": "40x1"}
    one = Point.of("w", 1.0, {"a": 1, "b": 2}, **rest)
    assert one == Point.of("w", 1.0, {"b": "2", "a": "1"}, **rest)


def test_the_code_is_known_by_its_files_and_inputs() -> None:
    assert code_digest("a") == code_digest("a")
    assert len({code_digest(), code_digest("a"), code_digest("b"), code_digest("a", "b")}) == 4
