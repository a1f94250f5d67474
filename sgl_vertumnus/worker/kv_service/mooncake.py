"""Bytes from a rank of another machine, by Mooncake's transfer engine."""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vertumnus_router.clock import WallClock

from sgl_vertumnus.worker.kv_service.pieces import SLICE_BYTES, Slice
from sgl_vertumnus.worker.kv_service.transports import ReadError

#: First and longest pause between two looks at a transfer.
_PAUSES_S = (0.0002, 0.004)
_RDMA_DEVICES = Path("/sys/class/infiniband")


class MooncakeEngine:
    """Of one rank: what others read its KV with, and what it reads theirs with. Started on first
    use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Any = None
        self._address = ""
        self._shared: set[int] = set()
        self._buffers: Buffers | None = None

    def share(self, host: str, buffers: Sequence[tuple[int, int]]) -> str:
        """Let others read these (address, bytes) of memory; "host:port" for them to reach it.

        Raises:
            ReadError: where there is no Mooncake, or it does not start.
        """
        engine = self._started(host)
        with self._lock:
            for address, length in buffers:
                if address not in self._shared:
                    if engine.register_memory(address, length):
                        raise ReadError("Mooncake cannot register the KV cache")
                    self._shared.add(address)
        return self._address

    def reader(self, host: str, session: str) -> "MooncakeReader":
        """Reads what the rank at ``session`` shares, one reader at a time. Raises ``ReadError``."""
        engine = self._started(host)
        if self._buffers is None:
            self._buffers = Buffers(engine)
        return MooncakeReader(engine, session, self._buffers)

    def _started(self, host: str) -> Any:
        with self._lock:
            if self._engine is None:
                try:
                    from mooncake.engine import TransferEngine
                except ImportError as exc:
                    raise ReadError(
                        f"copies between machines need Mooncake ({exc}): "
                        "pip install 'sgl-vertumnus[pd]' there and here"
                    ) from exc
                engine = TransferEngine()
                has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
                if engine.initialize(host, "P2PHANDSHAKE", "rdma" if has_rdma else "tcp", ""):
                    raise ReadError(f"Mooncake does not start on {host}; its log says why")
                self._engine = engine
                self._address = f"{host}:{engine.get_rpc_port()}"
            return self._engine


class MooncakeReader:
    """Reads by way of a buffer of its own; a transfer that is given up may still write to it."""

    def __init__(self, engine: Any, session: str, buffers: "Buffers") -> None:
        self._engine = engine
        self._session = session
        self._buffers = buffers
        self._clock = WallClock()

    def fetch(self, piece: Slice, timeout_s: float) -> None:
        deadline = self._clock.now() + timeout_s
        at, failed = self._buffers.address(), False
        pending: list[int] = []
        for source, length in zip(piece.sources.tolist(), piece.lengths.tolist(), strict=True):
            # One transfer for each: the status of a batch is that of its first piece only.
            transfer = self._engine.batch_transfer_async_read(
                self._session, [at], [source], [length]
            )
            if transfer == 0:
                failed = True
                break
            pending.append(transfer)
            at += length
        pause_s = _PAUSES_S[0]
        while pending:
            if self._clock.now() >= deadline:
                self._buffers.abandon(pending)
                raise ReadError("the source's bytes did not come in time")
            self._clock.pause(pause_s)  # Mooncake itself would spin
            pause_s = min(2 * pause_s, _PAUSES_S[1])
            left = []
            for transfer in pending:
                status = self._engine.transfer_check_status(transfer)
                if status == 0:
                    left.append(transfer)
                failed |= status < 0
            pending = left
        if failed:
            raise ReadError("Mooncake could not read from the source; its log says why")

    def put(self, piece: Slice) -> None:
        at = self._buffers.address()
        for target, length in zip(piece.targets.tolist(), piece.lengths.tolist(), strict=True):
            ctypes.memmove(target, at, length)
            at += length


class Buffers:
    """Registered memory for one slice; one that was abandoned is used again when the transfers
    into it have ended."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._memory: list[mmap.mmap] = []
        self._address: int | None = None
        self._abandoned: dict[int, list[int]] = {}

    def address(self) -> int:
        if self._address is None:
            self._address = self._ended() or self._registered()
        return self._address

    def abandon(self, pending: Sequence[int]) -> None:
        """Use other memory from now on, for as long as one of these transfers goes on."""
        if self._address is not None:
            self._abandoned[self._address] = list(pending)
        self._address = None

    def _ended(self) -> int | None:
        for address, pending in list(self._abandoned.items()):
            # A transfer that has ended must not be asked about again.
            left = [one for one in pending if self._engine.transfer_check_status(one) == 0]
            self._abandoned[address] = left
            if not left:
                del self._abandoned[address]
                return address
        return None

    def _registered(self) -> int:
        memory = mmap.mmap(-1, SLICE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._engine.register_memory(address, SLICE_BYTES):
            raise ReadError("Mooncake cannot register memory")
        self._memory.append(memory)
        return address
