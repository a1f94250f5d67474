"""The connection to one pool: find it, follow its ranks, notice when it goes and comes back."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp

from vertumnus_router import protocol
from vertumnus_router.clock import Clock
from vertumnus_router.core import events
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io.control_loop import ControlLoop
from vertumnus_router.io.event_stream import EventStream, StreamCounters
from vertumnus_router.io.rank_feed import RankFeed
from vertumnus_router.io.reports import PrefillReport, ReportReader
from vertumnus_router.io.served_model import ServedModel
from vertumnus_router.io.snapshots import Snapshots
from vertumnus_router.io.sockets import Context, host_port, tcp_url
from vertumnus_router.lattice import Block, CompositionError
from vertumnus_router.protocol import (
    HEARTBEAT_S,
    Endpoint,
    PoolDescription,
    ProtocolError,
    RankState,
)

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_BACKOFF_S = (0.1, 0.2, 0.5)
#: Probes that may go unanswered in a row while no rank reports either.
_MISSED_PROBES = 3
_WILDCARDS = (None, "", "*", "0.0.0.0", "::", "[::]")


class PoolLink:
    """Follows the pool at ``url``. ``run`` never returns; everything it learns goes to
    ``control``. Also the listener of the pool's reports (``reports.Listener``)."""

    def __init__(
        self,
        *,
        url: str,
        control: ControlLoop,
        model: ServedModel,
        session: aiohttp.ClientSession,
        context: Context,
        clock: Clock,
        probe_s: float,
        snapshots: Snapshots,
        on_joined: Callable[["PoolLink", PoolDescription], None],
        on_left: Callable[["PoolLink", PoolDescription], None],
        on_prefill: Callable[[PoolId, PrefillReport], None],
    ) -> None:
        self.url = url.rstrip("/")
        self.description: PoolDescription | None = None
        self.trouble: str | None = "not reached yet"
        self.joins = 0
        self._host = urlsplit(self.url).hostname or ""
        self._control = control
        self._model = model
        self._session = session
        self._context = context
        self._clock = clock
        self._probe_s = probe_s
        self._snapshots = snapshots
        self._on_joined = on_joined
        self._on_left = on_left
        self._on_prefill = on_prefill
        self._feeds: list[RankFeed] = []
        self._reports: ReportReader | None = None
        self._lives: dict[int, str] = {}  # incarnations of the ranks that report
        self._past = StreamCounters()
        self._suspected = asyncio.Event()

    @property
    def counters(self) -> StreamCounters:
        """What went wrong with the event streams of all ranks, over all joins."""
        total = replace(self._past)
        for feed in self._feeds:
            total.add(feed.stream.counters)
        return total

    def cold_ranks(self) -> list[int]:
        """Ranks that have reported and whose index has not been read yet."""
        return [rank for rank in sorted(self._lives) if not self._feeds[rank].stream.warm]

    def kv_address(self, rank: int) -> str | None:
        """Where other ranks fetch cached KV from this one; None if they cannot."""
        if self.description is None or self.description.kv_service is None:
            return None
        endpoint = self.description.kv_service.endpoint
        return host_port(self._host_of(endpoint), endpoint.port_base + rank)

    def batches_seen(self, rank: int) -> int | None:
        """How many batches of the rank's events the index has taken in."""
        return self._feeds[rank].stream.batches if rank in self._lives else None

    def suspect(self) -> None:
        """Somebody could not reach the front: probe it now."""
        self._suspected.set()

    # -- fleet.Link ----------------------------------------------------------------------------

    @property
    def visit(self) -> PoolDescription | None:
        return self.description

    @property
    def requests(self) -> int:
        pool = self.description
        return 0 if pool is None else self._control.requests_at(PoolId(pool.pool_id))

    def retire(self, cause: str | None) -> None:
        if self.description is not None:
            self._control.feed(events.PoolLeaving(PoolId(self.description.pool_id), cause))

    def end(self, cause: str) -> None:
        if self.description is not None:
            self._leave(cause)

    async def run(self) -> None:
        try:
            while True:
                description = await self._find()
                self._join(description)
                cause = await self._follow(description)
                self._leave(cause)
        finally:
            self._close()

    # -- finding and losing the front ----------------------------------------------------------

    async def _find(self) -> PoolDescription:
        attempt = 0
        while True:
            found = await self._describe()
            if isinstance(found, PoolDescription):
                trouble = self._model.misfit(found)
                if trouble is None:
                    return found
            else:
                trouble = found
            if trouble != self.trouble:
                log.warning("pool at %s: %s", self.url, trouble)
            self.trouble = trouble
            await self._clock.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    async def _describe(self) -> PoolDescription | str:
        """The pool's description, or why there is none."""
        try:
            async with self._session.get(
                f"{self.url}/vertumnus/pool",
                timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S),
            ) as answer:
                body = await answer.read()
                if answer.status == 503:
                    return f"not ready: {body[:200].decode('utf-8', 'replace').strip()}"
                if answer.status != 200:
                    return f"GET /vertumnus/pool answers {answer.status}: is this a pool?"
            return protocol.decode_description(body)
        except ProtocolError as exc:
            return str(exc)
        except aiohttp.ClientConnectorError as exc:
            return f"cannot connect: {exc.strerror or exc}"
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            return f"no answer: {type(exc).__name__} {exc}".rstrip()

    async def _follow(self, joined: PoolDescription) -> str:
        """Watch the pool until it is gone; why it is."""
        next_probe_s = self._clock.now() + self._probe_s
        missed = 0
        while True:
            await self._pause(HEARTBEAT_S)
            self._check_ranks()
            suspected = self._suspected.is_set()
            if self._clock.now() < next_probe_s and not suspected:
                continue
            self._suspected.clear()
            next_probe_s = self._clock.now() + self._probe_s
            found = await self._describe()
            if isinstance(found, PoolDescription):
                missed = 0
                if found != joined:
                    return "the pool was started again with another description"
                continue
            refused = found.startswith("cannot connect")
            busy = self._reports is not None and self._reports.heard_lately()
            missed = 0 if busy and not refused else missed + 1
            if refused or missed >= _MISSED_PROBES:
                return f"the front at {self.url} does not answer ({found})"

    async def _pause(self, seconds: float) -> None:
        """Sleep, or less if the front is suspected."""
        try:
            async with asyncio.timeout(seconds):
                await self._suspected.wait()
        except TimeoutError:
            pass

    def _check_ranks(self) -> None:
        if self._reports is not None:
            self._reports.check()
        for feed in self._feeds:
            feed.check()

    # -- joining and leaving ---------------------------------------------------------------------

    def _join(self, pool: PoolDescription) -> None:
        loop = asyncio.get_running_loop()
        self.description, self.trouble = pool, None
        self.joins += 1
        self._suspected.clear()
        self._model.joined(pool)
        name = PoolId(pool.pool_id)
        self._control.feed(
            events.PoolJoined(
                pool=name,
                size=pool.pool_size,
                degrees=pool.degrees,
                block_tokens=pool.kv_events.block_tokens,
                context_tokens=pool.model.context_tokens,
                kv_capacity_tokens=pool.model.kv_capacity_tokens,
                chunk_tokens=pool.model.chunk_tokens,
                manifest=pool.manifest,
                prefill_only=pool.prefill is not None,
                kv_token_bytes=0 if pool.kv_service is None else pool.kv_service.token_bytes,
            )
        )
        self._feeds = [self._feed(loop, pool, rank) for rank in range(pool.pool_size)]
        self._reports = ReportReader(
            loop=loop,
            context=self._context,
            description=pool,
            host=self._host_of(pool.reports),
            clock=self._clock,
            listener=self,
        )
        log.info("pool %s at %s joined: %d rank(s)", pool.pool_id, self.url, pool.pool_size)
        self._on_joined(self, pool)

    def _feed(self, loop: asyncio.AbstractEventLoop, pool: PoolDescription, rank: int) -> RankFeed:
        stream = EventStream(Rank(PoolId(pool.pool_id), rank), pool.kv_events.block_tokens)
        lives = self._lives

        def on_incomplete() -> None:
            if pool.kv_service is None:
                stream.forgo()
            else:
                self._snapshots.want(stream, lambda: lives.get(rank))

        return RankFeed(
            loop=loop,
            context=self._context,
            stream=stream,
            topic=pool.kv_events.topic.encode(),
            publish_url=self._url_of(pool.kv_events.publish, rank),
            replay_url=self._url_of(pool.kv_events.replay, rank),
            on_events=self._control.feed_all,
            on_incomplete=on_incomplete,
        )

    def _leave(self, cause: str) -> None:
        pool = self.description
        assert pool is not None
        log.warning("pool %s left: %s", pool.pool_id, cause)
        self._close()
        self.description, self.trouble = None, cause
        self._model.left(pool.pool_id)
        # The control plane first: it tells the requests, the connections just go silent.
        self._control.feed(events.PoolLost(PoolId(pool.pool_id), cause))
        self._on_left(self, pool)

    def _close(self) -> None:
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        for feed in self._feeds:
            self._past.add(feed.stream.counters)
            feed.close()
        self._feeds = []
        self._lives.clear()  # seen by who waits for a snapshot of this join, and of no other
        self._lives = {}

    def _host_of(self, endpoint: Endpoint) -> str:
        return self._host if endpoint.host in _WILDCARDS else str(endpoint.host)

    def _url_of(self, endpoint: Endpoint, rank: int) -> str:
        return tcp_url(self._host_of(endpoint), endpoint.port_base + rank)

    # -- reports.Listener ------------------------------------------------------------------------

    def rank_began(self, state: RankState, previous: str | None) -> None:
        """A new life's index starts empty: forget the old one before anything else is told,
        then ask for the events of the new one."""
        if previous is not None:
            self._feeds[state.rank].restart(f"new incarnation {state.incarnation}")

    def rank_reported(self, state: RankState) -> None:
        assert self.description is not None
        try:
            block = Block(state.first, state.degree)
        except CompositionError as exc:
            log.warning("pool %s, rank %d: %s", state.pool_id, state.rank, exc)
            return
        self._control.feed(
            events.RankReported(
                rank=Rank(PoolId(state.pool_id), state.rank),
                incarnation=state.incarnation,
                epoch=state.epoch,
                block=block,
                manifest=state.manifest,
                running_requests=state.running_requests,
                waiting_requests=state.waiting_requests,
                kv_used_tokens=state.kv_used_tokens,
            )
        )
        self._lives[state.rank] = state.incarnation
        # Only now is it known whose life the events belong to.
        self._feeds[state.rank].start()

    def rank_lost(self, rank: int, incarnation: str | None, cause: str) -> None:
        assert self.description is not None
        pool = PoolId(self.description.pool_id)
        log.warning("pool %s: rank %d lost: %s", pool, rank, cause)
        self._control.feed(events.RankLost(Rank(pool, rank), cause, incarnation))
        self._lives.pop(rank, None)
        self._feeds[rank].stop()

    def prefill(self, report: PrefillReport) -> None:
        assert self.description is not None
        self._on_prefill(PoolId(self.description.pool_id), report)
