import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vertumnus_router.clock import WallClock

from sgl_vertumnus.processes import (
    Process,
    cpu_s,
    family,
    is_alive,
    pss_bytes,
    rss_bytes,
    send_signal,
    stop_family,
    title,
)

# A root with a child and a grandchild whose own parent is gone; prints once all are up.
TREE = """
import subprocess, sys, time
sleeper = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleeper])
leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}])"
subprocess.run([sys.executable, "-c", leave])
print("up", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""

# Maps a file and touches every page of it.
MAPPER = """
import mmap, time
with open({path!r}, "rb") as file:
    shared = mmap.mmap(file.fileno(), {size}, prot=mmap.PROT_READ)
for at in range(0, {size}, 4096):
    shared[at]
print("up", flush=True)
time.sleep(600)
"""


Child = subprocess.Popen[bytes]


def start(code: str) -> Child:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.fixture
def tree() -> Iterator[Child]:
    process = start(TREE)
    yield process
    for member in family(process.pid):
        send_signal(member, signal.SIGKILL)
    process.wait()


def test_family_holds_descendants_and_those_whose_parent_is_gone(tree: Child) -> None:
    members = family(tree.pid)
    assert len(members) == 3
    assert tree.pid in {member.pid for member in members}
    tree.kill()
    tree.wait()
    assert family(tree.pid) == [member for member in members if member.pid != tree.pid]


def test_stop_ends_everyone(tree: Child) -> None:
    members = family(tree.pid)
    killed = asyncio.run(stop_family(tree.pid, WallClock(), grace_s=0.3))
    tree.wait()
    assert tree.returncode == -signal.SIGTERM
    assert {member.pid for member in killed} == {member.pid for member in members} - {tree.pid}
    assert not any(is_alive(member) for member in members)


def test_stop_waits_no_longer_than_it_is_allowed_to() -> None:
    process = start(STUBBORN)
    hurried = []

    def hurry() -> bool:
        hurried.append(True)
        return len(hurried) > 3

    started = time.monotonic()
    killed = asyncio.run(stop_family(process.pid, WallClock(), grace_s=60, hurry=hurry))
    assert time.monotonic() - started < 10
    assert [member.pid for member in killed] == [process.pid]
    assert process.wait() == -signal.SIGKILL


def test_another_life_of_a_process_id_is_left_alone(tree: Child) -> None:
    earlier = Process(tree.pid, family(tree.pid)[0].started_ticks - 1)
    assert not is_alive(earlier)
    assert not send_signal(earlier, signal.SIGKILL)
    assert cpu_s([earlier]) == 0
    assert tree.poll() is None


def test_pss_counts_a_shared_page_once_and_rss_everywhere(tmp_path: Path) -> None:
    size = 64 << 20
    path = tmp_path / "shared"
    path.write_bytes(b"x" * size)
    pair = [start(MAPPER.format(path=str(path), size=size)) for _ in range(2)]
    try:
        both = [member for process in pair for member in family(process.pid)]
        assert len(both) == 2
        assert size / 2 < pss_bytes(both[:1]) < 0.9 * size
        assert size < pss_bytes(both) < 1.8 * size
        assert rss_bytes(both) > 2 * size
    finally:
        for process in pair:
            process.kill()
            process.wait()
    assert pss_bytes(both) == rss_bytes(both) == 0


def test_the_title_is_the_command_line_until_the_process_ends() -> None:
    process = start('print("up", flush=True); import time; time.sleep(600)')
    try:
        (member,) = family(process.pid)
        assert title(member).startswith(f"{sys.executable} -c print(")
    finally:
        process.kill()
        process.wait()
    assert title(member) == ""


def test_cpu_seconds_grow_with_work() -> None:
    own = [member for member in family(os.getpid()) if member.pid == os.getpid()]
    before, used = cpu_s(own), time.process_time()
    while time.process_time() - used < 0.3:
        pass
    assert cpu_s(own) - before == pytest.approx(time.process_time() - used, abs=0.1)
