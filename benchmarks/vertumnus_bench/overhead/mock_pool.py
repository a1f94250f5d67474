"""A pool whose front is ``mock_worker``: what the router wants of its ranks is here.

Every rank is alive and holds the blocks that it is told to hold. Reports of single prefills are
not sent, so the first byte of an answer is what ends a prefill for the router.
"""

import asyncio
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
import zmq
from vertumnus_router.clock import WallClock
from vertumnus_router.io.sockets import SocketReader
from vertumnus_router.lattice import Block, parse_composition
from vertumnus_router.protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    BlockState,
    Endpoint,
    KvEvents,
    ModelInfo,
    PoolComposition,
    PoolDescription,
    RankState,
    encode_report,
)

from sgl_vertumnus.ports import free_range
from vertumnus_bench.overhead.child import child
from vertumnus_bench.overhead.programs import program

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 128 * 1024
DEGREES = (1, 2, 4)
COMPOSITION = "2x1,1x2"
_RANKS = 4
_FIRST_PORT = 21000
MANIFEST = "mock"
_TOPIC = "kv-events"
_LIFE = "life"
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class MockPool:
    """``port`` is the front's."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stream(self, *, events: int, gap_us: int) -> None:
        """How streams are answered from now on."""
        order = f"{self.url}/mock/{gap_us}/{events}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(urllib.request.Request(order, b"{}"), timeout=10).close()


@contextmanager
def mock_pool(folder: Path, tokenizer: Path, blocks: Sequence[int] = ()) -> Iterator[MockPool]:
    """A pool of four ranks as 2x1,1x2, of which ``blocks``, a chain from the root, are cached in
    the first."""
    base = free_range("127.0.0.1", 3 * _RANKS + 2, start=_FIRST_PORT)
    port = base + 3 * _RANKS + 1
    description = PoolDescription(
        version=PROTOCOL_VERSION,
        pool_id="mock",
        sglang_version="0.5.23",
        pool_size=_RANKS,
        degrees=DEGREES,
        model=ModelInfo(
            served_name="mock",
            model_path="/mock",
            tokenizer_path=str(tokenizer),
            context_tokens=CONTEXT_TOKENS,
            # No request has to wait for memory: the queue is not what is measured here.
            kv_capacity_tokens=1000 * CONTEXT_TOKENS,
            chunk_tokens=8192,
        ),
        kv_events=KvEvents(
            publish=Endpoint(port_base=base),
            replay=Endpoint(port_base=base + _RANKS),
            topic=_TOPIC,
            block_tokens=BLOCK_TOKENS,
        ),
        reports=Endpoint(port_base=base + 2 * _RANKS),
        manifest=MANIFEST,
    )
    command = [str(program("mock_worker")), str(port)]
    for name, content in (("pool", description), ("composition", _composition())):
        path = folder / f"{name}.json"
        path.write_bytes(msgspec.json.encode(content))
        command.append(str(path))
    with (
        _ranks(description, blocks),
        child(command, port, "/vertumnus/pool", folder / "mock_worker.log"),
    ):
        yield MockPool(port)


@contextmanager
def _ranks(pool: PoolDescription, blocks: Sequence[int]) -> Iterator[None]:
    """The ranks' sockets, served by a thread."""
    ready, stop = threading.Event(), threading.Event()

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(pool, blocks, ready, stop))

    thread = threading.Thread(target=serve, name="mock ranks", daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _serve(
    pool: PoolDescription, blocks: Sequence[int], ready: threading.Event, stop: threading.Event
) -> None:
    loop, context, clock = asyncio.get_running_loop(), zmq.Context(), WallClock()
    serving = parse_composition(COMPOSITION, _RANKS, DEGREES)
    readers, reports = [], []
    for index in range(_RANKS):
        events, report = context.socket(zmq.PUB), context.socket(zmq.PUB)
        replay = context.socket(zmq.ROUTER)
        events.bind(f"tcp://127.0.0.1:{pool.kv_events.publish.port_base + index}")
        replay.bind(f"tcp://127.0.0.1:{pool.kv_events.replay.port_base + index}")
        report.bind(f"tcp://127.0.0.1:{pool.reports.port_base + index}")
        batch = msgspec.msgpack.encode([time.time(), _events(blocks if index == 0 else ()), index])
        readers.append(_replayer(loop, replay, batch))
        reports.append(report)
    ready.set()
    try:
        while not stop.is_set():
            for index, report in enumerate(reports):
                report.send_multipart(encode_report(_state(index, serving)))
            # Twice as often as a real rank, as it counts as lost after a few missed beats.
            await clock.sleep(HEARTBEAT_S / 2)
    finally:
        for reader in readers:
            reader.close()
        context.destroy(linger=0)


def _replayer(
    loop: asyncio.AbstractEventLoop, socket: "zmq.Socket[bytes]", batch: bytes
) -> SocketReader:
    """Answers a request for batch 0 and all later ones: there is only this one."""

    def on_replay(frames: list[bytes]) -> None:
        client, _, start = frames
        if int.from_bytes(start, "big") == 0:
            reader.send([client, b"", _TOPIC.encode(), bytes(8), batch])
        reader.send([client, b"", b"", _END_OF_REPLAY, b""])

    reader = SocketReader(loop, socket, on_replay)
    return reader


def _events(blocks: Sequence[int]) -> list[dict[str, object]]:
    stored: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
    }
    return [{"type": "AllBlocksCleared"}, *([stored] if blocks else [])]


def _composition() -> PoolComposition:
    return PoolComposition(
        epoch=1,
        composition=COMPOSITION,
        blocks=tuple(
            BlockState(first=block.first, degree=block.degree, state="serving")
            for block in parse_composition(COMPOSITION, _RANKS, DEGREES)
        ),
        moves=(),
    )


def _state(index: int, serving: Sequence[Block]) -> RankState:
    block = next(block for block in serving if index in block)
    return RankState(
        version=PROTOCOL_VERSION,
        pool_id="mock",
        rank=index,
        incarnation=_LIFE,
        epoch=1,
        first=block.first,
        degree=block.degree,
        manifest=MANIFEST,
    )
