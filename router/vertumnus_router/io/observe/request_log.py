"""One line of JSON for each request that has ended.

Never what a client wrote but for the id that it gave the request: no prompts, no keys. The event
loop only hands lines over; a thread writes them.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from vertumnus_router.clock import Clock
from vertumnus_router.io.observe.trail import Trail

log = logging.getLogger(__name__)

STDOUT = "-"
#: Requests whose lines are yet to be written; beyond that they are left out and counted.
_WAITING = 8192
_BATCH = 256
_CLOSE_S = 2.0


class RequestLog:
    """Appends to the file ``where``, or to standard output. A file that somebody has moved away,
    as logrotate does, is made anew. Raises ``OSError`` if it cannot be written to."""

    def __init__(self, where: str, clock: Clock, *, waiting: int = _WAITING) -> None:
        self.dropped = 0
        self._clock = clock
        self._path = None if where == STDOUT else Path(where)
        self._file: IO[bytes] = sys.stdout.buffer if self._path is None else _open(self._path)
        self._lines: queue.Queue[Callable[[], bytes] | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, trail: Trail) -> None:
        """Returns at once. The trail must have ended."""
        try:
            self._lines.put_nowait(lambda: _line(trail, self._clock))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left, as long as that takes no more than a moment."""
        try:
            self._lines.put(None, timeout=_CLOSE_S)
        except queue.Full:
            log.warning("the request log does not keep up: its last lines are lost")
            return
        self._thread.join(_CLOSE_S)
        if self._path is not None and not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        failing = False
        while True:
            batch, goes_on = self._batch()
            try:
                self._reopen_if_moved()
                _write(self._file.fileno(), b"".join(make() for make in batch))
                failing = False
            except Exception as exc:  # a full disk must not end the log for good
                self.dropped += len(batch)
                if not failing:
                    log.error("cannot write the request log: %s", exc)
                failing = True
            if not goes_on:
                return

    def _batch(self) -> tuple[list[Callable[[], bytes]], bool]:
        """What waits, at least one line; False when there will be no more."""
        batch: list[Callable[[], bytes]] = []
        line = self._lines.get()
        while line is not None:
            batch.append(line)
            if len(batch) == _BATCH:
                return batch, True
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _reopen_if_moved(self) -> None:
        if self._path is None:
            return
        try:
            here, ours = self._path.stat(), os.fstat(self._file.fileno())
            if (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino):
                return
        except FileNotFoundError:
            pass
        moved, self._file = self._file, _open(self._path)
        moved.close()


def _open(path: Path) -> IO[bytes]:
    return path.open("ab", buffering=0)


def _write(descriptor: int, data: bytes) -> None:
    """All of it. Past every buffer: what a full disk has refused must not come again later."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _line(trail: Trail, clock: Clock) -> bytes:
    return orjson.dumps(content(trail, clock)) + b"\n"


def content(trail: Trail, clock: Clock) -> dict[str, Any]:
    """The line as JSON; ``time`` is that of arrival. None: not known, or it did not happen."""
    dispatch, request, prefill = trail.dispatch, trail.request, trail.prefill
    chosen = None if dispatch is None else dispatch.decision.chosen
    arrived = datetime.fromtimestamp(clock.unix_s(trail.arrived_s), UTC)
    assert trail.ended_s is not None
    return {
        "time": arrived.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": trail.id,
        "client_request_id": trail.client_id.decode("latin-1"),
        "trace_id": trail.span.trace_id if trail.span is not None else None,
        "method": trail.method,
        "endpoint": trail.endpoint,
        "status": trail.status,
        "outcome": trail.outcome,
        "worker": chosen and chosen.worker,
        "degree": chosen and chosen.degree,
        "home": dispatch and str(dispatch.home),
        "decode": dispatch.pair.decode if dispatch is not None and dispatch.pair else None,
        "attempts": trail.attempts,
        "failures": [
            {"worker": worker, "failure": failure.value} for worker, failure in trail.failures
        ],
        "input_tokens": prefill.input_tokens if prefill else request and request.input_tokens,
        "exact": request.exact if request else None,
        "cached_tokens": prefill and prefill.cached_tokens,
        "cached_tokens_predicted": chosen and chosen.cached_tokens,
        "prefill_s": prefill and prefill.compute_s,
        "prefill_s_predicted": chosen and chosen.service_s - chosen.pull_s,
        "queue_s": _since(trail.arrived_s, trail.dispatched_s),
        "ttft_s": trail.ttft_s,
        "ttft_parts_s": trail.split(),
        "duration_s": trail.ended_s - trail.arrived_s,
    }


def _since(begin_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - begin_s
