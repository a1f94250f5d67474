"""Run the load client, and read what it saw."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vertumnus_bench.overhead.programs import program

_FOREVER = 10**9


class Times(msgspec.Struct, frozen=True):
    """Microseconds."""

    count: int
    p50_us: int
    p99_us: int
    max_us: int


class Seen(msgspec.Struct, frozen=True):
    """``whole`` and ``first``: from sending a request to the end and the first byte of the
    answer's body. ``event``: from the engine's sending an event to its arrival at the client."""

    requests: int
    errors: int
    #: of the errors, connections that ended in the middle of an answer
    broken: int
    seconds: float
    whole: Times | None
    first: Times | None
    event: Times | None

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """``connections`` at a time, until so many requests have been answered or so many seconds
    are over, the first of them spread over ``spread_ms``."""

    connections: int
    seconds: float
    requests: int = _FOREVER
    spread_ms: int = 0


class Running:
    """A load that has been started."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []

    def wait_open(self) -> None:
        """Until every connection has had the first byte of an answer."""
        assert self._process.stdout is not None
        while "open" not in (line := self._process.stdout.readline()):
            if not line:
                raise RuntimeError("the load ended before all its connections were answered")
            self._lines.append(line)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def result(self) -> Seen:
        out, _ = self._process.communicate()
        if self._process.returncode != 0:
            raise RuntimeError(f"the load client exited with {self._process.returncode}")
        return msgspec.json.decode([*self._lines, *out.splitlines()][-1], type=Seen)


@contextmanager
def loading(port: int, body: bytes, load: Load) -> Iterator[Running]:
    """Send ``body`` as a chat completion again and again; see ``load_client.c``."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\naccept: */*\r\nuser-agent: load\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(head + body)
        numbers = (load.connections, load.requests, load.seconds, load.spread_ms)
        command = [str(program("load_client")), str(port), *map(str, numbers), file.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Running(process)
            finally:
                process.kill()


def run(port: int, body: bytes, load: Load) -> Seen:
    """The load to its end."""
    with loading(port, body, load) as running:
        return running.result()


def chat(content: str, *, stream: bool = False) -> bytes:
    """The body of a chat completion; ``@@@@@@@@`` in ``content`` is a number that counts."""
    fields = {
        "model": "mock",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0.0,
    }
    if stream:
        fields["stream"] = True
    return json.dumps(fields, separators=(",", ":")).encode()
