"""Runs a function in several real processes, one a rank, and brings back what each returned.

The processes are forked from one that has SGLang imported, which takes ten seconds once.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = (
    "sgl_vertumnus.worker.rank",
    "sgl_vertumnus.worker.supervisor",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.utils.common",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Died:
    """A process that ended without an answer."""

    exitcode: int | None


@dataclass(frozen=True, slots=True)
class Raised:
    """A process whose function raised."""

    kind: str
    text: str


@contextmanager
def started(function: Function, calls: Sequence[tuple[Any, ...]]) -> Iterator[list[Any]]:
    """One process for each of ``calls``; yields (process, connection) pairs and ends them.

    ``function`` must be importable; it is called with a connection to the test, then the call's
    arguments.
    """
    running: list[tuple[Any, Connection]] = []
    try:
        for arguments in calls:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_run, args=(theirs, function, arguments), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        yield running
    finally:
        for process, connection in running:
            process.kill()
            process.join()
            connection.close()


def run(function: Function, calls: Sequence[tuple[Any, ...]], timeout_s: float = 60) -> list[Any]:
    """What each call returned; ``Raised`` or ``Died`` where it did not.

    Raises:
        TimeoutError: when a process hangs.
    """
    with started(function, calls) as running:
        return [answer(process, connection, timeout_s) for process, connection in running]


def answer(process: Any, connection: Connection, timeout_s: float) -> Any:
    """The next object that a process sends."""
    ready = wait([connection, process.sentinel], timeout_s)
    if connection in ready or connection.poll():
        try:
            return connection.recv()
        except EOFError:
            process.join()
            return Died(process.exitcode)
    if process.sentinel in ready:
        return Died(process.exitcode)
    raise TimeoutError(f"{process.name} did not answer in {timeout_s} s")


def _run(connection: Connection, function: Function, arguments: tuple[Any, ...]) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        result = function(connection, *arguments)
    except Exception as exc:
        result = Raised(type(exc).__name__, traceback.format_exc())
    connection.send(result)
