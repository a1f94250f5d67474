"""How the bytes of a prefix get here from another rank's memory."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from sgl_vertumnus.worker.kv_service.messages import Pinned
from sgl_vertumnus.worker.kv_service.pieces import Slice

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None, use_errno=True)  # calls release the GIL
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class ReadError(Exception):
    """Bytes that could not be fetched; the message says what to do."""


class Reader(Protocol):
    """Fetches from one source. Neither call is under way for longer than some milliseconds after
    the other one, but for ``fetch``, which waits for a network."""

    def fetch(self, piece: Slice, timeout_s: float) -> None:
        """Bring the slice near, but do not touch its targets. Raises ``ReadError``."""

    def put(self, piece: Slice) -> None:
        """Write it to its targets. Raises ``ReadError``."""


class LocalReader:
    """From another process of this machine, without a copy between."""

    def __init__(self, source: Pinned) -> None:
        self._pid = source.pid

    def fetch(self, piece: Slice, timeout_s: float) -> None:
        """Nothing is far."""

    def put(self, piece: Slice) -> None:
        theirs = np.column_stack((piece.sources, piece.lengths))
        ours = np.column_stack((piece.targets, piece.lengths))
        count = len(piece.lengths)
        read = _readv(self._pid, ours.ctypes.data, count, theirs.ctypes.data, count, 0)
        if read < 0:
            raise ReadError(_why_not(ctypes.get_errno()))
        if read != piece.bytes:
            raise ReadError("the source's memory has gone")


def be_readable() -> None:
    """Let other processes of this user read this one's memory, where the kernel asks for that."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # fails where Yama is not built in


def machine() -> str:
    """Equal in processes that can name and read each other: one kernel, one space of pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _why_not(code: int) -> str:
    if code == errno.EPERM:
        return (
            "this process may not read another rank's memory: run all pools as one user, and "
            "allow process_vm_readv (Yama: kernel.ptrace_scope below 2; in a container "
            "--cap-add SYS_PTRACE), or set VERTUMNUS_KV_TRANSPORT=mooncake"
        )
    if code == errno.ESRCH:
        return "the source's process is gone"
    return f"process_vm_readv: {os.strerror(code)}"
