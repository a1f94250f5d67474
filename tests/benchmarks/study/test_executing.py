"""Real simulations, tiny ones: in one process or two, at once or in two goes."""

from pathlib import Path

import msgspec
import pytest
from vertumnus_bench.study import executing
from vertumnus_bench.study.executing import Executor
from vertumnus_bench.study.point import Point, Result, Setup, StudyError
from vertumnus_bench.study.store import Store


def point(policy: str, seed: int = 1, **rest: object) -> Point:
    wanted: dict[str, object] = {"requests": 40, "composition": "16x1,12x2"}
    return Point.of("l-eval", 24.0, {}, policy=policy, seed=seed, **(wanted | rest))


def executor(folder: Path, jobs: int) -> Executor:
    setup = Setup(folder, "qwen3-30b-a3b-h20")
    return Executor(setup, Store(folder / "points", setup, "code"), jobs)


def figures(results: dict[Point, Result]) -> dict[Point, object]:
    """But for how fast they came."""
    return {
        p: (msgspec.structs.replace(r.row, sim_requests_per_s=0.0), r.bins)
        for p, r in results.items()
    }


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    points = [point("cache_aware", 2), point("late"), point("cache_aware")]
    alone = executor(tmp_path / "alone", 1).run("test", points)
    together = executor(tmp_path / "together", 2).run("test", points)
    assert list(alone) == list(together) == points
    assert figures(alone) == figures(together)
    assert len({r.row.mean_ms for r in alone.values()}) == 3


def test_what_is_finished_is_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = executor(tmp_path, 1).run("test", [point("round_robin")])
    simulated: list[Point] = []

    def note(one: Point, setup: Setup) -> Result:
        simulated.append(one)
        return first[point("round_robin")]

    monkeypatch.setattr(executing, "run_point", note)
    points = [point("round_robin"), point("round_robin", 2), point("round_robin", 2)]
    again = executor(tmp_path, 1).run("test", points)
    assert simulated == [point("round_robin", 2)]
    assert again[point("round_robin")] == first[point("round_robin")]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_point_that_cannot_be_is_named_and_the_others_are_kept(tmp_path: Path, jobs: int) -> None:
    wrong = point("round_robin", composition="41x1")
    with pytest.raises(StudyError, match=r"l-eval 24/s, round_robin on 41x1.*has 41 GPUs"):
        executor(tmp_path, jobs).run("test", [point("round_robin"), wrong])
    if jobs == 1:
        assert len(list((tmp_path / "points").glob("*.json"))) == 1
