"""One rank's KV service: what it answers to other ranks and to the front."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from vertumnus_patches import cached_blocks
from vertumnus_patches.block_events import BlockEvent
from vertumnus_router.protocol import (
    CopyCommand,
    CopyReport,
    ReclaimCommand,
    ReclaimReport,
    SnapshotCommand,
    SnapshotReport,
)

from sgl_vertumnus.worker.kv_service.baton import Baton, BatonTimeout
from sgl_vertumnus.worker.kv_service.exports import BATON_S, Exports
from sgl_vertumnus.worker.kv_service.imports import MAX_COPIES, Imports
from sgl_vertumnus.worker.kv_service.index import BlockIndex, NotHeld
from sgl_vertumnus.worker.kv_service.messages import (
    Copy,
    Describe,
    Facts,
    Malformed,
    OpenSession,
    Pin,
    Question,
    Reclaim,
    Release,
    Released,
    ServiceError,
    Session,
    Snapshot,
    decode_question,
    encode_answer,
    encode_error,
)
from sgl_vertumnus.worker.kv_service.mooncake import MooncakeEngine
from sgl_vertumnus.worker.kv_service.sockets import Server, keys_of
from sgl_vertumnus.worker.kv_service.transports import ReadError, be_readable

logger = logging.getLogger(__name__)

#: Blocks in a batch of a snapshot; others get in between two of them.
SNAPSHOT_BLOCKS = 1024
#: Enough that copies that wait for their turn leave some to answer other ranks.
_THREADS = MAX_COPIES + 4


class KvService:
    """Answers on ``address``, "host:port", from now on; ``scheduler`` gives None while there is
    none yet.

    ``on_block_event`` and ``on_events_published`` are for whoever may touch the tree.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        incarnation: str,
        secret: str,
        baton: Baton,
        scheduler: Callable[[], Any],
        force_mooncake: bool = False,
    ) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._baton = baton
        self._scheduler = scheduler
        self._index = BlockIndex()
        self._engine = MooncakeEngine()
        self._has_complained = False
        keys = keys_of(secret)
        self._exports = Exports(baton, self._index)
        self._imports = Imports(
            baton, self._index, keys, self._engine, force_mooncake=force_mooncake
        )
        be_readable()
        self._server = Server(address, keys, self.handle, _THREADS)

    def close(self) -> None:
        self._server.close()

    def on_block_event(self, event: BlockEvent) -> None:
        self._index.note(event)

    def on_events_published(self) -> None:
        self._index.published()

    def handle(self, frames: list[bytes]) -> list[bytes]:
        """The answer to a question, as frames; never raises."""
        try:
            return encode_answer(self._answer(decode_question(frames)))
        except Malformed as exc:
            if not self._has_complained:
                self._has_complained = True
                logger.warning("KV service of rank %d: %s; others are not logged", self._rank, exc)
            return encode_error(str(exc))
        except (ServiceError, BatonTimeout, ReadError) as exc:
            return encode_error(str(exc))
        except Exception as exc:
            logger.exception("KV service of rank %d", self._rank)
            return encode_error(f"rank {self._rank} failed: {exc!r}")

    def _answer(self, question: Question) -> msgspec.Struct:
        scheduler = self._scheduler()
        if scheduler is None:
            raise ServiceError(f"rank {self._rank} is starting")
        match question:
            case Pin():
                if question.incarnation != self._incarnation:
                    raise ServiceError(self._is_another())
                return self._exports.pin(scheduler, question)
            case Release(lease=lease):
                return Released(self._exports.release(scheduler, lease))
            case OpenSession(host=host):
                return self._open_session(scheduler, host)
            case Describe():
                return Facts(cached_blocks.memory(scheduler).token_bytes)
            case Copy(command=command):
                return self.copy(scheduler, command)
            case Reclaim(command=command):
                return self.reclaim(scheduler, command)
            case Snapshot(command=command):
                return self.snapshot(scheduler, command)

    def copy(self, scheduler: Any, command: CopyCommand) -> CopyReport:
        if (reason := self._refusal(command)) is not None:
            return CopyReport(outcome="refused", reason=reason)
        report = self._imports.copy(scheduler, command)
        told = report.blocks or report.outcome != "done"
        logger.log(
            logging.INFO if told else logging.DEBUG,
            "rank %d: copy from %s %s, %d blocks in %.3f s%s",
            self._rank,
            command.source,
            report.outcome,
            report.blocks,
            report.seconds,
            f": {report.reason}" if report.reason else "",
        )
        return report

    def reclaim(self, scheduler: Any, command: ReclaimCommand) -> ReclaimReport:
        """Delete the blocks, if they are what the sender takes them for and nobody uses them."""
        reason = self._refusal(command)
        if not 0 <= command.keep < len(command.blocks):
            reason = "nothing is to be deleted"
        if reason is None:
            with self._baton.held(BATON_S):
                cached_blocks.publish(scheduler)
                reason = self._delete(scheduler, command)
                cached_blocks.publish(scheduler)
        if reason is not None:
            return ReclaimReport(outcome="refused", reason=reason)
        return ReclaimReport(outcome="done", blocks=len(command.blocks) - command.keep)

    def _delete(self, scheduler: Any, command: ReclaimCommand) -> str | None:
        try:
            chain = self._index.chain(command.blocks, since=command.keep)
        except NotHeld as exc:
            return str(exc)
        if chain.newest > command.as_of:
            return "it was stored again since"
        keep = command.keep * cached_blocks.memory(scheduler).page_tokens
        return cached_blocks.delete(scheduler, chain.tokens, chain.namespace, keep)

    def snapshot(self, scheduler: Any, command: SnapshotCommand) -> SnapshotReport:
        """Publish every block again."""
        if (reason := self._refusal(command)) is not None:
            return SnapshotReport(outcome="refused", reason=reason)
        with self._baton.held(BATON_S):
            cached_blocks.publish(scheduler)
            hashes = self._index.hashes()
        told = 0
        for at in range(0, len(hashes), SNAPSHOT_BLOCKS):
            with self._baton.held(BATON_S):
                # What has happened since must come before what is told now.
                cached_blocks.publish(scheduler)
                # A block that has gone took its children along; one that came was told.
                runs = self._index.runs(hashes[at : at + SNAPSHOT_BLOCKS])
                if runs:
                    cached_blocks.publish_again(scheduler, runs)
                    self._index.published_again()
            told += sum(len(run.hashes) for run in runs)
        return SnapshotReport(outcome="done", blocks=told)

    def _open_session(self, scheduler: Any, host: str) -> Session:
        buffers = cached_blocks.memory(scheduler).buffers
        memory = [(buffer.address, buffer.slot_bytes * buffer.slots) for buffer in buffers]
        return Session(self._engine.share(host, memory))

    def _refusal(self, command: CopyCommand | ReclaimCommand | SnapshotCommand) -> str | None:
        if command.rank != self._rank or command.incarnation != self._incarnation:
            return self._is_another()
        return None

    def _is_another(self) -> str:
        return f"this is rank {self._rank} in its life {self._incarnation}"
