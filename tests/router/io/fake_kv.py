"""The KV service of a pool without an engine: ranks that copy, delete and publish block hashes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from vertumnus_router.protocol import (
    CopyCommand,
    CopyReport,
    KvService,
    ReclaimCommand,
    ReclaimReport,
    SnapshotCommand,
    SnapshotReport,
)

if TYPE_CHECKING:
    from tests.router.io.fake_pool import FakePool, FakeRank

TOKEN_BYTES = 256

Command = CopyCommand | ReclaimCommand | SnapshotCommand
Answer = Callable[["FakeKv", web.Request, Any], Awaitable[web.StreamResponse]]


async def copy(kv: "FakeKv", request: web.Request, command: CopyCommand) -> web.StreamResponse:
    """Store what is lacking. Whether the source has it is not asked."""
    rank = kv.rank(command)
    if rank is None:
        return kv.report(CopyReport(outcome="refused", reason="another life"))
    missing = [block for block in command.blocks if block not in rank.held]
    if missing:
        first = command.blocks.index(missing[0])
        rank.store(missing, command.blocks[first - 1] if first else None)
    size = len(missing) * kv.block_tokens * TOKEN_BYTES
    return kv.report(
        CopyReport(outcome="done", blocks=len(missing), bytes=size, seconds=0.5, transfer_s=0.25)
    )


async def reclaim(
    kv: "FakeKv", request: web.Request, command: ReclaimCommand
) -> web.StreamResponse:
    """Remove, unless the sender does not know the latest."""
    rank = kv.rank(command)
    if rank is None or command.as_of != rank.published:
        return kv.report(ReclaimReport(outcome="refused", reason="stored again since"))
    gone = command.blocks[command.keep :]
    rank.remove(gone)
    return kv.report(ReclaimReport(outcome="done", blocks=len(gone)))


async def snapshot(
    kv: "FakeKv", request: web.Request, command: SnapshotCommand
) -> web.StreamResponse:
    """Publish what is held, one batch a block."""
    rank = kv.rank(command)
    if rank is None:
        return kv.report(SnapshotReport(outcome="refused", reason="another life"))
    held = dict(rank.held)
    for block, parent in held.items():
        rank.store([block], parent)
    return kv.report(SnapshotReport(outcome="done", blocks=len(held)))


def after(event: asyncio.Event, then: Answer) -> Answer:
    """Answer when the test says so."""

    async def answer(kv: "FakeKv", request: web.Request, command: Any) -> web.StreamResponse:
        await event.wait()
        return await then(kv, request, command)

    return answer


def say(status: int, body: Any) -> Answer:
    async def answer(kv: "FakeKv", request: web.Request, command: Any) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


async def hang_up(kv: "FakeKv", request: web.Request, command: Any) -> web.StreamResponse:
    """Close the connection instead of answering."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(60)
    raise AssertionError("the handler should have been cancelled")


class FakeKv:
    """Set ``copy``, ``reclaim`` and ``snapshot`` to other answers; ``commands`` are those that
    came, each with the key that came with it."""

    def __init__(self, pool: "FakePool", service: KvService | None) -> None:
        self.copy: Answer = copy
        self.reclaim: Answer = reclaim
        self.snapshot: Answer = snapshot
        self.commands: list[tuple[Command, str | None]] = []
        self.service = service
        self._pool = pool

    @property
    def block_tokens(self) -> int:
        return self._pool.description.kv_events.block_tokens

    def of(self, kind: type[Command]) -> list[Any]:
        """The commands of one kind, without their keys."""
        return [command for command, _ in self.commands if isinstance(command, kind)]

    def rank(self, command: Command) -> "FakeRank | None":
        rank = self._pool.ranks[command.rank]
        return rank if rank.incarnation == command.incarnation else None

    def add_routes(self, app: web.Application) -> None:
        kinds: dict[str, type[Command]] = {
            "copy": CopyCommand,
            "reclaim": ReclaimCommand,
            "snapshot": SnapshotCommand,
        }
        for name, kind in kinds.items():
            app.router.add_post(f"/vertumnus/kv/{name}", self._handler(name, kind))

    def _handler(
        self, name: str, kind: type[Command]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            command = msgspec.json.decode(await request.read(), type=kind)
            self.commands.append((command, request.headers.get("authorization")))
            answer: Answer = getattr(self, name)
            return await answer(self, request, command)

        return handle

    def report(self, report: CopyReport | ReclaimReport | SnapshotReport) -> web.Response:
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")
