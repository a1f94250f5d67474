"""The sockets on which ranks, supervisor and front of one pool speak of moves.

All are on loopback: a pool is one node, and who reaches them can move it.
"""

import logging
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import zmq
from vertumnus_router.protocol import PoolComposition

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.errors import SupervisorSilent
from sgl_vertumnus.worker.control import (
    Describe,
    Described,
    FrontMessage,
    Move,
    Moved,
    RankMessage,
    Rejected,
    SupervisorAnswer,
)

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_rank_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)
_front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
_moved_decoder: msgspec.msgpack.Decoder[Rejected | Moved] = msgspec.msgpack.Decoder(
    Rejected | Moved
)
_described_decoder = msgspec.msgpack.Decoder(Described)

T = TypeVar("T")


def ranks_url(config: PoolConfig) -> str:
    """Where the supervisor hears its ranks."""
    return f"tcp://127.0.0.1:{config.ports.control}"


def front_url(config: PoolConfig) -> str:
    """Where the supervisor hears its front."""
    return f"tcp://127.0.0.1:{config.ports.control + 1}"


class RankInbox:
    """What the ranks push to their supervisor."""

    def __init__(self, config: PoolConfig) -> None:
        self._size = config.size
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self.socket.bind(ranks_url(config))

    def receive(self) -> Iterator[RankMessage]:
        """All that has come, each rank's in order; what is not of this pool is dropped."""
        for frames in _frames(self.socket):
            try:
                message = _rank_decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as exc:
                logger.warning("not a message of a rank: %s", exc)
                continue
            if 0 <= message.rank < self._size:
                yield message
            else:
                logger.warning("a message of rank %d, which the pool lacks", message.rank)


class FrontDesk:
    """Where the supervisor is asked by the front."""

    def __init__(self, config: PoolConfig) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(front_url(config))

    def receive(self) -> Iterator[tuple[bytes, FrontMessage]]:
        """All questions that have come, each with whom to answer."""
        for asker, *frames in _frames(self.socket):
            try:
                yield asker, _front_decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as exc:
                logger.warning("not a message of the front: %s", exc)

    def answer(self, asker: bytes, answer: SupervisorAnswer) -> None:
        """Nothing happens when the asker has given up."""
        self.socket.send_multipart([asker, _encoder.encode(answer)])


def ask_move(config: PoolConfig, move: Move, timeout_s: float) -> Rejected | Moved:
    """Have the supervisor move the pool; from any thread of the front. One that still starts is
    waited for.

    Raises:
        SupervisorSilent: when no answer has come in time. The move may go on.
    """
    return _ask(config, move, _moved_decoder, timeout_s)


def ask_composition(config: PoolConfig, timeout_s: float) -> PoolComposition:
    """What the pool serves as; from any thread of the front.

    Raises:
        SupervisorSilent: when no answer has come in time.
    """
    return _ask(config, Describe(), _described_decoder, timeout_s).composition


def _ask(
    config: PoolConfig,
    question: FrontMessage,
    answers: msgspec.msgpack.Decoder[T],
    timeout_s: float,
) -> T:
    # A socket for each question: threads cannot share one, and its address tells them apart.
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(front_url(config))
        socket.send(_encoder.encode(question))
        if not socket.poll(int(timeout_s * 1000)):
            raise SupervisorSilent(timeout_s)
        return answers.decode(socket.recv())


def _frames(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
