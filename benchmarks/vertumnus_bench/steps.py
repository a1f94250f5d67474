"""How long the prefill steps of a pool take under load, by what its ranks report."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import zmq
from vertumnus_router import protocol
from vertumnus_router.protocol import (
    REPORT_TOPIC,
    PrefillFinished,
    PrefillStarted,
    ProtocolError,
    Report,
)

from sgl_vertumnus.demo.servers import Server

_POLL_MS = 100


class StepTimes:
    """The durations of prefill steps, from the reports of all ranks in the order of each.

    A rank reports which requests begin with a step, and which end with one, with the time
    that their steps took. A prefill that ends before anything else is reported ran in steps of
    its own, as many as it has chunks (of ``chunk_tokens``): their mean is one entry. With one
    chunk that is exact. Prefills that share steps with others are left out.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.steps_s: list[float] = []
        self._chunk_tokens = chunk_tokens
        self._begun: dict[int, frozenset[str]] = {}

    def feed(self, report: Report) -> None:
        if isinstance(report, PrefillStarted):
            self._begun[report.rank] = frozenset(report.rids)
        elif isinstance(report, PrefillFinished):
            begun = self._begun.pop(report.rank, frozenset())
            if begun != {done.rid for done in report.done}:
                return
            computed = [done.input_tokens - done.cached_tokens for done in report.done]
            chunks = max(1, math.ceil(sum(computed) / self._chunk_tokens))
            if len(computed) == 1 or chunks == 1:
                self.steps_s.append(report.done[0].compute_s / chunks)


@contextmanager
def watching(server: Server, chunk_tokens: int) -> Iterator[StepTimes]:
    """Listen to the ranks of ``server`` in a thread until the context is left."""
    times = StepTimes(chunk_tokens)
    description = server.get("/vertumnus/pool")
    base = description["reports"]["port_base"]
    done = Event()

    def listen() -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, REPORT_TOPIC)
            for rank in range(description["pool_size"]):
                socket.connect(f"tcp://127.0.0.1:{base + rank}")
            while not done.is_set():
                if socket.poll(_POLL_MS):
                    try:
                        times.feed(protocol.decode_report(socket.recv_multipart()))
                    except ProtocolError as exc:
                        raise RuntimeError(f"a report that is none: {exc}") from exc

    thread = Thread(target=listen, name="step-times")
    thread.start()
    try:
        yield times
    finally:
        done.set()
        thread.join()
