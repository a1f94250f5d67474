"""Put one rank's KV event batches in order: sequence check, replay on a gap, reset when lost.

Pure: batches and answers go in, index events come out. SGLang numbers batches from 0 in each
life of a rank and keeps the last ``buffer_steps`` of them for replay; there is no incarnation in
the stream itself. What is lost beyond that, the rank has to publish once more.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vertumnus_router.core.events import BlocksStored, Event, IndexReset
from vertumnus_router.core.types import Rank
from vertumnus_router.io.kv_batch import AllBlocksCleared, Batch, index_events

#: Replays asked in vain before the missing batches are given up.
_REPLAY_ATTEMPTS = 3
#: Live batches held back while a replay runs.
_HELD_BATCHES = 100_000


@dataclass(slots=True)
class StreamCounters:
    """What went wrong so far, for metrics."""

    gaps: int = 0
    resets: int = 0
    skipped_events: int = 0

    def add(self, other: "StreamCounters") -> None:
        self.gaps += other.gaps
        self.resets += other.resets
        self.skipped_events += other.skipped_events


class EventStream:
    """Turns ``live`` and ``replayed`` batches of one rank into index events.

    ``replay_from`` is the sequence number that should be asked for, None when nothing is
    missing. The owner asks, hands in every answer and then calls ``replay_ended`` (the end
    marker came) or ``replay_failed`` (it did not).

    ``losses`` counts how often batches were lost for good. While ``is_incomplete``, the owner has
    the rank publish all its blocks again, and says by ``refilled`` how many there are.
    """

    def __init__(self, rank: Rank, block_tokens: int) -> None:
        self.rank = rank
        self.counters = StreamCounters()
        self.replay_from: int | None = None
        self.losses = 0
        self.stored_blocks = 0
        self._block_tokens = block_tokens
        self._next = 0
        self._newest_ts = float("-inf")
        self._held: deque[tuple[int, Batch]] = deque(maxlen=_HELD_BATCHES)
        self._attempts = 0
        self._replay_begun = False
        self._torn_at: int | None = None
        self._read = False
        #: how many blocks must have been stored for all to be known; None: nobody knows
        self._complete_at: int | None = 0

    @property
    def batches(self) -> int:
        """How many batches the rank had published when it was as this stream knows it."""
        return self._next

    @property
    def warm(self) -> bool:
        """Whether what the rank holds is known."""
        return (
            self._read and self._complete_at is not None and self.stored_blocks >= self._complete_at
        )

    @property
    def is_incomplete(self) -> bool:
        """Whether blocks are missing that nobody is going to publish, and no replay runs."""
        return self._complete_at is None and self.replay_from is None

    def refilled(self, losses: int, stored_blocks: int, blocks: int) -> None:
        """The rank publishes all ``blocks`` that it holds, after ``stored_blocks`` as they were
        counted here. Nothing is gained if there were further ``losses`` since."""
        if losses == self.losses and self._complete_at is None:
            self._complete_at = stored_blocks + blocks

    def forgo(self) -> None:
        """The rank cannot publish its blocks again: what is known is all there is to know."""
        self._complete_at = 0

    def start(self) -> None:
        """Ask for everything the rank still remembers and this stream has not read."""
        self._want_replay(self._next)

    def restart(self, cause: str) -> list[Event]:
        """The rank lives a new life: forget everything, then read it from its first batch."""
        self._held.clear()
        events = self._reset(cause, next_seq=0)
        self._attempts = 0
        self._complete_at = 0
        self._want_replay(0)
        return events

    def probe(self) -> None:
        """Ask for what follows the last batch, in case the newest was lost on the way."""
        if self.replay_from is None:
            self._want_replay(self._next)

    def live(self, seq: int, batch: Batch) -> list[Event]:
        """A batch from the subscription."""
        if self.replay_from is not None:
            self._held.append((seq, batch))
            return []
        return self._take_live(seq, batch)

    def replayed(self, seq: int, batch: Batch) -> list[Event]:
        """One batch of the answer to the replay asked for."""
        first = not self._replay_begun
        self._replay_begun = True
        if seq < self._next or self._torn_at is not None:
            return []
        if seq == self._next:
            return self._apply(batch)
        if not first:
            # The publisher's socket dropped part of the answer: ask again from the hole.
            self._torn_at = seq
            return []
        events = self._lose(
            f"the replay buffer has wrapped: batch {self._next} asked, oldest is {seq}", seq
        )
        return events + self._apply(batch)

    def replay_ended(self) -> list[Event]:
        """The end marker came: continue with the live batches held back meanwhile."""
        self.replay_from = None
        if self._torn_at is not None:
            self._attempts += 1
            if self._attempts <= _REPLAY_ATTEMPTS:
                self._want_replay(self._next)
                return []
            self._attempts = 0
            return self._skip_to(self._torn_at, "the replay has a hole")
        events = self._release_held()
        if self.replay_from is None:
            self._read = True
        return events

    def replay_failed(self) -> list[Event]:
        """No answer, or not the end of it. Asks again a few times, then gives up: what was
        missed may have been removals, so nothing known of the rank can be trusted."""
        self.replay_from = None
        self._attempts += 1
        if self._attempts < _REPLAY_ATTEMPTS:
            self._want_replay(self._next)
            return []
        self._attempts = 0
        if not self._held and self._read:
            return []
        self._read = True
        if not self._held:
            return self._lose("no replay came", self._next)
        return self._skip_to(self._held[0][0], "batches were lost and no replay came")

    def _release_held(self) -> list[Event]:
        events: list[Event] = []
        while self._held and self.replay_from is None:
            seq, batch = self._held.popleft()
            if batch.ts < self._newest_ts:
                continue  # replayed meanwhile, or left over from a life already forgotten
            events += self._take_live(seq, batch)
        return events

    def _take_live(self, seq: int, batch: Batch) -> list[Event]:
        if seq == self._next:
            return self._apply(batch)
        if seq < self._next:
            if batch.ts <= self._newest_ts:
                return []  # seen before, through a replay
            self._held.appendleft((seq, batch))
            events = self._reset("the sequence started again", next_seq=0)
            self._want_replay(0)
            return events
        self.counters.gaps += 1
        self._held.appendleft((seq, batch))
        self._attempts += 1
        if self._attempts > _REPLAY_ATTEMPTS:
            self._attempts = 0
            return self._skip_to(seq, "batches were lost and the replay does not have them")
        self._want_replay(self._next)
        return []

    def _skip_to(self, seq: int, cause: str) -> list[Event]:
        events = self._lose(cause, seq)
        return events + self._release_held()

    def _lose(self, cause: str, next_seq: int) -> list[Event]:
        """Batches are gone for good: of what the rank holds, only the news are known."""
        self.losses += 1
        self._complete_at = None
        return self._reset(cause, next_seq)

    def _apply(self, batch: Batch) -> list[Event]:
        self._next += 1
        self._attempts = 0
        self._newest_ts = max(self._newest_ts, batch.ts)
        self.counters.skipped_events += batch.skipped
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._complete_at = 0  # what was missing is gone, too
        events = index_events(self.rank, batch, self._block_tokens)
        self.stored_blocks += sum(len(e.blocks) for e in events if isinstance(e, BlocksStored))
        return events

    def _reset(self, cause: str, next_seq: int) -> list[Event]:
        self.counters.resets += 1
        self._next = next_seq
        self._newest_ts = float("-inf")
        return [IndexReset(self.rank, cause)]

    def _want_replay(self, seq: int) -> None:
        self.replay_from = seq
        self._replay_begun = False
        self._torn_at = None


def sequence_number(frame: bytes) -> int:
    """The sequence number in a frame of eight bytes, big-endian and signed; -1 ends a replay."""
    return int.from_bytes(frame, "big", signed=True)


def parse_live(frames: Iterable[bytes]) -> tuple[int, bytes]:
    """``[topic, seq, payload]`` of the subscription; ``ValueError`` when it is not that."""
    _, seq, payload = frames
    return sequence_number(seq), payload


def parse_replayed(frames: Iterable[bytes]) -> tuple[int, bytes]:
    """``[b"", topic, seq, payload]`` of a replay, or the older layout without a topic."""
    *_, seq, payload = frames
    return sequence_number(seq), payload
