"""A rank's voice: heartbeats and prefill reports on a ZMQ PUB socket.

A thread of its own sends them, so that a forward step of many seconds does not look like a
dead rank.
"""

import logging
import queue
import threading
from collections.abc import Callable

import zmq
from vertumnus_router.clock import WallClock
from vertumnus_router.protocol import HEARTBEAT_S, Report, encode_report

logger = logging.getLogger(__name__)


class Reporter:
    """Publishes on ``tcp://host:port`` until ``close``.

    ``heartbeat`` is called on the reporter's thread every second and after every ``beat``, and
    ``alive`` with it.
    """

    def __init__(
        self, host: str, port: int, heartbeat: Callable[[], Report], alive: Callable[[], None]
    ) -> None:
        self._heartbeat = heartbeat
        self._alive = alive
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
        clock = WallClock()
        due_s = clock.now() + HEARTBEAT_S
        while not self._stopped:
            try:
                report = self._outbox.get(timeout=max(0.0, due_s - clock.now()))
            except queue.Empty:
                report = None
            if report is not None:
                socket.send_multipart(encode_report(report))
            # Also when reports keep coming: they do not carry the rank's state.
            if report is None or clock.now() >= due_s:
                self._send_heartbeat(socket)
                due_s = clock.now() + HEARTBEAT_S
        socket.close()

    def _send_heartbeat(self, socket: zmq.Socket[bytes]) -> None:
        self._alive()
        try:
            frames = encode_report(self._heartbeat())
        except Exception:
            # It reads a scheduler that goes on working; a torn read must not silence the rank.
            logger.exception("no heartbeat this time")
        else:
            socket.send_multipart(frames)
