"""The router: control plane, pools, tokenizer and endpoints, wired together once."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import zmq

from vertumnus_router.clock import Clock
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import PlanEnded, Regroup
from vertumnus_router.core.events import Event, RegroupEnded
from vertumnus_router.core.types import DecodeId, PoolId, Rank, TransferId
from vertumnus_router.io.access import Gate
from vertumnus_router.io.admission import Door
from vertumnus_router.io.asgi import Receive, Scope, Send
from vertumnus_router.io.client_request import Endpoint
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.control_loop import ControlLoop, Order
from vertumnus_router.io.decodes import DecodeLink
from vertumnus_router.io.discovery.sources import sources
from vertumnus_router.io.fleet import AlreadyThere, Fleet, Link, Role
from vertumnus_router.io.forwarding import Credentials, attempt_of
from vertumnus_router.io.hot_path import HotPath
from vertumnus_router.io.live_metrics import live_samples
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.observe.recent_moves import RecentMoves
from vertumnus_router.io.observe.start import start_observer
from vertumnus_router.io.plain import PlainServer
from vertumnus_router.io.pool import PoolLink
from vertumnus_router.io.probes import Probes
from vertumnus_router.io.regrouping import Regrouping
from vertumnus_router.io.reports import PrefillReport
from vertumnus_router.io.served_model import ServedModel
from vertumnus_router.io.server_probe import Found, Plain
from vertumnus_router.io.snapshots import Snapshots
from vertumnus_router.io.sockets import Context
from vertumnus_router.io.stalls import look_for_stalls
from vertumnus_router.io.tls import upstream_context
from vertumnus_router.io.tokenize import TokenizeService
from vertumnus_router.io.transfers import Transfers
from vertumnus_router.io.upstream import Front
from vertumnus_router.profiles import load_profile
from vertumnus_router.protocol import HEARTBEAT_S, PoolDescription, PrefillStarted

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 2.0
#: The engine ignores an abort that overtakes its request, so it is told a second time.
_ABORT_AGAIN_S = 0.5
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


class Router:
    """Build it anywhere; ``start`` and ``close`` on the event loop that serves it.

    Raises ``ProfileError`` when the profile of ``config`` cannot be used, ``ConfigError`` or
    ``OSError`` when something that is to be observed cannot be.
    """

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        profile = load_profile(config.profile)
        self.core = ControlPlane(config.policy, profile)
        self.metrics = RouterMetrics()
        self.observer = start_observer(config.observe, clock, self.metrics)
        self.moves = RecentMoves()
        self.control = ControlLoop(
            self.core,
            clock,
            command=self._carry_out,
            pull=lambda order: self.transfers.pull(order),
        )
        self.regrouping = Regrouping(
            feed=self._regrouped,
            fronts=self,
            metrics=self.metrics,
            spawn=self.spawn,
            source=random.Random(),
        )
        self.transfers = Transfers(
            feed=self.control.feed,
            ranks=self,
            metrics=self.metrics,
            spawn=self.spawn,
            source=random.Random(),
            pull_s=config.limits.pull_s,
            copy_s=config.policy.prefix.timeout_s,
        )
        self.model = ServedModel(paired=bool(config.decode_urls), profile=profile)
        self.pools: list[PoolLink] = []
        self.decodes: list[DecodeLink] = []
        self._fleet = Fleet(make=self._link, forget=self._forget, spawn=self._begin, clock=clock)
        limits = config.limits
        self.tokenizer = TokenizeService(
            threads=limits.tokenize_threads,
            deadline_s=limits.tokenize_s,
            cache_bytes=limits.tokenize_cache_mib * 2**20,
        )
        self.door = Door(config.admission, self.core.explain, self.metrics, clock)
        self.gate = Gate(config.api_keys, config.control_key, config.host)
        self.credentials = Credentials(not config.api_keys, config.upstream_api_key)
        self._tls = upstream_context(config.tls)
        self.hot = HotPath(
            control=self.control,
            engines=self,
            tokenizer=self.tokenizer,
            model=self.model,
            metrics=self.metrics,
            door=self.door,
            credentials=self.credentials,
            observer=self.observer,
            clock=clock,
            body_bytes=limits.body_bytes,
            source=random.Random(),
        )
        self.discovery = sources(config.discovery, self, clock, random.Random())
        self._fronts: dict[PoolId, tuple[Front, PoolLink]] = {}
        self._decode_fronts: dict[DecodeId, tuple[Front, DecodeLink]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._context: Context | None = None
        self._session: aiohttp.ClientSession | None = None
        self._first_join_s: float | None = None
        self.metrics.watch(lambda: live_samples(self))

    @property
    def session(self) -> aiohttp.ClientSession:
        """For commands to fronts; only between ``start`` and ``close``."""
        if self._session is None:
            raise RuntimeError("the router has not been started")
        return self._session

    async def start(self) -> None:
        """Begin to look for the pools and to tick."""
        self._context = zmq.Context()
        # Two for each rank. By default there can be 1023, of all pools together.
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
        self._session = aiohttp.ClientSession(connector=connector)
        self.spawn(self.control.tick())
        self.spawn(look_for_stalls(lambda: self.hot.live, self.config.limits, self.clock))
        for url in self.config.pool_urls:
            self.join(url, Role.POOL)
        for url in self.config.worker_urls:
            self.join(url)
        for url, port in self.config.prefill_urls:
            self.join(url, Role.PREFILL, bootstrap_port=port)
        for url in self.config.decode_urls:
            self.join(url, Role.DECODE)
        for source in self.discovery:
            self.spawn(source.run())

    def join(
        self, url: str, role: Role = Role.WORKER, *, bootstrap_port: int | None = None
    ) -> bool:
        """Follow the server at ``url`` from now on, see ``Fleet.join``. Only between ``start`` and
        ``close``; it takes requests once it has been found and fits, see ``trouble`` of its link.
        """
        return self._fleet.join(url, role, bootstrap_port)

    def leave(self, url: str) -> bool:
        """Let go of the server at ``url`` once its requests have ended, see ``Fleet.leave``."""
        return self._fleet.leave(url)

    def role(self, url: str) -> Role | None:
        """What the server at ``url`` is followed as, None if it is not."""
        return self._fleet.role(url)

    def is_leaving(self, url: str) -> bool:
        return self._fleet.is_leaving(url)

    def _link(self, url: str, role: Role, bootstrap_port: int | None) -> Link:
        limits = self.config.limits
        probes = Probes(limits.probe_s, limits.probe_timeout_s, limits.missed_probes)
        if role is Role.DECODE:
            if self.model.description is not None and not self.model.prefill_only:
                # From then on none of them could join again after it was away for a moment.
                raise AlreadyThere(f"{url} has nothing to do: the pools here decode themselves")
            decode = DecodeLink(
                url=url,
                control=self.control,
                model=self.model,
                session=self.session,
                clock=self.clock,
                probes=replace(probes, every_s=min(HEARTBEAT_S, probes.every_s)),
                headers=self.asking_header(),
                on_joined=self._on_decode_joined,
                on_left=self._on_decode_left,
            )
            self.decodes.append(decode)
            self.model.paired = True
            return decode
        assert self._context is not None
        pool = PoolLink(
            url=url,
            control=self.control,
            model=self.model,
            session=self.session,
            context=self._context,
            clock=self.clock,
            probes=probes,
            snapshots=Snapshots(self, self.metrics, self.clock, self.spawn),
            on_joined=self._on_joined,
            on_left=self._on_left,
            on_prefill=self._on_prefill,
            plain=None
            if role is Role.POOL
            else Plain(self.asking_header(), role is Role.PREFILL, bootstrap_port),
        )
        self.pools.append(pool)
        return pool

    def _forget(self, link: Link) -> None:
        if isinstance(link, DecodeLink):
            self.decodes.remove(link)
            self.model.paired = bool(self.decodes)
        elif isinstance(link, PoolLink):
            self.pools.remove(link)

    async def close(self) -> None:
        """Stop everything; requests still running are cut off."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for front, _ in (*self._fronts.values(), *self._decode_fronts.values()):
            front.close()
        self._fronts.clear()
        self._decode_fronts.clear()
        self.tokenizer.close()
        if self._session is not None:
            await self._session.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        await asyncio.to_thread(self.observer.close)

    async def serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> bool:
        """Serve an inference request; False if ``path`` is none of these endpoints."""
        endpoint = _ENDPOINTS.get(path)
        if endpoint is None:
            return False
        await self.hot.serve(endpoint, scope, receive, send)
        return True

    def not_ready(self) -> list[str]:
        """Why requests should not come here yet; empty when they should.

        Needs a worker that serves, a decode server if the workers leave the decoding to one, and
        what the ranks have cached, or the patience for it to run out: a router that knows nothing
        of the caches scatters what belongs together.
        """
        if self.hot.stopping:
            return ["the router is stopping"]
        reasons = [
            f"{one.name}: {one.trouble or 'names no server'}"
            for one in self.discovery
            if one.trouble or not any(following.urls for following in one.following)
        ]
        reasons += [f"pool at {pool.url}: {pool.trouble}" for pool in self.pools if pool.trouble]
        if any(pool.description for pool in self.pools):
            reasons = []
        if not self.core.is_ready():
            workers = self.core.workers(self.clock.now())
            why = [f"worker {one.id} is {one.state.value}: {one.reason}" for one in workers]
            return [*reasons, "no worker serves", *why]
        if self.core.lacks_decode:
            why = [
                f"decode server at {one.url}: {one.trouble or 'it is leaving'}"
                for one in self.decodes
            ]
            hint = "start the router with --decode URL for the pools that prefill only"
            return [*reasons, "no decode server is live", *(why or [hint])]
        if self._waited_s() < self.config.limits.warm_s:
            if not self.tokenizer.settled:
                reasons.append("the tokenizer is loading")
            for pool in self.pools:
                if pool.description is not None and (cold := pool.cold_ranks()):
                    reasons.append(f"the cache of {pool.description.pool_id} {cold} is not known")
        return reasons

    def _waited_s(self) -> float:
        return 0.0 if self._first_join_s is None else self.clock.now() - self._first_join_s

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` in the background until it ends or the router closes."""
        self._begin(work)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("a background task failed", exc_info=failure)

    def _carry_out(self, order: Order) -> None:
        match order:
            case Regroup() | PlanEnded():
                if isinstance(order, Regroup):
                    self.moves.began(order, self.clock.now())
                self.regrouping.carry_out(order)
            case _:
                self.transfers.carry_out(order)

    def _regrouped(self, event: Event) -> None:
        if isinstance(event, RegroupEnded):
            self.moves.ended(event, self.clock.now())
        self.control.feed(event)

    # -- pools -----------------------------------------------------------------------------------

    def _on_joined(self, link: PoolLink, pool: Found) -> None:
        if self._first_join_s is None:
            self._first_join_s = self.clock.now()
        front = self._front(link.url)
        self._fronts[PoolId(pool.pool_id)] = front, link
        self.spawn(self.tokenizer.load(pool, self.config.tokenizer_path))
        if isinstance(pool, PoolDescription):
            self.spawn(self.regrouping.learn(PoolId(pool.pool_id)))

    def _front(self, url: str) -> Front:
        loop, connect_s = asyncio.get_running_loop(), self.config.limits.connect_s
        return Front(url, loop, connect_s=connect_s, tls=self._tls)

    def _on_left(self, link: PoolLink, pool: Found) -> None:
        gone = self._fronts.pop(PoolId(pool.pool_id), None)
        if gone is not None:
            gone[0].close()

    def _on_decode_joined(self, link: DecodeLink) -> None:
        self._decode_fronts[link.id] = self._front(link.url), link

    def _on_decode_left(self, link: DecodeLink) -> None:
        gone = self._decode_fronts.pop(link.id, None)
        if gone is not None:
            gone[0].close()

    def _on_prefill(self, pool: PoolId, report: PrefillReport) -> None:
        if isinstance(report, PrefillStarted):
            for rid in report.rids:
                exchange = self._attempt(pool, rid)
                if exchange is not None:
                    exchange.prefill_started()
            return
        for done in report.done:
            exchange = self._attempt(pool, done.rid)
            if exchange is not None:
                exchange.prefill_done(done)

    def _attempt(self, pool: PoolId, rid: str) -> Any:
        """The exchange whose current attempt is ``rid`` in that pool, or None. Which rank
        reports it depends on the composition."""
        exchange = self.hot.find(rid)
        if exchange is None or exchange.dispatch is None:
            return None
        dispatch = exchange.dispatch
        here = dispatch.pool == pool and attempt_of(rid) == dispatch.attempt
        return exchange if here else None

    # -- engines.Engines, transfers.Ranks --------------------------------------------------------

    def front(self, pool: PoolId) -> Front | None:
        found = self._fronts.get(pool)
        return None if found is None else found[0]

    def plain(self, pool: PoolId) -> PlainServer | None:
        found = self._fronts.get(pool)
        description = None if found is None else found[1].description
        return description if isinstance(description, PlainServer) else None

    def front_url(self, pool: PoolId) -> str | None:
        found = self.front(pool)
        return None if found is None else found.url

    def kv_address(self, rank: Rank) -> str | None:
        found = self._fronts.get(rank.pool)
        return None if found is None else found[1].kv_address(rank.index)

    def batches_seen(self, rank: Rank) -> int | None:
        found = self._fronts.get(rank.pool)
        return None if found is None else found[1].batches_seen(rank.index)

    def when_pulled(self, transfer: TransferId, go: Callable[[], None]) -> None:
        self.transfers.when_pulled(transfer, go)

    def suspect(self, pool: PoolId) -> None:
        found = self._fronts.get(pool)
        if found is not None:
            found[1].suspect()

    def abort(self, pool: PoolId, rids: list[str]) -> None:
        found = self._fronts.get(pool)
        if found is not None:
            self.spawn(self._abort(found[0].url, rids))

    def bootstrap_port(self, pool: PoolId) -> int | None:
        found = self._fronts.get(pool)
        description = None if found is None else found[1].description
        if description is None or description.prefill is None:
            return None
        return description.prefill.bootstrap_port

    def decode(self, decode: DecodeId) -> Front | None:
        found = self._decode_fronts.get(decode)
        return None if found is None else found[0]

    def suspect_decode(self, decode: DecodeId) -> None:
        found = self._decode_fronts.get(decode)
        if found is not None:
            found[1].suspect()

    def abort_decode(self, decode: DecodeId, rids: list[str]) -> None:
        # Its id is its URL: it is told even when it counts as lost, in case it only stood still.
        self.spawn(self._abort(str(decode), rids))

    async def _abort(self, url: str, rids: list[str]) -> None:
        await self._abort_once(url, rids)
        await self.clock.sleep(_ABORT_AGAIN_S)
        await self._abort_once(url, rids)

    async def _abort_once(self, url: str, rids: Iterable[str]) -> None:
        for rid in rids:
            try:
                async with self.session.post(
                    f"{url}/abort_request",
                    data=orjson.dumps({"rid": rid}),
                    headers={"content-type": "application/json", **self.key_header()},
                    timeout=aiohttp.ClientTimeout(total=_ABORT_TIMEOUT_S),
                ) as answer:
                    if answer.status != 200:
                        log.warning("%s: abort answered %d", url, answer.status)
            except (TimeoutError, aiohttp.ClientError, OSError) as exc:
                log.info("%s: abort did not arrive: %s", url, exc)

    def key_header(self) -> dict[str, str]:
        """For commands: SGLang takes its ``--admin-api-key``, or its ``--api-key`` if it has no
        other."""
        return _bearer(self.config.control_key or self.config.upstream_api_key)

    def asking_header(self) -> dict[str, str]:
        """For what a server is asked of itself: SGLang takes its ``--api-key`` only."""
        return _bearer(self.config.upstream_api_key or self.config.control_key)


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
