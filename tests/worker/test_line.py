"""A rank's line to its supervisor, over real sockets."""

import logging
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from sgl_vertumnus.ports import free_range
from sgl_vertumnus.worker.control import (
    Alive,
    Entered,
    RankMessage,
    Ready,
    Refused,
    Switched,
)
from sgl_vertumnus.worker.line import SupervisorLine

MESSAGES: list[RankMessage] = [
    Alive(1),
    Ready(1, 2, 3.5),
    Refused(1, 2, "why"),
    Entered(1, 2, 4.0),
    Switched(1, 2, 4.5),
]


class Supervisor:
    """The end that listens."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", port: int) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._decoder = msgspec.msgpack.Decoder(RankMessage)

    def next(self) -> RankMessage:
        assert self._socket.poll(5000), "nothing came in 5 s"
        message: RankMessage = self._decoder.decode(self._socket.recv())
        return message


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def port() -> int:
    return free_range("127.0.0.1", 1)


@pytest.fixture
def line(port: int) -> Iterator[SupervisorLine]:
    line = SupervisorLine(port)
    yield line
    line.close()


def test_messages_arrive_as_they_were_sent_and_in_order(
    context: "zmq.Context[zmq.Socket[bytes]]", port: int, line: SupervisorLine
) -> None:
    supervisor = Supervisor(context, port)
    for message in MESSAGES:
        line.send(message)
    assert [supervisor.next() for _ in MESSAGES] == MESSAGES


def test_a_supervisor_that_comes_later_hears_what_was_said_before(
    context: "zmq.Context[zmq.Socket[bytes]]", port: int, line: SupervisorLine
) -> None:
    line.send(Alive(7))
    supervisor = Supervisor(context, port)
    assert supervisor.next() == Alive(7)


def test_every_thread_may_send(
    context: "zmq.Context[zmq.Socket[bytes]]", port: int, line: SupervisorLine
) -> None:
    supervisor = Supervisor(context, port)

    def send(rank: int) -> None:
        for epoch in range(50):
            line.send(Ready(rank, epoch, 0.0))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    heard = [supervisor.next() for _ in range(200)]
    for thread in threads:
        thread.join()
    for rank in range(4):
        epochs = [m.epoch for m in heard if isinstance(m, Ready) and m.rank == rank]
        assert epochs == list(range(50))


def test_a_supervisor_that_does_not_read_blocks_nobody(
    line: SupervisorLine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for epoch in range(100_000):
            line.send(Ready(1, epoch, 0.0))
            if caplog.records:
                break
    assert "the supervisor does not read" in caplog.text
