"""The watch over one decode server: plain SGLang, which neither knows this router nor reports."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from vertumnus_router.clock import Clock
from vertumnus_router.core import events
from vertumnus_router.core.types import DecodeId
from vertumnus_router.io.control_loop import ControlLoop
from vertumnus_router.io.probes import Probes
from vertumnus_router.io.served_model import ServedModel

log = logging.getLogger(__name__)

#: ``/server_info`` asks the scheduler, which answers between two steps.
_INFO_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.5


class _State(msgspec.Struct):
    """What each data-parallel rank of a server says of itself, as far as it is read here."""

    effective_max_running_requests_per_dp: int | None = None


class DecodeServer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /server_info``, as far as it is read here."""

    model_path: str
    served_model_name: str | None = None
    disaggregation_mode: str = "null"
    page_size: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_running_requests: int | None = None
    random_seed: int | None = None
    startup_time: Any = None
    internal_states: tuple[_State, ...] = ()

    @property
    def life(self) -> str:
        return life_of(self.startup_time, self.random_seed)

    @property
    def max_requests(self) -> int | None:
        """How many requests it runs at a time, all its ranks together."""
        limits = [state.effective_max_running_requests_per_dp for state in self.internal_states]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known else self.max_running_requests


def life_of(startup_time: Any, random_seed: int | None) -> str:
    """Differs from one start of a server to the next: how long its phases took in seconds, and the
    seed, which is random unless it is set."""
    told = msgspec.json.encode((startup_time, random_seed))
    return hashlib.blake2b(told, digest_size=8).hexdigest()


class DecodeLink:
    """Follows the decode server at ``url``. ``run`` never returns; what it learns goes to
    ``control``. While the server is not live ``trouble`` says why."""

    def __init__(
        self,
        *,
        url: str,
        control: ControlLoop,
        model: ServedModel,
        session: aiohttp.ClientSession,
        clock: Clock,
        probes: Probes,
        headers: Mapping[str, str],
        on_joined: Callable[["DecodeLink"], None],
        on_left: Callable[["DecodeLink"], None],
    ) -> None:
        self.url = url.rstrip("/")
        self.id = DecodeId(self.url)
        self.server: DecodeServer | None = None
        self.trouble: str | None = "not reached yet"
        #: whether it answers, and cannot be used as it is
        self.refused = False
        self._control = control
        self._model = model
        self._session = session
        self._clock = clock
        self._probes = probes
        self._headers = headers
        self._on_joined = on_joined
        self._on_left = on_left
        self._suspected = asyncio.Event()

    def suspect(self) -> None:
        """A request got no answer: look now, and tell the control plane what comes of it."""
        self._suspected.set()

    # -- fleet.Link ----------------------------------------------------------------------------

    @property
    def visit(self) -> DecodeServer | None:
        return self.server

    @property
    def requests(self) -> int:
        return 0 if self.server is None else self._control.rooms_at(self.id)

    def retire(self, cause: str | None) -> None:
        if self.server is not None:
            self._control.feed(events.DecodeLeaving(self.id, cause))

    def end(self, cause: str) -> None:
        if self.server is not None:
            self._leave(cause)

    async def run(self) -> None:
        while True:
            server = await self._find()
            try:
                self._join(server)
                self._leave(await self._follow(server))
            except Exception as exc:  # no sockets left, say. Nobody else would find it again
                log.exception("decode server at %s cannot be followed", self.url)
                self._leave(f"the router cannot follow it: {exc or type(exc).__name__}")
                await self._clock.sleep(_LOOK_AGAIN_S)

    async def _find(self) -> DecodeServer:
        while True:
            found = await self._describe()
            if isinstance(found, DecodeServer):
                trouble = self._misfit(found)
                if trouble is None:
                    return found
                self.refused = True
            else:
                trouble, self.refused = found, False
            if trouble != self.trouble:
                log.warning("decode server at %s: %s", self.url, trouble)
            self.trouble = trouble
            await self._clock.sleep(_LOOK_AGAIN_S)

    async def _follow(self, joined: DecodeServer) -> str:
        """Watch the server until it is gone; why it is."""
        missed = 0
        while True:
            await self._pause()
            misfit = self._misfit(joined)
            if misfit is not None:
                self.refused = True
                return misfit
            trouble = None
            if self._suspected.is_set() or missed:
                # Not only whether somebody answers there, but also who.
                self._suspected.clear()
                found = await self._describe()
                if isinstance(found, DecodeServer):
                    if found.life != joined.life:
                        return "it was started again"
                    self._feed_joined(joined)
                else:
                    trouble = found
            else:
                trouble = await self._not_ready()
            missed = 0 if trouble is None else missed + 1
            if trouble is not None and (
                trouble.startswith("cannot connect") or missed >= self._probes.misses
            ):
                return trouble

    async def _pause(self) -> None:
        """Until the next probe is due, or less if the server is suspected."""
        try:
            async with asyncio.timeout(self._probes.every_s):
                await self._suspected.wait()
        except TimeoutError:
            pass

    async def _describe(self) -> DecodeServer | str:
        """What the server says of itself, or why it does not."""
        answer = await self._get("/server_info", _INFO_TIMEOUT_S)
        if isinstance(answer, str):
            return answer
        try:
            return msgspec.json.decode(answer, type=DecodeServer)
        except msgspec.MsgspecError as exc:
            return f"GET /server_info: is this SGLang? {exc}"

    async def _not_ready(self) -> str | None:
        answer = await self._get("/ready", self._probes.timeout_s)
        return answer if isinstance(answer, str) else None

    async def _get(self, path: str, timeout_s: float) -> bytes | str:
        """The body of the answer, or why there is none."""
        try:
            async with self._session.get(
                self.url + path,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                body = await answer.read()
                return body if answer.status == 200 else f"GET {path} answers {answer.status}"
        except aiohttp.ClientConnectorError as exc:
            return f"cannot connect: {exc.strerror or exc}"
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            return f"no answer: {type(exc).__name__} {exc}".rstrip()

    def _misfit(self, server: DecodeServer) -> str | None:
        """Why the server cannot decode for the pools of this router, or None."""
        if server.disaggregation_mode != "decode":
            return (
                f"it runs with --disaggregation-mode {server.disaggregation_mode}: start it with "
                f"--disaggregation-mode decode"
            )
        if not server.max_requests:
            return "it does not say how many requests it runs at a time"
        pool = self._model.description
        if pool is None:
            # One that is live stays, for the pool that comes back.
            return None if self.server is not None else "waiting for a pool to compare it with"
        if pool.prefill is None:
            return "the pools of this router decode themselves"
        page_size = self._model.block_tokens
        if page_size is not None and server.page_size != page_size:
            return (
                f"its page size is {server.page_size}, that of the pools "
                f"{page_size}: start both with the same --page-size"
            )
        side = pool.prefill
        if side is not None:
            for flag, theirs, ours in (
                ("--dtype", server.dtype, side.dtype),
                ("--kv-cache-dtype", server.kv_cache_dtype, side.kv_cache_dtype),
            ):
                if theirs is not None and theirs != ours:
                    return (
                        f"it has {flag} {theirs}, the pools {ours}: start both with the same {flag}"
                    )
        name = server.served_model_name or server.model_path
        if name != pool.model.served_name:
            return f"it serves {name!r}, the pools of this router {pool.model.served_name!r}"
        return None

    def _join(self, server: DecodeServer) -> None:
        self.server, self.trouble, self.refused = server, None, False
        self._suspected.clear()
        log.info("decode server at %s joined: %s request(s)", self.url, server.max_requests)
        # The connections first: the control plane may send a request at once.
        self._on_joined(self)
        self._feed_joined(server)

    def _feed_joined(self, server: DecodeServer) -> None:
        assert server.max_requests is not None
        self._control.feed(events.DecodeJoined(self.id, server.life, server.max_requests))

    def _leave(self, cause: str) -> None:
        log.warning("decode server at %s lost: %s", self.url, cause)
        self.server, self.trouble = None, cause
        # The control plane first: it tells the requests, the connections just go silent.
        self._control.feed(events.DecodeLost(self.id, cause))
        self._on_left(self)
