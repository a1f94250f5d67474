"""Whether a block may begin prefills, and when a hold that nobody ends is over."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_vertumnus.worker.hold import HOLD_S, Hold


def test_a_hold_lasts_until_its_move_is_over() -> None:
    hold = Hold()
    assert hold.epoch is None
    hold.begin(3, 10.0)
    assert hold.epoch == 3
    hold.end(2)
    assert hold.epoch == 3, "an earlier move's end is late"
    hold.end(3)
    assert hold.epoch is None


def test_a_later_moves_end_ends_it_too() -> None:
    hold = Hold()
    hold.begin(3, 10.0)
    hold.end(7)
    assert hold.epoch is None


def test_the_last_move_that_was_prepared_counts() -> None:
    hold = Hold()
    hold.begin(3, 10.0)
    hold.begin(4, 11.0)
    hold.end(3)
    assert hold.epoch == 4
    assert not hold.has_expired(11.0 + HOLD_S) and hold.has_expired(11.1 + HOLD_S)


def test_what_is_not_held_does_not_expire() -> None:
    hold = Hold()
    assert not hold.has_expired(1e9)
    hold.begin(1, 0.0)
    hold.end(1)
    hold.end(1)
    assert not hold.has_expired(1e9)


@given(st.lists(st.tuples(st.sampled_from(["begin", "end"]), st.integers(1, 5)), max_size=12))
def test_it_holds_for_the_last_prepared_epoch_unless_that_or_a_later_one_is_over(
    events: list[tuple[str, int]],
) -> None:
    hold = Hold()
    for what, epoch in events:
        if what == "begin":
            hold.begin(epoch, 0.0)
        else:
            hold.end(epoch)
    begun = [at for at, (what, _) in enumerate(events) if what == "begin"]
    expected = None
    if begun:
        epoch = events[begun[-1]][1]
        ended = any(ended >= epoch for _, ended in events[begun[-1] + 1 :])
        expected = None if ended else epoch
    assert hold.epoch == expected
