from itertools import islice

from vertumnus_bench.moves import Move, walk

DEGREES = (1, 2, 4)


#: By one split or one merge.
NEIGHBOURS = {
    "4x1": {"1x2,2x1", "2x1,1x2"},
    "2x1,1x2": {"2x2", "4x1"},
    "1x2,2x1": {"2x2", "4x1"},
    "2x2": {"1x2,2x1", "1x4", "2x1,1x2"},
    "1x4": {"2x2"},
}


def test_a_walk_goes_everywhere_by_single_moves_and_repeats_itself() -> None:
    steps = list(islice(walk("4x1", 4, DEGREES, seed=1), 200))
    assert steps == list(islice(walk("4x1", 4, DEGREES, seed=1), 200))
    assert steps != list(islice(walk("4x1", 4, DEGREES, seed=2), 200))
    for before, after in zip(["4x1", *steps], steps, strict=False):
        assert after in NEIGHBOURS[before]
    assert set(steps) == set(NEIGHBOURS)


def test_the_switch_is_everything_but_the_drain() -> None:
    stages = {"drain": 90.0, "vote": 1.0, "switch": 2.0, "publish": 0.5}
    move = Move(0.0, "4x1", "2x1,1x2", "committed", None, stages, 93.5, 97.0)
    assert move.switch_ms == 3.5
