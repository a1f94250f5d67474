"""A rank's line to its pool's supervisor."""

import logging
import threading

import msgspec
import zmq

from sgl_vertumnus.worker.control import RankMessage

logger = logging.getLogger(__name__)


class SupervisorLine:
    """Sends from any thread, never blocks; in order."""

    def __init__(self, port: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: RankMessage) -> None:
        with self._lock:
            try:
                self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("the supervisor does not read: %s is lost", message)

    def close(self) -> None:
        with self._lock:
            self._socket.close()
