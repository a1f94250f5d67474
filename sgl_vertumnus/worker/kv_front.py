"""The front's part in copies, deletions and snapshots: it passes them on to its ranks."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from vertumnus_patches import engine
from vertumnus_router.protocol import (
    MAX_COPY_S,
    CopyCommand,
    Endpoint,
    KvService,
    ReclaimCommand,
    SnapshotCommand,
)

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.errors import PoolStartError
from sgl_vertumnus.worker.kv_service.messages import (
    Copy,
    Describe,
    Question,
    Reclaim,
    ServiceError,
    Snapshot,
)
from sgl_vertumnus.worker.kv_service.sockets import Peer, keys_of

logger = logging.getLogger(__name__)

#: A rank answers between two of its scheduler's steps, if not during one.
ANSWER_S = 10.0
#: A copy may end late by as much: its lease is released, its slots are given back.
COPY_MARGIN_S = 10.0
#: Threads that wait for ranks.
_THREADS = 16

Command = TypeVar("Command", CopyCommand, ReclaimCommand, SnapshotCommand)


class KvFront:
    """Asks the pool's ranks; ``secret`` is the pool's."""

    def __init__(self, config: PoolConfig, secret: str) -> None:
        self._config = config
        self._keys = keys_of(secret)
        self.service: KvService | None = None

    def start(self) -> None:
        """Ask all ranks once. Raises ``PoolStartError`` when one does not answer."""
        if self._config.device != "cpu":
            logger.info(
                "prefixes are not copied between ranks: that is not proven on %s",
                self._config.device,
            )
            return
        try:
            facts = [self.ask(rank, Describe(), ANSWER_S) for rank in range(self._config.size)]
        except ServiceError as exc:
            raise PoolStartError(f"a rank's KV service does not work: {exc}") from exc
        self.service = KvService(
            endpoint=Endpoint(port_base=self._config.ports.kv_service),
            token_bytes=facts[0].token_bytes,
        )

    def ask(self, rank: int, question: Question, timeout_s: float) -> Any:
        """The rank's answer; blocks. Raises ``ServiceError``."""
        host = "127.0.0.1" if self._config.host == "0.0.0.0" else self._config.host
        with Peer(f"{host}:{self._config.ports.kv_service + rank}", self._keys) as peer:
            return peer.ask(question, timeout_s)

    def read(self, body: bytes, kind: type[Command]) -> Command:
        """The command in a request's body. Raises ``ValueError`` when it is none."""
        command = msgspec.json.decode(body, type=kind)
        if not 0 <= command.rank < self._config.size:
            raise ValueError(f"rank {command.rank} is not in a pool of {self._config.size}")
        return command

    def copy(self, command: CopyCommand) -> Any:
        if not 0 < command.timeout_s <= MAX_COPY_S:
            raise ValueError(f"timeout_s {command.timeout_s}: up to {MAX_COPY_S:.0f}")
        return self.ask(command.rank, Copy(command=command), command.timeout_s + COPY_MARGIN_S)

    def reclaim(self, command: ReclaimCommand) -> Any:
        return self.ask(command.rank, Reclaim(command=command), ANSWER_S)

    def snapshot(self, command: SnapshotCommand) -> Any:
        return self.ask(command.rank, Snapshot(command=command), ANSWER_S)


def add_kv_routes(app: Any, front: KvFront) -> None:
    """Serve ``/vertumnus/kv/copy``, ``reclaim`` and ``snapshot``: 503 until the pool serves, where
    there is no such service, and when a rank does not answer."""
    from fastapi import Request, Response

    waiting = ThreadPoolExecutor(_THREADS, "vertumnus-kv")

    def answer(status: int, content: Any) -> Response:
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    async def passed_on(
        body: bytes, kind: type[Command], carry_out: Callable[[Command], Any]
    ) -> Response:
        if front.service is None:
            return answer(503, {"error": "the pool is starting, or does not copy prefixes"})
        loop = asyncio.get_running_loop()
        try:
            command = front.read(body, kind)
            return answer(200, await loop.run_in_executor(waiting, carry_out, command))
        except (ValueError, OverflowError) as exc:  # a hash has 64 bits
            return answer(400, {"error": str(exc)})
        except ServiceError as exc:
            return answer(503, {"error": str(exc)})

    @app.post("/vertumnus/kv/copy")  # type: ignore[untyped-decorator]
    @engine.admin_endpoint
    async def copy(request: Request) -> Response:
        return await passed_on(await request.body(), CopyCommand, front.copy)

    @app.post("/vertumnus/kv/reclaim")  # type: ignore[untyped-decorator]
    @engine.admin_endpoint
    async def reclaim(request: Request) -> Response:
        return await passed_on(await request.body(), ReclaimCommand, front.reclaim)

    @app.post("/vertumnus/kv/snapshot")  # type: ignore[untyped-decorator]
    @engine.admin_endpoint
    async def snapshot(request: Request) -> Response:
        return await passed_on(await request.body(), SnapshotCommand, front.snapshot)
