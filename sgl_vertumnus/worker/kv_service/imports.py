"""What this rank fetches from others."""

from __future__ import annotations

import socket
import threading
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from vertumnus_patches import cached_blocks
from vertumnus_patches.block_events import Namespace
from vertumnus_patches.loans import Loan, loans_of
from vertumnus_router.clock import WallClock
from vertumnus_router.protocol import CopyCommand, CopyReport

from sgl_vertumnus.worker.kv_service.baton import Baton, BatonTimeout
from sgl_vertumnus.worker.kv_service.exports import BATON_S
from sgl_vertumnus.worker.kv_service.index import BlockIndex, NotHeld
from sgl_vertumnus.worker.kv_service.messages import (
    OpenSession,
    Pin,
    Pinned,
    Release,
    ServiceError,
)
from sgl_vertumnus.worker.kv_service.mooncake import MooncakeEngine
from sgl_vertumnus.worker.kv_service.pieces import Slice, slices
from sgl_vertumnus.worker.kv_service.sockets import Keys, Peer
from sgl_vertumnus.worker.kv_service.transports import LocalReader, Reader, ReadError, machine

#: Copies that may wait for their turn, the one under way included.
MAX_COPIES = 8
#: How long the source may take to say whether the lease has held.
_RELEASE_S = BATON_S + 1.0
#: A lease outlasts the copy, so that it does.
_LEASE_MARGIN_S = _RELEASE_S + 1.0
_PATIENCE_S = 3600.0


class Refused(Exception):
    """Nothing was moved; the message says why."""


class Failed(Exception):
    """What was moved is not used; the message says why."""


@dataclass(slots=True)
class _Copy:
    """One copy: what is held here already is ``base`` blocks, which ``loan`` keeps in place."""

    command: CopyCommand
    deadline_s: float
    base: int
    tokens: array[int]
    namespace: Namespace
    loan: Loan


class Imports:
    """Takes prefixes over from other ranks, one at a time; its callers' threads do the work.

    ``force_mooncake`` leaves process_vm_readv unused where it would do.
    """

    def __init__(
        self,
        baton: Baton,
        index: BlockIndex,
        keys: Keys,
        engine: MooncakeEngine,
        *,
        force_mooncake: bool,
    ) -> None:
        self._baton = baton
        self._index = index
        self._keys = keys
        self._engine = engine
        self._force_mooncake = force_mooncake
        self._clock = WallClock()
        self._room = threading.BoundedSemaphore(MAX_COPIES)
        self._turn = threading.Lock()

    def copy(self, scheduler: Any, command: CopyCommand) -> CopyReport:
        """Fetch what is missing of the command's blocks; blocks until that has ended."""
        began_s = self._clock.now()
        try:
            done = self._in_turn(scheduler, command, began_s + command.timeout_s)
        except (Refused, BatonTimeout) as exc:
            return CopyReport(
                outcome="refused", reason=str(exc), seconds=self._clock.now() - began_s
            )
        except Failed as exc:
            return CopyReport(
                outcome="failed", reason=str(exc), seconds=self._clock.now() - began_s
            )
        blocks, count, transfer_s = done
        return CopyReport(
            outcome="done",
            blocks=blocks,
            bytes=count,
            seconds=self._clock.now() - began_s,
            transfer_s=transfer_s,
        )

    def _in_turn(
        self, scheduler: Any, command: CopyCommand, deadline_s: float
    ) -> tuple[int, int, float]:
        if not self._room.acquire(blocking=False):
            raise Refused("busy: too many copies wait for this rank")
        try:
            if not self._turn.acquire(timeout=max(0.0, deadline_s - self._clock.now())):
                raise Refused("other copies took all the time there was")
            try:
                return self._carry_out(scheduler, command, deadline_s)
            finally:
                self._turn.release()
        finally:
            self._room.release()

    def _carry_out(
        self, scheduler: Any, command: CopyCommand, deadline_s: float
    ) -> tuple[int, int, float]:
        with self._baton.held(BATON_S):
            copy = self._begin(scheduler, command, deadline_s)
        if copy is None:
            return 0, 0, 0.0
        try:
            with Peer(command.source, self._keys) as source:
                return self._fetch(scheduler, copy, source)
        except ServiceError as exc:
            raise Refused(str(exc)) from exc
        finally:
            with self._baton.held(_PATIENCE_S):
                loans_of(scheduler).end(copy.loan)
                cached_blocks.publish(scheduler)

    def _begin(self, scheduler: Any, command: CopyCommand, deadline_s: float) -> _Copy | None:
        """Keep in place what is held already; None when that is all of it."""
        cached_blocks.publish(scheduler)
        base = self._index.held(command.blocks)
        if base == len(command.blocks):
            return None
        try:
            chain = self._index.chain(command.blocks[:base])
        except NotHeld as exc:
            raise Refused(str(exc)) from exc
        loan = cached_blocks.lend(scheduler, chain.tokens, chain.namespace)
        if loan is None:
            raise Refused("what the copy was to follow has just gone")
        return _Copy(command, deadline_s, base, chain.tokens, chain.namespace, loan)

    def _fetch(self, scheduler: Any, copy: _Copy, source: Peer) -> tuple[int, int, float]:
        command, memory = copy.command, cached_blocks.memory(scheduler)
        pinned = source.ask(
            Pin(
                incarnation=command.source_incarnation,
                blocks=command.blocks,
                start=copy.base,
                lease_s=self._left_s(copy) + _LEASE_MARGIN_S,
                kind=memory.kind,
            ),
            self._left_s(copy),
        )
        was_released = False
        try:
            self._check(copy, pinned, memory)
            reader = self._reader(copy, pinned, source)
            missing = (len(command.blocks) - copy.base) * memory.page_tokens
            with self._baton.held(BATON_S):
                if not copy.loan.is_held or not cached_blocks.hold(scheduler, copy.loan, missing):
                    raise Refused("there is no room for it")
            transfer_s = self._read(copy, pinned, memory, reader)
            was_released = True
            try:
                was_held = source.ask(Release(lease=pinned.lease), _RELEASE_S).was_held
            except ServiceError as exc:
                raise Failed(str(exc)) from exc
            if not was_held:
                raise Failed("the source needed the memory for requests")
            return self._store(scheduler, copy, memory, transfer_s)
        finally:
            if not was_released:
                self._let_go(source, pinned)

    def _let_go(self, source: Peer, pinned: Pinned) -> None:
        try:
            source.ask(Release(lease=pinned.lease), _RELEASE_S)
        except ServiceError:
            return  # it is gone, or ends the lease by itself

    def _check(self, copy: _Copy, pinned: Pinned, memory: cached_blocks.Memory) -> None:
        """Take over what the source says of the prefix, if it fits to what is held here."""
        page_bytes = memory.page_tokens * copy.tokens.itemsize
        blocks, base = len(copy.command.blocks), copy.tokens.tobytes()
        namespace = pinned.extra_key, pinned.cache_salt
        if (
            len(pinned.tokens) != blocks * page_bytes
            or len(pinned.pages) != (blocks - copy.base) * np.dtype(np.int64).itemsize
            or len(pinned.buffers) != len(memory.buffers)
            or not pinned.tokens.startswith(base)
            or (base and namespace != copy.namespace)
        ):
            raise Refused("the source means another prefix by these blocks")
        copy.tokens = array("q", pinned.tokens)
        copy.namespace = namespace

    def _reader(self, copy: _Copy, pinned: Pinned, source: Peer) -> Reader:
        if pinned.machine == machine() and not self._force_mooncake:
            return LocalReader(pinned)
        try:
            host = copy.command.source.rpartition(":")[0]
            session = source.ask(OpenSession(host=host), self._left_s(copy))
            return self._engine.reader(_host_towards(host), session.address)
        except ReadError as exc:
            raise Refused(str(exc)) from exc

    def _read(
        self, copy: _Copy, pinned: Pinned, memory: cached_blocks.Memory, reader: Reader
    ) -> float:
        """Bring the bytes into the slots on loan; how long that took."""
        began_s = self._clock.now()
        slots = copy.loan.slots
        if slots is None:
            raise Failed("there are no slots to write to")
        todo = slices(
            pinned.buffers,
            memory.buffers,
            np.frombuffer(pinned.pages, dtype=np.int64),
            slots[:: memory.page_tokens].numpy() // memory.page_tokens,
            memory.page_tokens,
        )
        for part in todo:
            if (left_s := copy.deadline_s - self._clock.now()) <= 0:
                raise Failed("it took too long")
            try:
                reader.fetch(part, left_s)
                self._put(copy.loan, part, reader)
            except ReadError as exc:
                raise Failed(str(exc)) from exc
            self._clock.pause(0)  # requests first: they share the cores
        return self._clock.now() - began_s

    def _put(self, loan: Loan, part: Slice, reader: Reader) -> None:
        with loan.use:
            if not loan.is_held:
                raise Failed("the memory was needed for requests")
            reader.put(part)

    def _store(
        self, scheduler: Any, copy: _Copy, memory: cached_blocks.Memory, transfer_s: float
    ) -> tuple[int, int, float]:
        with self._baton.held(_PATIENCE_S):
            if not copy.loan.is_held:
                raise Failed("the memory was needed for requests")
            cached_blocks.store(scheduler, copy.loan, copy.tokens, copy.namespace)
        blocks = len(copy.command.blocks) - copy.base
        return blocks, blocks * memory.page_tokens * memory.token_bytes, transfer_s

    def _left_s(self, copy: _Copy) -> float:
        return max(0.001, copy.deadline_s - self._clock.now())


def _host_towards(host: str) -> str:
    """The address of this machine from which ``host`` is reached; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as exc:
            raise Refused(f"{host} cannot be reached: {exc}") from exc
        return str(probe.getsockname()[0])
