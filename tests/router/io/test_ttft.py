"""The parts of the time to the first token, whatever was told of it and when."""

import pytest
from vertumnus_router.io.ttft import Marks, RecentSplits


@pytest.mark.parametrize(
    ("marks", "parts"),
    [
        (Marks(1.0, None, 2.0, 5.0, 9.0), (2.0, 0.0, 3.0, 4.0, 1.0)),
        (Marks(1.0), (1.0, 0.0, 9.0, 0.0, 0.0)),
        (Marks(1.0, None, 2.0), (2.0, 0.0, 8.0, 0.0, 0.0)),
        (Marks(1.0, None, 2.0, None, 9.0), (2.0, 0.0, 7.0, 0.0, 1.0)),
        (Marks(1.0, None, 2.0, 5.0, 20.0), (2.0, 0.0, 3.0, 5.0, 0.0)),
        (Marks(1.0, None, 30.0, 20.0, 25.0), (10.0, 0.0, 0.0, 0.0, 0.0)),
        (Marks(1.0, None, 6.0, 5.0, 4.0), (6.0, 0.0, 0.0, 0.0, 4.0)),
        (Marks(1.0, 3.0, 4.0, 5.0, 9.0), (2.0, 2.0, 1.0, 4.0, 1.0)),
        (Marks(1.0, 3.0), (1.0, 2.0, 7.0, 0.0, 0.0)),
        (Marks(1.0, 7.0, 4.0, 8.0, 9.0), (0.0, 4.0, 4.0, 1.0, 1.0)),
    ],
    ids=[
        "all",
        "nothing",
        "start",
        "no finish",
        "late KV",
        "all late",
        "out of order",
        "pull",
        "pull alone",
        "start told late",
    ],
)
def test_the_parts_are_never_negative_and_add_up(marks: Marks, parts: tuple[float, ...]) -> None:
    assert marks.split(0.0, 10.0) == parts
    assert sum(parts) == 10.0


def test_without_a_decode_server_nothing_is_handed_over() -> None:
    marks = Marks(1.0, 3.0, 4.0, 8.0)
    assert marks.split(0.0, 10.0, handed_over=False) == (2.0, 2.0, 4.0, 0.0, 2.0)


def test_recent_ones_are_averaged() -> None:
    recent = RecentSplits()
    assert recent.content()["requests"] == 0
    recent.add((1.0, 0.0, 2.0, 0.0, 0.0))
    recent.add((3.0, 1.0, 0.0, 1.0, 0.0))
    assert recent.content() == {
        "requests": 2,
        "mean_s": {
            "queue": 2.0,
            "pull": 0.5,
            "prefill": 1.0,
            "transfer": 0.5,
            "first_decode": 0.0,
        },
    }
