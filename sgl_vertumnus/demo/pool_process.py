"""A pool as a child process: started, watched through its log, and never left behind."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vertumnus_router.clock import Clock

from sgl_vertumnus import processes
from sgl_vertumnus.errors import PoolStartError

_TAIL_LINES = 30
_POLL_S = 0.1
_STOP_GRACE_S = 20.0

T = TypeVar("T")


class PoolProcess:
    """One running ``launch_server`` with all its descendants.

    It lives in a session of its own, so that Ctrl-C reaches only its owner, who stops it in
    order; it gets SIGTERM when its owner dies without doing so. Its output goes to a file and
    not through a pipe: descendants can outlive it, and nothing blocks when nobody reads.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, log_path: Path, clock: Clock, name: str
    ) -> None:
        self._name = name
        self._process = process
        self._log_path = log_path
        self._clock = clock

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        log_path: Path,
        clock: Clock,
        *,
        name: str = "the pool",
        environment: Mapping[str, str] | None = None,
    ) -> "PoolProcess":
        """Run ``command`` with its output in ``log_path``, which is emptied first, and with
        ``environment`` on top of this process's. Errors call it by its ``name``."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
                env={**os.environ, **(environment or {})},
            )
        return cls(process, log_path, clock, name)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pss_bytes(self) -> int:
        """Memory of all its processes, router included, as the sum of PSS."""
        return processes.pss_bytes(processes.family(self.pid))

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, unless the pool ends before it: then ``PoolStartError``."""
        working, ended = asyncio.create_task(work), asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return await working
            status = await ended
            how = f"with exit status {status}" if status >= 0 else f"by signal {-status}"
            raise self.failure(f"{self._name} ended {how}")
        finally:
            for task in (working, ended):
                task.cancel()
            await asyncio.gather(working, ended, return_exceptions=True)

    def failure(self, what: str) -> PoolStartError:
        """``what`` went wrong, with the last lines of the log and where the rest is."""
        lines = self._log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        tail = "\n".join(f"  | {line}" for line in lines)
        return PoolStartError(f"{what}; its last words:\n{tail}\nthe whole log: {self._log_path}")

    async def lines(self) -> AsyncIterator[str]:
        """The lines of its log as they are written; never ends by itself."""
        rest = b""
        with self._log_path.open("rb") as log:
            while True:
                *complete, rest = (rest + log.read()).split(b"\n")
                for line in complete:
                    yield line.decode(errors="replace").rstrip()
                await self._clock.sleep(_POLL_S)

    async def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End it and every descendant: in order if that takes no longer than
        ``_STOP_GRACE_S`` and nobody is in a ``hurry``, by force otherwise."""
        await processes.stop_family(self.pid, self._clock, _STOP_GRACE_S, hurry)
        await self._process.wait()


#: Lines of SGLang's log that mark a rank's progress, and what they mean.
_MILESTONES = (
    (re.compile(r"\bDP(\d+)\b.*Load weight begin"), "rank {0}: loading the weights"),
    (re.compile(r"\bDP(\d+)\b.*Load weight end\. elapsed=([\d.]+) s"), "rank {0}: loaded in {1} s"),
    (
        re.compile(r"\bDP(\d+)\b.*\bmax_total_num_tokens=(\d+)"),
        "rank {0}: up, its KV cache holds {1} tokens",
    ),
    (re.compile(r"The server is fired up"), "the pool's front is up"),
)


class Milestones:
    """Turns a pool's log into a few lines of progress, each said once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, line: str) -> Iterator[str]:
        for pattern, message in _MILESTONES:
            if (match := pattern.search(line)) is None:
                continue
            text = message.format(*match.groups())
            if text not in self._said:
                self._said.add(text)
                yield text
