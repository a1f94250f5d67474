"""A rank's voice: heartbeats and prefill reports on a ZMQ PUB socket.

A thread of its own sends them, so that a forward step of many seconds does not look like a
dead rank.
"""

import queue
import threading
from collections.abc import Callable

import zmq
from vertumnus_router.protocol import HEARTBEAT_S, Report, encode_report


class Reporter:
    """Publishes on ``tcp://host:port`` until ``close``.

    ``heartbeat`` is called on the reporter's thread every second and after every ``beat``.
    """

    def __init__(self, host: str, port: int, heartbeat: Callable[[], Report]) -> None:
        self._heartbeat = heartbeat
        self._outbox: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._stopped = False
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as exc:
            raise OSError(f"cannot publish reports on {host}:{port}: {exc}") from exc
        self._thread = threading.Thread(
            target=self._run, args=(socket,), name="vertumnus-reporter", daemon=True
        )
        self._thread.start()

    def send(self, report: Report) -> None:
        """Publish ``report``; never blocks."""
        self._outbox.put(report)

    def beat(self) -> None:
        """Publish a heartbeat now, because the rank's state changed."""
        self._outbox.put(None)

    def close(self) -> None:
        self._stopped = True
        self.beat()
        self._thread.join()

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        while not self._stopped:
            try:
                report = self._outbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                report = None
            socket.send_multipart(encode_report(report or self._heartbeat()))
        socket.close()
