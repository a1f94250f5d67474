"""One rank's KV events: a subscription, and a fresh socket for each replay."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from vertumnus_router.core.events import Event
from vertumnus_router.io.event_stream import EventStream, parse_live, parse_replayed
from vertumnus_router.io.kv_batch import decode_batch
from vertumnus_router.io.sockets import Context, Frames, SocketReader, ask, subscribe

log = logging.getLogger(__name__)

#: SGLang's publisher looks at replay requests at least every 0.1 s.
_REPLAY_TIMEOUT_S = 3.0
#: A stream that was silent this long is asked whether its last batch was really the last.
_PROBE_AFTER_S = 30.0


class RankFeed:
    """Feeds ``on_events`` with the index events of one rank, in order.

    The subscription is opened before anything is replayed, so that nothing falls between. Without
    a ``replay_url`` what was missed is given up at once.
    ``on_incomplete`` is called again and again while the stream is.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        stream: EventStream,
        topic: bytes,
        publish_url: str,
        replay_url: str | None,
        on_events: Callable[[Iterable[Event]], None],
        on_incomplete: Callable[[], None],
    ) -> None:
        self.stream = stream
        self._loop = loop
        self._context = context
        self._replay_url = replay_url
        self._on_events = on_events
        self._on_incomplete = on_incomplete
        self._live = SocketReader(loop, subscribe(context, topic, publish_url), self._on_live)
        self._replay: SocketReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._started = False
        self._last_batch_at = loop.time()
        self._answered_at = loop.time()

    def start(self) -> None:
        """The rank reports: ask for what was missed, unless it is followed already. The caller
        knows which life of the rank it listens to."""
        if not self._started:
            self._started = True
            self.stream.start()
            self._ask_if_wanted()

    def restart(self, cause: str) -> None:
        """The rank has a new incarnation: everything known of the old one goes first."""
        self._started = True
        self._stop_replay()
        self._emit(self.stream.restart(cause))

    def stop(self) -> None:
        """The rank is lost: nobody would answer. ``start`` or ``restart`` follows it again."""
        self._started = False
        self._stop_replay()

    def check(self) -> None:
        """Called about once a second: a stream silent for long is probed for a lost tail."""
        if self._started and self._loop.time() - self._last_batch_at > _PROBE_AFTER_S:
            self.probe()

    def probe(self) -> None:
        if self._started:
            self._last_batch_at = self._loop.time()
            self.stream.probe()
            self._ask_if_wanted()

    def close(self) -> None:
        self._stop_replay()
        self._live.close()

    def _on_live(self, frames: Frames) -> None:
        if not self._started:
            return  # the replay with which this feed starts will bring it
        self._last_batch_at = self._loop.time()
        try:
            seq, payload = parse_live(frames)
        except ValueError:
            log.warning("%s: a message that is no KV event batch", self.stream.rank)
            return
        self._emit(self.stream.live(seq, decode_batch(payload)))

    def _on_replayed(self, frames: Frames) -> None:
        self._answered_at = self._loop.time()
        try:
            seq, payload = parse_replayed(frames)
        except ValueError:
            log.warning("%s: an answer that is no replay", self.stream.rank)
            return
        if seq >= 0:
            self._emit(self.stream.replayed(seq, decode_batch(payload)))
            return
        self._stop_replay()
        self._emit(self.stream.replay_ended())

    def _on_timeout(self) -> None:
        silent_s = self._loop.time() - self._answered_at
        if silent_s < _REPLAY_TIMEOUT_S:
            self._timer = self._loop.call_later(_REPLAY_TIMEOUT_S - silent_s, self._on_timeout)
            return
        self._stop_replay()
        log.warning("%s: no complete replay within %.0f s", self.stream.rank, _REPLAY_TIMEOUT_S)
        self._emit(self.stream.replay_failed())

    def _emit(self, events: list[Event]) -> None:
        if events:
            self._on_events(events)
        self._ask_if_wanted()
        if self._started and self.stream.is_incomplete:
            self._on_incomplete()

    def _ask_if_wanted(self) -> None:
        if self.stream.replay_from is None or self._replay is not None:
            return
        if self._replay_url is None:
            self._emit(self.stream.replay_failed())  # and so on, until the stream asks no more
            return
        # A new socket has a new identity: no answer to an earlier question can reach it.
        self._replay = SocketReader(
            self._loop, ask(self._context, self._replay_url), self._on_replayed
        )
        self._answered_at = self._loop.time()
        self._replay.send([b"", self.stream.replay_from.to_bytes(8, "big")])
        self._timer = self._loop.call_later(_REPLAY_TIMEOUT_S, self._on_timeout)

    def _stop_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None
