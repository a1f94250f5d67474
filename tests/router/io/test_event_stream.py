"""The order of one rank's event batches, without sockets: gaps, replays, resets."""

import math

from hypothesis import given
from hypothesis import strategies as st
from vertumnus_router.core.events import BlocksRemoved, BlocksStored, Event, IndexReset
from vertumnus_router.core.types import BlockHash, PoolId, Rank
from vertumnus_router.io.event_stream import EventStream, parse_live, parse_replayed
from vertumnus_router.io.kv_batch import AllBlocksCleared, Batch, BlockRemoved, BlockStored

RANK = Rank(PoolId("p"), 0)


def batch(number: int, ts: float | None = None) -> Batch:
    """A batch that stores the block ``number``."""
    return Batch(float(number) if ts is None else ts, (BlockStored([number], None, 4),))


def stored(events: list[Event]) -> list[int]:
    return [int(block) for e in events if isinstance(e, BlocksStored) for block in e.blocks]


def resets(events: list[Event]) -> list[str]:
    return [event.cause for event in events if isinstance(event, IndexReset)]


def warm(batches: int) -> EventStream:
    """A stream that has replayed that many batches."""
    stream = EventStream(RANK, 4)
    stream.start()
    for number in range(batches):
        stream.replayed(number, batch(number))
    assert stream.replay_ended() == []
    assert stream.warm
    return stream


def test_a_late_joiner_replays_from_the_start_and_then_follows() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    assert stream.replay_from == 0
    assert stream.live(3, batch(3)) == [], "held back until the past is known"
    events = [e for number in range(3) for e in stream.replayed(number, batch(number))]
    events += stream.replay_ended()
    events += stream.live(4, batch(4))
    assert stored(events) == [0, 1, 2, 3, 4]
    assert resets(events) == []
    assert stream.replay_from is None


def test_what_came_both_ways_counts_once() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    for number in (1, 2):
        stream.live(number, batch(number))
    events = [e for number in range(3) for e in stream.replayed(number, batch(number))]
    assert stored(events + stream.replay_ended()) == [0, 1, 2]
    # Still in the subscription's queue when the replay had ended.
    assert stream.live(2, batch(2)) == []
    assert stream.replay_from is None


def test_a_gap_is_replayed_and_nothing_is_reset() -> None:
    stream = warm(2)
    assert stream.live(5, batch(5)) == []
    assert stream.replay_from == 2
    assert stream.counters.gaps == 1
    events = [e for n in (2, 3, 4, 5) for e in stream.replayed(n, batch(n))]
    events += stream.replay_ended()
    assert stored(events) == [2, 3, 4, 5]
    assert resets(events) == []
    assert stored(stream.live(6, batch(6))) == [6]


def test_a_wrapped_buffer_resets_the_index_before_what_is_left() -> None:
    stream = warm(2)
    stream.live(90, batch(90))
    events = [e for n in range(80, 91) for e in stream.replayed(n, batch(n))]
    events += stream.replay_ended()
    assert isinstance(events[0], IndexReset)
    assert "wrapped" in events[0].cause
    assert stored(events) == list(range(80, 91))
    assert stream.replay_from is None


def test_a_buffer_that_wrapped_before_the_first_join_resets_too() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    events = stream.replayed(7, batch(7)) + stream.replay_ended()
    assert isinstance(events[0], IndexReset)
    assert stored(events) == [7]


def test_a_hole_in_the_replay_is_asked_for_again() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    events = stream.replayed(0, batch(0)) + stream.replayed(2, batch(2))
    events += stream.replay_ended()
    assert stored(events) == [0]
    assert stream.replay_from == 1
    assert not stream.warm
    events = stream.replayed(1, batch(1)) + stream.replayed(2, batch(2)) + stream.replay_ended()
    assert stored(events) == [1, 2]
    assert stream.warm


def test_a_hole_that_never_fills_is_given_up() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    events = stream.replayed(0, batch(0))
    asked = 0
    while stream.replay_from is not None:
        stream.replayed(1, batch(1)) if asked == 0 else None
        events += stream.replayed(2, batch(2)) if asked == 0 else []
        stream.live(9, batch(9))
        events += stream.replay_ended()
        asked += 1
        assert asked < 20
    assert len(resets(events)) == 1
    assert stored(stream.live(10, batch(10))) == [10]


def test_a_sequence_that_starts_again_is_a_new_life() -> None:
    stream = warm(5)
    events = stream.live(0, batch(0, ts=100.0))
    assert resets(events) == ["the sequence started again"]
    assert stream.replay_from == 0
    events = stream.replayed(0, batch(0, ts=100.0)) + stream.replayed(1, batch(1, ts=101.0))
    assert stored(events + stream.replay_ended()) == [0, 1]


def test_a_restart_forgets_first_and_drops_what_was_left_over() -> None:
    stream = warm(5)
    events = stream.restart("new incarnation b")
    assert resets(events) == ["new incarnation b"]
    assert stream.replay_from == 0
    stream.live(5, batch(5, ts=5.0))  # of the old life, still in the socket
    events = stream.replayed(0, batch(10, ts=100.0)) + stream.replay_ended()
    assert stored(events) == [10]
    assert stream.replay_from is None, "no replay for a life that is over"
    assert stored(stream.live(1, batch(11, ts=101.0))) == [11]


def test_a_publisher_that_does_not_replay_is_followed_after_a_reset() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    stream.live(40, batch(40))
    stream.live(41, batch(41))
    events: list[Event] = []
    for _ in range(3):
        assert stream.replay_from == 0
        events += stream.replay_failed()
    assert stream.replay_from is None
    assert stream.is_incomplete and not stream.warm
    assert isinstance(events[0], IndexReset)
    assert stored(events) == [40, 41]
    stream.forgo()
    assert stream.warm


def wrapped() -> EventStream:
    """A stream that joined when the first 80 batches were forgotten."""
    stream = EventStream(RANK, 4)
    stream.start()
    for number in (80, 81):
        stream.replayed(number, batch(number))
    assert not stream.is_incomplete, "a replay runs"
    stream.replay_ended()
    assert stream.is_incomplete and not stream.warm
    assert (stream.losses, stream.stored_blocks, stream.batches) == (1, 2, 82)
    return stream


def test_what_was_lost_is_known_when_all_of_a_snapshot_has_come() -> None:
    stream = wrapped()
    stream.live(82, Batch(82.0, (BlockStored([1, 2], None, 4),)))
    stream.refilled(losses=1, stored_blocks=2, blocks=3)
    assert not stream.is_incomplete and not stream.warm
    stream.live(83, Batch(83.0, (BlockRemoved([1]),)))
    assert not stream.warm
    stream.live(84, Batch(84.0, (BlockStored([3], 2, 4),)))
    assert stream.warm


def test_a_snapshot_of_before_a_further_loss_counts_for_nothing() -> None:
    stream = wrapped()
    stream.live(99, batch(99))
    assert not stream.is_incomplete, "that is yet to be replayed"
    for number in range(95, 100):
        stream.replayed(number, batch(number))
    stream.replay_ended()
    assert stream.losses == 2
    stream.refilled(losses=1, stored_blocks=2, blocks=1)
    assert stream.is_incomplete
    stream.refilled(losses=2, stored_blocks=7, blocks=0)
    assert stream.warm


def test_nothing_is_missing_of_a_cache_that_is_cleared_or_new() -> None:
    stream = wrapped()
    events = stream.live(82, Batch(82.0, (AllBlocksCleared(), BlockStored([1], None, 4))))
    assert (stored(events), stream.warm) == ([1], True)
    stream = wrapped()
    stream.restart("new incarnation b")
    stream.replayed(0, batch(0, ts=100.0))
    stream.replay_ended()
    assert stream.warm


def test_a_rank_of_which_nothing_could_be_read_is_incomplete() -> None:
    stream = EventStream(RANK, 4)
    stream.start()
    events = [event for _ in range(3) for event in stream.replay_failed()]
    assert resets(events) == ["no replay came"]
    assert stream.is_incomplete
    probed = warm(3)
    probed.probe()
    for _ in range(3):
        assert probed.replay_failed() == []
    assert probed.warm, "nobody knows of a batch that it lacks"


def test_a_probe_finds_a_lost_tail() -> None:
    stream = warm(3)
    stream.probe()
    assert stream.replay_from == 3
    assert stored(stream.replayed(3, batch(3)) + stream.replay_ended()) == [3]
    stream.probe()
    assert stream.replay_ended() == []
    assert stream.replay_from is None


def test_an_unreadable_batch_keeps_the_order() -> None:
    stream = warm(3)
    assert stream.live(3, Batch(math.nan, (), skipped=1)) == []
    assert stored(stream.live(4, batch(4))) == [4]
    assert stream.counters.skipped_events == 1


def test_frames_of_both_layouts_are_read() -> None:
    seq = (7).to_bytes(8, "big")
    end = (-1).to_bytes(8, "big", signed=True)
    assert parse_live([b"topic", seq, b"x"]) == (7, b"x")
    assert parse_replayed([b"", b"topic", seq, b"x"]) == (7, b"x")
    assert parse_replayed([b"", seq, b"x"]) == (7, b"x")
    assert parse_replayed([b"", b"", end, b""]) == (-1, b"")


@given(
    lost=st.sets(st.integers(0, 60)),
    remembers=st.integers(1, 60),
    joins_at=st.integers(0, 39),
)
def test_whatever_is_lost_the_index_ends_as_the_publishers(
    lost: set[int], remembers: int, joins_at: int
) -> None:
    """Batches store and remove; a model set follows the same events without any loss. What cannot
    be replayed is published once more, which may be lost, too."""
    truth: set[int] = set()
    seen: set[int] = set()
    history: list[tuple[int, Batch]] = []
    stream = EventStream(RANK, 4)

    def take(events: list[Event]) -> None:
        for event in events:
            match event:
                case IndexReset():
                    seen.clear()
                case BlocksStored(blocks=blocks):
                    seen.update(blocks)
                case BlocksRemoved(blocks=blocks):
                    seen.difference_update(blocks)

    def answer() -> None:
        while stream.replay_from is not None:
            asked = stream.replay_from
            for seq, one in history[-remembers:]:
                if seq >= asked:
                    take(stream.replayed(seq, one))
            take(stream.replay_ended())

    def publish(event: BlockStored | BlockRemoved) -> None:
        seq = len(history)
        history.append((seq, Batch(float(seq), (event,))))
        if joined and seq not in lost:
            take(stream.live(*history[-1]))
            answer()

    def refill() -> None:
        if stream.is_incomplete:
            losses, stored_blocks = stream.losses, stream.stored_blocks
            publish(BlockStored(sorted(truth), None, 4))
            stream.refilled(losses, stored_blocks, len(truth))

    joined = False
    for block in range(40):
        if block % 3 == 2:
            truth.discard(block - 2)
            publish(BlockRemoved([BlockHash(block - 2)]))
        else:
            truth.add(block)
            publish(BlockStored([BlockHash(block)], None, 4))
        if block == joins_at:
            joined = True
            stream.start()
            answer()
        if joined:
            refill()
    for _ in range(3):
        stream.probe()
        answer()
        assert seen <= truth, "nothing is believed that the rank has removed"
        lost.clear()
        refill()
    assert stream.warm
    assert seen == truth
