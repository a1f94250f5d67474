"""A server of plain SGLang without an engine: the HTTP surface that routers use, and KV events."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from aiohttp import web
from vertumnus_router.io.sockets import SocketReader

from tests.router.io.fake_pool import END_OF_REPLAY, Answer, Seen, _free_ports, stream

MODEL = "fake-model"
PAGE = 4


class FakePlain:
    """Speaks as SGLang 0.5.23 does. ``answer`` decides the inference endpoints; ``publishes`` KV
    events, with or without ``replays``."""

    def __init__(
        self,
        *,
        dp: int = 1,
        cp: int = 1,
        publishes: bool = False,
        replays: bool = True,
        **info: Any,
    ) -> None:
        self.port = _free_ports(1)
        self.dp = dp
        self.seen: list[Seen] = []
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.answer: Answer = stream
        self.answers: deque[Answer] = deque()
        self.ready = 200
        #: of what is not about routing: whether it waits, and how it ends
        self.other: asyncio.Event | None = None
        self.status = 200
        self.starts = 0
        self._runner: web.AppRunner | None = None
        self._aborts: dict[str, asyncio.Event] = {}
        self._context = zmq.Context()
        self._sequence: list[Any] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        self._replays: list[SocketReader] = []
        self._buffers: list[list[tuple[int, bytes]]] = []
        base = _free_ports(2 * dp)
        self._publish_base, self._replay_base = base, base + dp
        described = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self._publish_base,
            "topic": "kv",
            "block_size": PAGE,
            "dp_size": dp,
        }
        if replays:
            described["replay_endpoint_port_base"] = self._replay_base
        self.info: dict[str, Any] = {
            "model_path": MODEL,
            "served_model_name": MODEL,
            "tokenizer_path": "/nowhere",
            "dp_size": dp,
            "tp_size": cp,
            "attn_cp_size": cp,
            "page_size": PAGE,
            "dtype": "auto",
            "kv_cache_dtype": "auto",
            "chunked_prefill_size": 2048,
            "max_total_num_tokens": 100_000,
            "max_req_input_len": 32_762,
            "disaggregation_mode": "null",
            "disaggregation_bootstrap_port": 8998,
            "random_seed": 1,
            "version": "0.5.23",
            "kv_events": described if publishes else None,
            "internal_states": [{"effective_max_running_requests_per_dp": 64}] * dp,
            **info,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakePlain":
        if self.info["kv_events"] is not None:
            for rank in range(self.dp):
                self._open(rank)
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()
        for reader in self._replays:
            reader.close()
        self._context.destroy(linger=0)

    def _open(self, rank: int) -> None:
        pub = self._context.socket(zmq.PUB)
        pub.bind(f"tcp://127.0.0.1:{self._publish_base + rank}")
        self._sockets.append(pub)
        self._sequence.append(itertools.count())
        self._buffers.append([])
        router = self._context.socket(zmq.ROUTER)
        router.bind(f"tcp://127.0.0.1:{self._replay_base + rank}")

        def on_replay(frames: list[bytes]) -> None:
            client, _, start = frames
            for seq, payload in self._buffers[rank]:
                if seq >= int.from_bytes(start, "big"):
                    reader.send([client, b"", b"kv", seq.to_bytes(8, "big"), payload])
            reader.send([client, b"", b"kv", END_OF_REPLAY, b""])

        reader = SocketReader(asyncio.get_running_loop(), router, on_replay)
        self._replays.append(reader)

    def store(self, blocks: Sequence[int], rank: int = 0, parent: int | None = None) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": list(blocks),
            "parent_block_hash": parent,
            "token_ids": [7] * (PAGE * len(blocks)),
            "block_size": PAGE,
            "lora_id": None,
            "medium": "GPU",
        }
        self._publish(event, rank)

    def remove(self, blocks: Sequence[int], rank: int = 0) -> None:
        event = {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"}
        self._publish(event, rank)

    def _publish(self, event: dict[str, Any], rank: int) -> None:
        seq = next(self._sequence[rank])
        payload = msgspec.msgpack.encode([time.time(), [event], rank])
        self._sockets[rank].send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
        self._buffers[rank].append((seq, payload))

    async def start(self) -> None:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            """``decide_request_auth`` of SGLang, which comes before it looks at the path."""
            key, given = self.info.get("api_key"), request.headers.get("authorization")
            is_open = request.path.startswith(("/health", "/ready", "/metrics"))
            if key and not is_open and given != f"Bearer {key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            return await handler(request)

        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[guard])
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            app.router.add_post(path, self._serve)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.starts += 1

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
        rid = str(seen.fields.get("rid"))
        self.running.add(rid)
        try:
            response = await answer(self, request, seen)
            seen.finished = True
            return response
        except (asyncio.CancelledError, ConnectionError):
            seen.disconnected = True
            raise
        finally:
            self.running.discard(rid)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        self.abort_event(rid).set()
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=self.ready)

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({**self.info, "startup_time": {"load": float(self.starts)}})

    async def _other(self, request: web.Request) -> web.Response:
        """Everything that is not about routing, by name."""
        body = await request.read()
        path = request.path
        if path == "/vertumnus/pool":
            return web.json_response({"detail": "Not Found"}, status=404)
        self.asked.append(f"{request.method} {path}")
        match path:
            case "/health" | "/health_generate":
                return web.Response()
            case "/flush_cache":
                return web.Response(text="Cache flushed.\n")
            case "/metrics":
                return web.Response(
                    text="# TYPE sglang:num_running_reqs gauge\n"
                    'sglang:num_running_reqs{model_name="fake-model"} 0.0\n'
                )
            case "/model_info" | "/get_model_info":
                return web.json_response({"model_path": MODEL, "is_generation": True})
            case "/v1/models":
                card = {"id": MODEL, "object": "model", "max_model_len": 32_768}
                return web.json_response({"object": "list", "data": [card]})
            case "/get_load":
                return web.json_response(
                    [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 17}]
                )
            case "/v1/loads":
                return web.json_response({"loads": [{"dp_rank": 0, "num_total_tokens": 17}]})
            case "/v1/embeddings":
                return web.json_response({"object": "list", "data": [], "model": MODEL})
            case "/v1/rerank" | "/rerank":
                return web.json_response([{"score": 1.0, "document": "d", "index": 0}])
            case "/v1/classify":
                return web.json_response({"id": "classify-1", "data": []})
            case "/v1/responses":
                return web.json_response({"id": "resp_1", "object": "response", "output": []})
            case "/v1/tokenize" | "/tokenize":
                return web.json_response({"tokens": [1, 2], "count": 2, "max_model_len": 32_768})
            case "/v1/detokenize" | "/detokenize":
                return web.json_response({"text": "hello"})
            case "/v1/score" | "/echo":
                if self.other is not None:
                    await self.other.wait()
                said = {"method": request.method, "query": request.url.raw_query_string}
                return web.json_response({**said, "body": body.decode()}, status=self.status)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
