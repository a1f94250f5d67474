"""The front's ear for dead ranks: control requests must not wait for their answers."""

import logging
import threading

import zmq
from vertumnus_patches import engine
from vertumnus_router.protocol import ProtocolError, RankLost, decode_report

from sgl_vertumnus.config import PoolConfig

logger = logging.getLogger(__name__)


class LossWatch:
    """Follows the supervisor's ``RankLost`` reports, one for every rank of a block that failed,
    on a thread of its own.

    SGLang's front collects one answer per rank for every control request, one request at a
    time: a rank that cannot answer would block all of them for ever.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._lost: set[int] = set()

    def start(self) -> None:
        """Listen from now on."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(
            f"tcp://{self._config.host}:{self._config.ports.reports + self._config.size}"
        )
        threading.Thread(
            target=self._run, args=(socket,), name="vertumnus-losses", daemon=True
        ).start()

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                report = decode_report(socket.recv_multipart())
            except ProtocolError as exc:
                logger.warning("not a report of the controller: %s", exc)
                continue
            if isinstance(report, RankLost):
                self._lost.add(report.rank)
                engine.expect_control_answers(self._config.size - len(self._lost))
