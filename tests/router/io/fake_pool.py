"""A pool without an engine, for what a real one does only when it breaks.

Speaks the pool's protocol: description, event and report sockets per rank in SGLang's
encoding, an HTTP front whose answers a test decides.
"""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
from aiohttp import web
from vertumnus_router.io.sockets import SocketReader
from vertumnus_router.lattice import Block, format_composition, parse_composition
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    BlockState,
    Endpoint,
    KvEvents,
    KvService,
    ModelInfo,
    MoveCommand,
    MoveReport,
    PoolComposition,
    PoolDescription,
    PrefillDone,
    PrefillFinished,
    PrefillSide,
    PrefillStarted,
    RankState,
    Report,
    Stages,
    encode_report,
)
from vertumnus_router.protocol import RankLost as RankLostReport

from tests.router.io.fake_kv import TOKEN_BYTES, FakeKv

BLOCK_TOKENS = 4
#: Where ranks would fetch from each other: nothing listens there.
KV_PORT = 7000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SSE = {"content-type": "text/event-stream; charset=utf-8"}


@dataclass
class Seen:
    """One request as the front received it."""

    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    disconnected: bool = False
    finished: bool = False

    @property
    def rid(self) -> str:
        """From the header, or as a decode server gets it."""
        return self.headers.get("x-override-rid") or str(self.fields["rid"])

    @property
    def fields(self) -> dict[str, Any]:
        """The body as SGLang reads it: of a name that comes twice the last one counts."""
        return dict(json.loads(self.body))

    @property
    def rooms(self) -> list[int]:
        """Of the prompts, one by one, as ``GenerateReqInput`` numbers them."""
        fields = self.fields
        prompts = fields.get("text", fields.get("prompt"))
        count = len(prompts) if isinstance(prompts, list) else 1
        return [fields["bootstrap_room"] + index for index in range(count)]

    @property
    def rank(self) -> int:
        return int(self.headers["x-override-routed-dp-rank"])


class Server(Protocol):
    """What an answer needs of the fake that gives it."""

    def abort_event(self, rid: str) -> asyncio.Event: ...


Answer = Callable[[Any, web.Request, Seen], Awaitable[web.StreamResponse]]
Regroup = Callable[["FakePool", web.Request, MoveCommand], Awaitable[web.StreamResponse]]


def sse_chunks(tokens: int) -> list[bytes]:
    """The events of an answer, with bytes that must not be touched."""
    events = [
        b'data: {"choices":[{"index":0,"delta":{"content":"t%d \\u00e9\xc3\xa9"}}]}\n\n' % i
        for i in range(tokens)
    ]
    return [*events, b"data: [DONE]\n\n"]


async def stream(pool: "FakePool", request: web.Request, seen: Seen) -> web.StreamResponse:
    """Stream three tokens, or answer in one piece if the client does not stream."""
    if not json.loads(seen.body).get("stream"):
        return web.json_response({"choices": [{"message": {"content": "hello"}}]})
    response = web.StreamResponse(headers=SSE)
    await response.prepare(request)
    for chunk in sse_chunks(3):
        await response.write(chunk)
    await response.write_eof()
    return response


def stream_slowly(tokens: int, gap_s: float) -> Answer:
    async def answer(pool: "FakePool", request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        for chunk in sse_chunks(tokens):
            await response.write(chunk)
            await asyncio.sleep(gap_s)
        await response.write_eof()
        return response

    return answer


async def hang(pool: Server, request: web.Request, seen: Seen) -> web.StreamResponse:
    """Never answer; only a closed connection or an abort ends this."""
    await pool.abort_event(seen.rid).wait()
    return web.json_response({"error": {"message": "aborted"}}, status=400)


async def drop(pool: "FakePool", request: web.Request, seen: Seen) -> web.StreamResponse:
    """Close the connection instead of answering."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(60)
    raise AssertionError("the handler should have been cancelled")


def drop_after(chunks: Sequence[bytes], headers: dict[str, str] = SSE) -> Answer:
    """Send the beginning of an answer, then close the connection."""

    async def answer(pool: "FakePool", request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.close()
        await asyncio.sleep(60)
        return response

    return answer


def refuse(status: int, body: Any) -> Answer:
    async def answer(pool: "FakePool", request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


async def regroup(
    pool: "FakePool", request: web.Request, command: MoveCommand
) -> web.StreamResponse:
    """Commit the move, and let all ranks report it."""
    if command.epoch not in (None, pool.epoch):
        return web.json_response({"error": f"the pool is at epoch {pool.epoch}"}, status=409)
    before = format_composition(pool.blocks)
    pool.blocks = parse_composition(command.composition, len(pool.ranks), pool.description.degrees)
    pool.epoch += 1
    for rank in pool.ranks:
        rank.beat()
    return pool.report(
        MoveReport(
            epoch=pool.epoch,
            before=before,
            after=command.composition,
            outcome="committed",
            stages=Stages(drain=20.0, vote=2.0, switch=3.0, publish=1.0),
        )
    )


async def abandon(
    pool: "FakePool", request: web.Request, command: MoveCommand
) -> web.StreamResponse:
    """Rank 1 does not come to a step boundary."""
    before = format_composition(pool.blocks)
    return pool.report(
        MoveReport(
            epoch=pool.epoch,
            before=before,
            after=command.composition,
            outcome="abandoned",
            reason="rank 1 was not ready within 10 s",
        )
    )


async def answer_late(
    pool: "FakePool", request: web.Request, command: MoveCommand
) -> web.StreamResponse:
    """Begin when the test says so."""
    await pool.may_regroup.wait()
    return await regroup(pool, request, command)


async def switch_and_hang_up(
    pool: "FakePool", request: web.Request, command: MoveCommand
) -> web.StreamResponse:
    """Commit, and lose the answer."""
    await regroup(pool, request, command)
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(60)
    raise AssertionError("the handler should have been cancelled")


def answer_regroup(status: int, body: Any) -> Regroup:
    async def answer(
        pool: "FakePool", request: web.Request, command: MoveCommand
    ) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


@dataclass
class FakeRank:
    """The sockets of one rank, and what its publisher remembers."""

    pool: "FakePool"
    index: int
    kv: zmq.Socket[bytes]
    reports: zmq.Socket[bytes]
    replay: SocketReader
    incarnation: str
    silent: bool = False
    load: dict[str, int] = field(default_factory=dict)
    sequence: Iterable[int] = field(default_factory=itertools.count)
    buffer: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=10_000))
    replays_asked: list[int] = field(default_factory=list)
    held: dict[int, int | None] = field(default_factory=dict)  # blocks, with their parents
    published: int = 0

    def publish(self, *events: dict[str, Any], lose: bool = False) -> int:
        """Publish a batch as SGLang's ``ZmqEventPublisher`` does; ``lose`` it on the wire."""
        seq = next(iter(self.sequence))
        payload = msgspec.msgpack.encode([time.time(), list(events), self.index])
        if not lose:
            topic = self.pool.description.kv_events.topic.encode()
            self.kv.send_multipart([topic, seq.to_bytes(8, "big"), payload])
        self.buffer.append((seq, payload))
        self.published = seq + 1
        return seq

    def store(self, blocks: Sequence[int], parent: int | None = None, *, lose: bool = False) -> int:
        above = parent
        for block in blocks:
            self.held[block] = above
            above = block
        event = {
            "type": "BlockStored",
            "block_hashes": list(blocks),
            "parent_block_hash": parent,
            "token_ids": [7] * (BLOCK_TOKENS * len(blocks)),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
        }
        return self.publish(event, lose=lose)

    def remove(self, blocks: Sequence[int], *, lose: bool = False) -> int:
        for block in blocks:
            self.held.pop(block, None)
        event = {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"}
        return self.publish(event, lose=lose)

    def report(self, report: Report) -> None:
        self.reports.send_multipart(encode_report(report))

    def beat(self) -> None:
        block = next(block for block in self.pool.blocks if self.index in block)
        self.report(
            RankState(
                version=PROTOCOL_VERSION,
                pool_id=self.pool.description.pool_id,
                rank=self.index,
                incarnation=self.incarnation,
                epoch=self.pool.epoch,
                first=block.first,
                degree=block.degree,
                manifest=self.pool.description.manifest,
                **self.load,
            )
        )

    def begin_new_life(self) -> None:
        """The process was replaced: new incarnation, empty cache, sequence from 0."""
        self.incarnation += "'"
        self.sequence = itertools.count()
        self.buffer.clear()
        self.held.clear()
        self.publish({"type": "AllBlocksCleared"})

    def on_replay(self, frames: list[bytes]) -> None:
        client, _, start = frames
        first = int.from_bytes(start, "big")
        self.replays_asked.append(first)
        topic = self.pool.description.kv_events.topic.encode()
        for seq, payload in self.buffer:
            if seq >= first:
                self.replay.send([client, b"", topic, seq.to_bytes(8, "big"), payload])
        self.replay.send([client, b"", b"", END_OF_REPLAY, b""])


class FakePool:
    """``size`` ranks behind one front. An asynchronous context manager."""

    def __init__(
        self,
        size: int = 2,
        composition: str | None = None,
        *,
        pool_id: str = "fake",
        tokenizer_path: str = "/nowhere",
        context_tokens: int = 4096,
        beat_s: float = 0.1,
        prefill: PrefillSide | None = None,
        copies: bool = False,
    ) -> None:
        self.blocks: tuple[Block, ...] = parse_composition(
            composition or f"{size}x1", size, (1, 2, 4, 8)
        )
        self.epoch = 1
        self.moves: list[MoveReport] = []
        self.regroup: Regroup = regroup
        self.may_regroup = asyncio.Event()
        self.regroups: list[tuple[MoveCommand, str | None]] = []  # and the key that came with it
        self.answers: deque[Answer] = deque()
        self.answer: Answer = stream
        self.answer_by_rank: dict[int, Answer] = {}
        self.seen: list[Seen] = []
        self.aborted: list[str] = []
        self.commands: list[str] = []
        self.running: set[str] = set()
        self.ranks: list[FakeRank] = []
        self.beating = True
        self.starting = False
        self.fail_composition = False
        self.failed: set[Block] = set()
        self._beat_s = beat_s
        self._aborts: dict[str, asyncio.Event] = {}
        self._context = zmq.Context()
        self._supervisor = self._context.socket(zmq.PUB)
        self._runner: web.AppRunner | None = None
        base = _free_ports(3 * size + 2)
        self.port = base + 3 * size + 1
        endpoint = Endpoint(port_base=KV_PORT)
        self.kv = FakeKv(
            self, KvService(endpoint=endpoint, token_bytes=TOKEN_BYTES) if copies else None
        )
        self.description = PoolDescription(
            version=PROTOCOL_VERSION,
            pool_id=pool_id,
            sglang_version="0.5.23",
            pool_size=size,
            degrees=(1, 2, 4, 8),
            model=ModelInfo(
                served_name="fake-model",
                model_path="/models/fake",
                tokenizer_path=tokenizer_path,
                context_tokens=context_tokens,
                kv_capacity_tokens=context_tokens,
                chunk_tokens=2048,
            ),
            kv_events=KvEvents(
                publish=Endpoint(port_base=base, host="0.0.0.0"),
                replay=Endpoint(port_base=base + size),
                topic="kv-events",
                block_tokens=BLOCK_TOKENS,
            ),
            reports=Endpoint(port_base=base + 2 * size),
            manifest="same",
            prefill=prefill,
            kv_service=self.kv.service,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakePool":
        loop = asyncio.get_running_loop()
        pool = self.description
        for index in range(pool.pool_size):
            router = self._context.socket(zmq.ROUTER)
            router.bind(f"tcp://127.0.0.1:{pool.kv_events.replay.port_base + index}")
            kv, reports = self._context.socket(zmq.PUB), self._context.socket(zmq.PUB)
            kv.bind(f"tcp://127.0.0.1:{pool.kv_events.publish.port_base + index}")
            reports.bind(f"tcp://127.0.0.1:{pool.reports.port_base + index}")
            rank = FakeRank(self, index, kv, reports, SocketReader(loop, router, _ignore), "life")
            rank.replay._on_frames = rank.on_replay
            rank.publish({"type": "AllBlocksCleared"})
            self.ranks.append(rank)
        self._supervisor.bind(f"tcp://127.0.0.1:{pool.reports.port_base + pool.pool_size}")
        self._beats = asyncio.create_task(self._beat())
        await self.start_front()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._beats.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._beats
        await self.stop_front()
        for rank in self.ranks:
            rank.replay.close()
        self._context.destroy(linger=0)

    async def start_front(self) -> None:
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.router.add_get("/vertumnus/pool", self._describe)
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._serve)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/vertumnus/regroup", self._regroup)
        app.router.add_get("/vertumnus/composition", self._composition)
        self.kv.add_routes(app)
        for path in ("/flush_cache", "/start_profile", "/stop_profile"):
            app.router.add_post(path, self._command)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/model_info", self._info)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()

    async def stop_front(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def lose_rank(self, rank: int, cause: str) -> None:
        """What the supervisor says when a rank's process ends."""
        self.ranks[rank].silent = True
        self._supervisor.send_multipart(encode_report(RankLostReport(rank=rank, cause=cause)))

    def prefill_started(self, seen: Seen) -> None:
        rank = self.ranks[seen.rank]
        rank.report(
            PrefillStarted(rank=rank.index, incarnation=rank.incarnation, epoch=1, rids=(seen.rid,))
        )

    def prefill_finished(self, seen: Seen, *, input_tokens: int, cached_tokens: int) -> None:
        rank = self.ranks[seen.rank]
        done = PrefillDone(
            rid=seen.rid, input_tokens=input_tokens, cached_tokens=cached_tokens, compute_s=0.25
        )
        rank.report(
            PrefillFinished(rank=rank.index, incarnation=rank.incarnation, epoch=1, done=(done,))
        )

    def abort_event(self, rid: str) -> asyncio.Event:
        return self._aborts.setdefault(rid, asyncio.Event())

    async def _beat(self) -> None:
        while True:
            if self.beating:
                for rank in self.ranks:
                    if not rank.silent:
                        rank.beat()
            await asyncio.sleep(self._beat_s)

    async def _describe(self, _: web.Request) -> web.Response:
        if self.starting:
            return web.Response(status=503, text="the pool is starting")
        return web.Response(
            body=msgspec.json.encode(self.description), content_type="application/json"
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.path, request.query_string, headers, body)
        self.seen.append(seen)
        answer = self.answer_by_rank.get(seen.rank, self.answer)
        if self.answers:
            answer = self.answers.popleft()
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

    async def _regroup(self, request: web.Request) -> web.StreamResponse:
        command = msgspec.json.decode(await request.read(), type=MoveCommand)
        self.regroups.append((command, request.headers.get("authorization")))
        return await self.regroup(self, request, command)

    def report(self, report: MoveReport) -> web.Response:
        self.moves.append(report)
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")

    async def _composition(self, _: web.Request) -> web.Response:
        if self.fail_composition:
            return web.json_response({"error": "its supervisor does not answer"}, status=503)
        now = PoolComposition(
            epoch=self.epoch,
            composition=format_composition(self.blocks),
            blocks=tuple(
                BlockState(
                    first=block.first,
                    degree=block.degree,
                    state="failed" if block in self.failed else "serving",
                )
                for block in self.blocks
            ),
            moves=tuple(self.moves),
        )
        return web.Response(body=msgspec.json.encode(now), content_type="application/json")

    async def _command(self, request: web.Request) -> web.Response:
        self.commands.append(request.path)
        return web.Response(text="Done.\n")

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "internal_states": [{}]})


def _ignore(_: list[bytes]) -> None:
    pass


def _free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that nothing listens on, below those that the
    system gives to outgoing connections: one of these could take a port before it is used."""
    for _ in range(100):
        base = random.randrange(12_000, 32_000 - count)
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise RuntimeError(f"no {count} consecutive free ports")


@contextlib.asynccontextmanager
async def pools(*which: FakePool) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for pool in which:
            await stack.enter_async_context(pool)
        yield
