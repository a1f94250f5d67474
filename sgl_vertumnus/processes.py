"""The processes of a pool: find them, weigh them, end them. Reads Linux's ``/proc``."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vertumnus_router.clock import Clock

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_FORGOTTEN_S = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One life of a process id: ids are reused, start times (kernel ticks) are not."""

    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class _Stat:
    process: Process
    parent: int
    session: int
    cpu_ticks: int
    zombie: bool


def family(root_pid: int) -> list[Process]:
    """``root_pid``, its descendants, and whoever else lives in the session that it leads.

    The session keeps those whose parent has died. Zombies hold nothing and are left out; a
    root that is gone leaves the rest of its session.
    """
    stats = _all_stats()
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    pending = [root_pid, *(pid for pid, stat in stats.items() if stat.session == root_pid)]
    found: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid in stats and pid not in found:
            found.add(pid)
            pending.extend(children.get(pid, ()))
    return sorted(stats[pid].process for pid in found if not stats[pid].zombie)


def is_alive(process: Process) -> bool:
    """Whether this life of the process still runs (a zombie does not)."""
    stat = _stat(process.pid)
    return stat is not None and stat.process == process and not stat.zombie


def pss_bytes(processes: Iterable[Process]) -> int:
    """Proportional set size: pages shared by n processes count 1/n in each, so sums are real.

    Processes that ended meanwhile count nothing. Raises ``PermissionError`` for another
    user's.
    """
    return sum(_pss_bytes(process.pid) for process in processes)


def rss_bytes(processes: Iterable[Process]) -> int:
    """Resident set size: every page in memory counts whole, also those that others share.

    Processes that ended meanwhile count nothing.
    """
    return sum(_rss_bytes(process.pid) for process in processes)


def title(process: Process) -> str:
    """Its command line, or what it calls itself; empty when it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = (_PROC / str(process.pid) / "cmdline").read_bytes()
        return text.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def cpu_s(processes: Iterable[Process]) -> float:
    """User and system seconds spent so far by the processes that are still alive."""
    ticks = 0
    for process in processes:
        stat = _stat(process.pid)
        if stat is not None and stat.process == process:
            ticks += stat.cpu_ticks
    return ticks / os.sysconf("SC_CLK_TCK")


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this life of the process; False when it has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The handle pins the process, so what is_alive sees is what the signal reaches.
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


async def stop_family(
    root_pid: int,
    clock: Clock,
    grace_s: float,
    hurry: Callable[[], bool] = lambda: False,
) -> list[Process]:
    """End a family: SIGTERM for the root, SIGKILL for whoever is left after ``grace_s``.

    The root is asked first because it knows how to end its children in order; those that
    outlive it were forgotten and get ``_FORGOTTEN_S``. ``hurry`` is asked again and again
    whether to stop waiting. Returns those that had to be killed. The caller reaps the root if
    it is its own child.
    """
    members = set(family(root_pid))
    root = {process for process in members if process.pid == root_pid}
    for process in root:
        send_signal(process, signal.SIGTERM)
    give_up = clock.now() + grace_s
    # Followed as a growing set: once the root has died, its tree cannot be walked any more.
    while alive := {process for process in members if is_alive(process)}:
        if not root & alive:
            give_up = min(give_up, clock.now() + _FORGOTTEN_S)
        if clock.now() >= give_up or hurry():
            break
        members |= set(family(root_pid))
        await clock.sleep(_POLL_S)
    killed: set[Process] = set()
    while alive := {process for process in members if is_alive(process)}:
        killed |= {process for process in alive if send_signal(process, signal.SIGKILL)}
        await clock.sleep(_POLL_S)
        members |= set(family(root_pid))
    return sorted(killed)


async def kill_descendants(clock: Clock) -> None:
    """SIGKILL everything below this process, adopted orphans included, and see it gone."""
    own = os.getpid()
    while alive := [process for process in family(own) if process.pid != own]:
        for process in alive:
            send_signal(process, signal.SIGKILL)
        await clock.sleep(_POLL_S)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """For a child between fork and exec: receive ``number`` when the parent ends, however."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


# Loaded once at import: a forked child must not load libraries.
_libc = ctypes.CDLL(None, use_errno=True)


def _all_stats() -> dict[int, _Stat]:
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return {pid: stat for pid in pids if (stat := _stat(pid)) is not None}


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, in parentheses, may hold spaces and parentheses: count from its end.
    fields = text.rpartition(")")[2].split()
    return _Stat(
        process=Process(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        zombie=fields[0] in "ZX",
    )


def _rss_bytes(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
