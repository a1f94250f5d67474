"""First a composition, then the settings on the best of them."""

from vertumnus_bench.study.contenders import Contender, Role
from vertumnus_bench.study.tuning import Choice, Trial, tune

from tests.benchmarks.study.study_scene import FakeRuns, row

_CASE = ("production", 26.0)
_TRIAL = Trial(requests=50, seed=1000, phase_share=0.1)


def contender(**rest: object) -> Contender:
    return Contender("c", Role.BASELINE, "paper", **rest)  # type: ignore[arg-type]


def test_the_grid_is_tried_on_the_best_composition_alone() -> None:
    runs = FakeRuns(
        {
            ("40x1", ()): row(90),
            ("20x2", ()): row(80),
            ("20x2", (("beta", "1.0"),)): row(85),
            ("20x2", (("beta", "5.0"),)): row(70),
        }
    )
    of = contender(compositions=("40x1", "20x2"), grid=({"beta": 1.0}, {"beta": 5.0}))
    found = tune([of], [_CASE], _TRIAL, runs)
    assert found == {("c", _CASE): Choice("20x2", {"beta": "5.0"}, 70)}
    assert {(p.seed, p.requests, p.rate) for p in runs.points} == {(1000, 50, 26.0)}


def test_defaults_stay_if_nothing_on_the_grid_is_better() -> None:
    runs = FakeRuns({("20x2", ()): row(80), ("20x2", (("beta", "1.0"),)): row(80)})
    of = contender(compositions=("20x2",), grid=({"beta": 1.0},))
    assert tune([of], [_CASE], _TRIAL, runs)["c", _CASE] == Choice("20x2", {}, 80)


def test_turning_requests_away_is_no_way_to_win() -> None:
    runs = FakeRuns({("40x1", ()): row(10, refused=1), ("20x2", ()): row(80)})
    of = contender(compositions=("40x1", "20x2"))
    assert tune([of], [_CASE], _TRIAL, runs)["c", _CASE].composition == "20x2"


def test_what_has_nothing_to_choose_is_not_run() -> None:
    runs = FakeRuns({})
    of = contender(compositions=("20x2",), settings={"prefix.pull": "true"})
    found = tune([of], [_CASE], _TRIAL, runs)
    assert found["c", _CASE] == Choice("20x2", {"prefix.pull": "true"}, None)
    assert runs.points == []


def test_only_so_much_of_a_grid() -> None:
    runs = FakeRuns({("20x2", ()): row(80), ("20x2", (("beta", "1.0"),)): row(70)})
    of = contender(compositions=("20x2",), grid=({"beta": 1.0}, {"beta": 5.0}))
    trial = Trial(requests=50, seed=1000, phase_share=0.1, grid_limit=1)
    assert tune([of], [_CASE], trial, runs)["c", _CASE].settings == {"beta": "1.0"}


def test_one_may_take_what_suits_another() -> None:
    runs = FakeRuns({("20x2", ()): row(80), ("20x2", (("beta", "1.0"),)): row(70)})
    of = contender(compositions=("20x2",), grid=({"beta": 1.0},))
    mix = Contender("mix", Role.PART, "late", settings={"a": "1"}, like="c")
    both = Contender("both", Role.PART, "late", settings={"a": "1"}, like="c", inherits=True)
    found = tune([mix, of, both], [_CASE], _TRIAL, runs)
    assert found["mix", _CASE] == Choice("20x2", {"a": "1"})
    assert found["both", _CASE] == Choice("20x2", {"a": "1", "beta": "1.0"})


def test_a_workload_that_changes_is_tried_to_its_end() -> None:
    point = _TRIAL.point(contender(), ("varying", None), Choice("20x2", {}))
    assert (point.requests, point.phase_share) == (None, 0.1)
    point = _TRIAL.point(contender(), _CASE, Choice("20x2", {}))
    assert (point.requests, point.phase_share) == (50, 1.0)
