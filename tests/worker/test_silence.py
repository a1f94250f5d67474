"""Who is taken for silent, second by second."""

from sgl_vertumnus.worker.control import SILENT_S
from sgl_vertumnus.worker.silence import STOOD_STILL_S, Silence


def seconds(silence: Silence, begin: int, end: int, *speaking: int) -> dict[float, list[int]]:
    """Who was overdue at which second, while ``speaking`` speak in each."""
    found = {}
    for now in range(begin, end):
        for rank in speaking:
            silence.hear(rank, now)
        if late := silence.overdue(now):
            found[now] = late
    return found


def test_silence_is_noticed_once_and_again_after_the_next_word() -> None:
    silence = Silence([0, 1], 100)
    late = 100 + int(SILENT_S) + 1
    assert seconds(silence, 100, 120, 0) == {late: [1]}
    silence.hear(1, 120)
    assert seconds(silence, 120, 140, 0) == {120 + int(SILENT_S) + 1: [1]}


def test_a_rank_that_stops_before_its_first_word_is_silent() -> None:
    silence = Silence(range(4), 0)
    assert seconds(silence, 0, 20, 0, 1, 3) == {int(SILENT_S) + 1: [2]}


def test_who_speaks_in_time_is_never_silent() -> None:
    silence = Silence([3], 0)
    for begin in range(0, 50, 5):
        silence.hear(3, begin)
        assert seconds(silence, begin, begin + 5) == {}


def test_a_listener_that_stood_still_gives_everybody_a_new_chance() -> None:
    silence = Silence([0, 1], 0)
    awake = int(STOOD_STILL_S) + 60
    assert silence.overdue(awake) == []
    assert seconds(silence, awake, awake + 20, 0) == {awake + int(SILENT_S) + 1: [1]}
