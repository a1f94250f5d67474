"""The connection to one pool: find it, follow its ranks, notice when it goes and comes back.

A server of plain SGLang is followed by the same means, see ``plain.py``.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import aiohttp

from vertumnus_router.clock import Clock
from vertumnus_router.core import events
from vertumnus_router.core.events import Event
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io.control_loop import ControlLoop
from vertumnus_router.io.event_stream import EventStream, StreamCounters
from vertumnus_router.io.plain import PlainServer
from vertumnus_router.io.probes import Probes
from vertumnus_router.io.rank_feed import RankFeed
from vertumnus_router.io.reports import PrefillReport, ReportReader
from vertumnus_router.io.served_model import ServedModel
from vertumnus_router.io.server_probe import Found, Plain, ServerProbe
from vertumnus_router.io.snapshots import Snapshots
from vertumnus_router.io.sockets import Context, host_port, tcp_url
from vertumnus_router.io.tokenize import NO_EVENTS_BLOCK_TOKENS
from vertumnus_router.lattice import Block, CompositionError
from vertumnus_router.protocol import (
    HEARTBEAT_S,
    Endpoint,
    PoolDescription,
    RankState,
)

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 0.2, 0.5)
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
        probes: Probes,
        snapshots: Snapshots,
        on_joined: Callable[["PoolLink", Found], None],
        on_left: Callable[["PoolLink", Found], None],
        on_prefill: Callable[[PoolId, PrefillReport], None],
        plain: Plain | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.description: Found | None = None
        self.trouble: str | None = "not reached yet"
        self.joins = 0
        self._host = urlsplit(self.url).hostname or ""
        self._control = control
        self._model = model
        self._server = ServerProbe(self.url, session, probes.timeout_s, plain)
        self._context = context
        self._clock = clock
        self._probes = probes
        self._snapshots = snapshots
        self._on_joined = on_joined
        self._on_left = on_left
        self._on_prefill = on_prefill
        self._feeds: list[RankFeed] = []
        self._reports: ReportReader | None = None
        self._lives: dict[int, str] = {}  # incarnations of the ranks that report, by feed
        self._past = StreamCounters()
        self._suspected = asyncio.Event()

    @property
    def stale_s(self) -> float | None:
        """For how long no rank has reported although the front answers, None while they do. Its
        workers serve on as they last were."""
        return None if self._reports is None else self._reports.stale_s()

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
    def visit(self) -> Found | None:
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
                try:
                    self._join(description)
                    self._leave(await self._follow(description))
                except Exception as exc:  # no sockets left, say. Nobody else would find it again
                    log.exception("pool at %s cannot be followed", self.url)
                    self._leave(f"the router cannot follow it: {exc or type(exc).__name__}")
                    await self._clock.sleep(_BACKOFF_S[-1])
        finally:
            self._close()

    # -- finding and losing the front ----------------------------------------------------------

    async def _find(self) -> Found:
        attempt = 0
        while True:
            found = await self._server.describe()
            if isinstance(found, str):
                trouble: str | None = found
            else:
                trouble = self._model.misfit(found)
                if trouble is None:
                    return found
            if trouble != self.trouble:
                log.warning("pool at %s: %s", self.url, trouble)
            self.trouble = trouble
            await self._clock.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    async def _follow(self, joined: Found) -> str:
        """Watch the pool until it is gone; why it is."""
        next_probe_s = self._clock.now() + self._probes.every_s
        missed = 0  # while no rank reports either
        while True:
            await self._pause(HEARTBEAT_S)
            self._check_ranks()
            suspected = self._suspected.is_set()
            if self._clock.now() < next_probe_s and not suspected:
                continue
            self._suspected.clear()
            next_probe_s = self._clock.now() + self._probes.every_s
            found = await self._server.look(joined, closely=suspected or missed > 0)
            if not isinstance(found, str):
                missed = 0
                if found != joined:
                    return "the pool was started again with another description"
                continue
            refused = found.startswith("cannot connect")
            busy = self._reports is not None and self._reports.heard_lately()
            missed = 0 if busy and not refused else missed + 1
            if refused or missed >= self._probes.misses:
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

    def _join(self, found: Found) -> None:
        self.description, self.trouble = found, None
        self.joins += 1
        self._suspected.clear()
        self._model.joined(found)
        if isinstance(found, PoolDescription):
            self._join_pool(found)
        else:
            self._join_plain(found)
        log.info("%s at %s joined: %d rank(s)", found.pool_id, self.url, found.pool_size)
        self._on_joined(self, found)
        if isinstance(found, PlainServer):
            # The connections first: the control plane may send a request at once.
            self._control.feed_all(found.reports())
            for feed in self._feeds:
                feed.start()

    def _join_plain(self, server: PlainServer) -> None:
        block_tokens = self._model.block_tokens or NO_EVENTS_BLOCK_TOKENS
        self._control.feed(server.joined(block_tokens))
        described = server.kv_events
        if described is None:
            log.warning(
                "%s publishes no KV events that can be used, so nothing is known of what it has "
                "cached: start it with --kv-events-config",
                self.url,
            )
            return
        publish = Endpoint(port_base=described.endpoint_port_base, host=described.endpoint_host)
        replay = described.replay_endpoint_port_base
        for dp_rank, block in enumerate(server.blocks):
            stream = EventStream(Rank(PoolId(server.pool_id), block.leader), described.block_size)
            self._lives[dp_rank] = server.life
            self._feeds.append(
                RankFeed(
                    loop=asyncio.get_running_loop(),
                    context=self._context,
                    stream=stream,
                    topic=described.topic.encode(),
                    publish_url=self._url_of(publish, dp_rank),
                    replay_url=None
                    if replay is None
                    else self._url_of(Endpoint(port_base=replay, host=publish.host), dp_rank),
                    on_events=partial(self._on_plain_events, server, dp_rank),
                    # Plain SGLang cannot publish its blocks again: the news have to do.
                    on_incomplete=stream.forgo,
                )
            )

    def _on_plain_events(
        self, server: PlainServer, dp_rank: int, of_leader: Iterable[Event]
    ) -> None:
        self._control.feed_all(server.on_all_ranks(dp_rank, of_leader))

    def _join_pool(self, pool: PoolDescription) -> None:
        loop = asyncio.get_running_loop()
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
        if pool is None:
            return
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
