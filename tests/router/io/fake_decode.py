"""Decode servers and prefill pools without engines, which meet in SGLang's bootstrap rooms.

As with the real ones, a decode server answers once the prefill leg of its room is there, and the
prefill leg's answer ends once the decode server has fetched the KV.
"""

import asyncio
import contextlib
import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from vertumnus_router.protocol import PrefillSide

from tests.router.io import fake_pool
from tests.router.io.fake_pool import BLOCK_TOKENS, SSE, Answer, FakePool, Seen, sse_chunks
from tests.router.io.harness import Running, running, until

BOOTSTRAP_PORT = 8998


class Rooms:
    """Who has come to which room."""

    def __init__(self) -> None:
        self._prefill: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._decode: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def as_prefill(self, rooms: list[int]) -> None:
        await self._meet(rooms, self._prefill, self._decode)

    async def as_decode(self, rooms: list[int]) -> None:
        await self._meet(rooms, self._decode, self._prefill)

    async def _meet(
        self, rooms: list[int], mine: dict[int, asyncio.Event], theirs: dict[int, asyncio.Event]
    ) -> None:
        for room in rooms:
            assert not mine[room].is_set(), f"room {room} is used twice"
            mine[room].set()
        for room in rooms:
            await theirs[room].wait()


def aborted(status: int | None = None) -> dict[str, Any]:
    """What SGLang answers, with 200, for a request that was aborted."""
    reason = {"type": "abort", "message": "Aborted", "status_code": status, "err_type": None}
    return {"text": "", "meta_info": {"id": "x", "finish_reason": reason}}


async def aborted_answer(server: Any, request: web.Request, seen: Seen) -> web.StreamResponse:
    """A 200 that is none."""
    if not seen.fields.get("stream"):
        return web.json_response(aborted())
    response = web.StreamResponse(headers=SSE)
    await response.prepare(request)
    await response.write(b"data: " + json.dumps(aborted()).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def met_or_aborted(server: Any, seen: Seen, meeting: Any) -> bool:
    """Whether the other leg came; an abort ends the wait."""
    abort = asyncio.ensure_future(server.abort_event(seen.rid).wait())
    met = asyncio.ensure_future(meeting)
    try:
        done, _ = await asyncio.wait((abort, met), return_when=asyncio.FIRST_COMPLETED)
        return met in done
    finally:
        abort.cancel()
        met.cancel()


def prefilling(rooms: Rooms) -> Answer:
    """The prefill leg of a pool: one token for nobody, when the KV has been fetched."""

    async def answer(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
        pool.prefill_started(seen)
        pool.prefill_finished(seen, input_tokens=1, cached_tokens=0)
        if not await met_or_aborted(pool, seen, rooms.as_prefill(seen.rooms)):
            return await aborted_answer(pool, request, seen)
        return await fake_pool.stream(pool, request, seen)

    return answer


def decoding(rooms: Rooms, then: Answer = fake_pool.stream) -> Answer:
    """The decode leg: ``then`` answers, when the KV is there."""

    async def answer(server: Any, request: web.Request, seen: Seen) -> web.StreamResponse:
        if not await met_or_aborted(server, seen, rooms.as_decode(seen.rooms)):
            return await aborted_answer(server, request, seen)
        return await then(server, request, seen)

    return answer


class FakeDecode:
    """Plain SGLang as a decode server. An asynchronous context manager."""

    def __init__(self, rooms: Rooms, *, limit: int = 64, **info: Any) -> None:
        self.rooms = rooms
        self.answers: deque[Answer] = deque()
        self.answer = decoding(rooms)
        self.seen: list[Seen] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.port = fake_pool._free_ports(1)
        self.starts = 0
        self.answers_ready = 200
        self.info: dict[str, Any] = {
            "model_path": "/models/fake",
            "served_model_name": "fake-model",
            "disaggregation_mode": "decode",
            "page_size": BLOCK_TOKENS,
            "dtype": "float32",
            "kv_cache_dtype": "auto",
            "max_running_requests": None,
            "random_seed": 1,
            "internal_states": [{"effective_max_running_requests_per_dp": limit}],
            **info,
        }
        self._aborts: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeDecode":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """A new process: whatever the one before had is gone."""
        self.starts += 1
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._serve)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/ready", self._ready)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def abort_event(self, rid: str) -> asyncio.Event:
        return self._aborts.setdefault(rid, asyncio.Event())

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.path, request.query_string, headers, await request.read())
        self.seen.append(seen)
        answer = self.answers.popleft() if self.answers else self.answer
        self.running.add(seen.rid)
        try:
            response = await answer(self, request, seen)
            seen.finished = True
            return response
        except (asyncio.CancelledError, ConnectionError):
            seen.disconnected = True
            raise
        finally:
            self.running.discard(seen.rid)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        self.abort_event(rid).set()
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        startup = {"load_weight": 1.0 + self.starts, "cuda_graph": {}}
        return web.json_response({**self.info, "startup_time": startup})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=self.answers_ready)


def prefill_pool(
    rooms: Rooms, size: int = 2, composition: str | None = None, **more: Any
) -> FakePool:
    """A pool that leaves the decoding to others."""
    side = PrefillSide(bootstrap_port=BOOTSTRAP_PORT, dtype="float32", kv_cache_dtype="auto")
    pool = FakePool(size, composition, prefill=side, **more)
    pool.answer = prefilling(rooms)
    return pool


@contextlib.asynccontextmanager
async def paired(
    size: int = 2,
    composition: str | None = None,
    *,
    decodes: int = 1,
    limit: int = 64,
    copies: bool = False,
    **more: Any,
) -> AsyncIterator[tuple[FakePool, list[FakeDecode], Running]]:
    """A pool, decode servers and a router that is ready."""
    rooms = Rooms()
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            prefill_pool(rooms, size, composition, copies=copies)
        )
        servers = [
            await stack.enter_async_context(FakeDecode(rooms, limit=limit)) for _ in range(decodes)
        ]
        urls = tuple(server.url for server in servers)
        it = await stack.enter_async_context(running(pool.url, decode_urls=urls, **more))
        await it.ready()
        await live(it, decodes)
        yield pool, servers, it


async def live(it: Running, count: int) -> None:
    await until(lambda: len(it.router.core.decodes()) == count, f"{count} decode server(s)")


WHOLE_STREAM = b"".join(sse_chunks(3))
