"""A pool without an engine whose prefills take what a known model says.

Its front answers at once, and its leader reports the model's seconds; with ``real_time`` it takes
them, one prompt after the other.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import msgspec
import zmq
from vertumnus_router.lattice import Block, format_composition, parse_composition
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    BlockState,
    Endpoint,
    KvEvents,
    ModelInfo,
    MoveReport,
    PoolComposition,
    PoolDescription,
    PrefillDone,
    PrefillFinished,
    RankState,
    Report,
    encode_report,
)

from sgl_vertumnus.ports import free_range

BLOCK_TOKENS = 16
DEGREES = (1, 2, 4)
KV_CAPACITY_TOKENS = 20000
#: E_C(R, P): d_C, a_C (0 at degree 1, where the split of the slope is known), b, c, α.
D_S = {1: 0.01, 2: 0.02, 4: 0.04}
A_S = {1: 0.0, 2: 1e-5, 4: 2e-5}
B_S, C_S, ALPHA_S = 1e-6, 2e-4, 4e-8


def true_seconds(degree: int, uncached: int, cached: int) -> float:
    pairs = uncached * cached + uncached * (uncached + 1) / 2
    shared = (C_S * uncached + ALPHA_S * pairs) / degree
    return D_S[degree] + A_S[degree] * uncached + B_S * cached + shared


class ModelPool:
    """Of four ranks. ``before_answer(pool, number)`` may do what it likes, or raise."""

    def __init__(self) -> None:
        self.blocks: tuple[Block, ...] = parse_composition("2x1,1x2", 4, DEGREES)
        self.epoch = 1
        self.composed: list[str] = []
        self.running = 0
        self.prompts = 0
        self.noise = Random(1)
        self.spread = 0.02
        self.real_time = False
        self.reports = True
        self.before_answer: Callable[[ModelPool, int], None] = lambda pool, number: None
        self.shape = "a model"
        self.most_cached = 10**6
        self.busy_flushes = 0
        self.stored_tokens = 0
        self.most_stored_tokens = 0
        self._stored: set[int] = set()
        self._lock = threading.Lock()
        self._one_by_one = threading.Lock()
        self._context = zmq.Context()
        self._base = free_range("127.0.0.1", 4, start=26000)
        self._publishers = [self._context.socket(zmq.PUB) for _ in range(4)]
        for rank, publisher in enumerate(self._publishers):
            publisher.bind(f"tcp://127.0.0.1:{self._base + rank}")
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat)
        handler = type("Handler", (_Handler,), {"pool": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def composition(self) -> str:
        return format_composition(self.blocks)

    @contextmanager
    def serving(self) -> Iterator["ModelPool"]:
        self._beats.start()
        self._serving.start()
        try:
            yield self
        finally:
            self._over.set()
            self._beats.join()
            self._server.shutdown()
            self._serving.join()
            self._server.server_close()
            self._context.destroy(linger=0)

    def report(self, report: Report) -> None:
        with self._lock:
            self._publishers[report.rank].send_multipart(encode_report(report))

    def finish(self, rid: str, tokens: int, cached: int, compute_s: float) -> None:
        done = PrefillDone(rid=rid, input_tokens=tokens, cached_tokens=cached, compute_s=compute_s)
        self.report(PrefillFinished(rank=0, incarnation="life", epoch=1, done=(done,)))

    def describe(self) -> PoolDescription:
        nowhere = Endpoint(port_base=1)
        return PoolDescription(
            version=PROTOCOL_VERSION,
            pool_id="model-pool",
            sglang_version="0.5.23",
            pool_size=4,
            degrees=DEGREES,
            model=ModelInfo(
                served_name="m",
                model_path="/m",
                tokenizer_path="/m",
                context_tokens=8192,
                kv_capacity_tokens=KV_CAPACITY_TOKENS,
                chunk_tokens=2048,
                shape=self.shape,
            ),
            kv_events=KvEvents(
                publish=nowhere, replay=nowhere, topic="t", block_tokens=BLOCK_TOKENS
            ),
            reports=Endpoint(port_base=self._base),
            manifest="same",
            device="a device",
        )

    def state(self) -> PoolComposition:
        blocks = (BlockState(first=b.first, degree=b.degree, state="serving") for b in self.blocks)
        return PoolComposition(epoch=self.epoch, composition=self.composition, blocks=tuple(blocks))

    def regroup(self, body: Any) -> MoveReport:
        assert body["epoch"] == self.epoch
        before = self.composition
        self.blocks = parse_composition(body["composition"], 4, DEGREES)
        self.epoch += 1
        self.composed.append(self.composition)
        return MoveReport(
            epoch=self.epoch, before=before, after=self.composition, outcome="committed"
        )

    def generate(self, body: Any) -> Any:
        assert body["sampling_params"]["max_new_tokens"] == 1 and body["routed_dp_rank"] == 0
        ids = body["input_ids"]
        with self._lock:
            self.prompts += 1
            number = self.prompts
        self.before_answer(self, number)
        with self._one_by_one:
            cached = self._cached(ids)
            seconds = true_seconds(self.blocks[0].degree, len(ids) - cached, cached)
            seconds *= 1 + self.noise.uniform(-self.spread, self.spread)
            if self.real_time:
                time.sleep(seconds)
            self._store(ids)
        self.finish(body["rid"], len(ids), cached, seconds)
        return {"meta_info": {"cached_tokens": cached, "id": body["rid"]}}

    def flush(self) -> None:
        if self.busy_flushes:
            self.busy_flushes -= 1
            raise RuntimeError("pending requests")
        self._stored.clear()
        self.stored_tokens = 0

    def _cached(self, ids: list[int]) -> int:
        if len(ids) > 2 * self.most_cached:
            return 0
        found = 0
        for page in _pages(ids[:-1]):  # the last token is always computed
            if page not in self._stored:
                break
            found += 1
        return found * BLOCK_TOKENS

    def _store(self, ids: list[int]) -> None:
        self.stored_tokens += len(ids)
        self.most_stored_tokens = max(self.most_stored_tokens, self.stored_tokens)
        self._stored.update(_pages(ids))

    def _beat(self) -> None:
        while not self._over.wait(0.05):
            if self.reports:
                self.report(
                    RankState(
                        version=PROTOCOL_VERSION,
                        pool_id="model-pool",
                        rank=0,
                        incarnation="life",
                        epoch=1,
                        first=0,
                        degree=1,
                        manifest="same",
                    )
                )


def _pages(ids: list[int]) -> Iterator[int]:
    """Chained hashes of the full pages."""
    chain = 0
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        chain = hash((chain, tuple(ids[end - BLOCK_TOKENS : end])))
        yield chain


class _Handler(BaseHTTPRequestHandler):
    pool: ModelPool

    def do_GET(self) -> None:
        if self.path == "/vertumnus/pool":
            self._answer(msgspec.json.encode(self.pool.describe()))
        elif self.path == "/vertumnus/composition":
            self._answer(msgspec.json.encode(self.pool.state()))
        elif self.path.startswith("/v1/loads"):
            load = {"num_running_reqs": self.pool.running, "num_waiting_reqs": 0}
            self._answer(json.dumps({"loads": [load]}).encode())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "null")
        try:
            if self.path == "/generate":
                self._answer(json.dumps(self.pool.generate(body)).encode())
            elif self.path == "/vertumnus/regroup":
                self._answer(msgspec.json.encode(self.pool.regroup(body)))
            elif self.path.startswith("/flush_cache"):
                self.pool.flush()
                self._answer(b"Cache flushed.")
            elif self.path == "/abort_request":
                self._answer(b"")
            else:
                self.send_error(404)
        except RuntimeError as exc:
            self.send_error(500, str(exc))

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
