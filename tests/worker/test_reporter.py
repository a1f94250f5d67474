"""A rank's voice, over real sockets."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import zmq
from vertumnus_router.protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    REPORT_TOPIC,
    PrefillDone,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    RankState,
    Report,
    decode_report,
)

from sgl_vertumnus.ports import free_range
from sgl_vertumnus.worker.reporter import Reporter

HOST = "127.0.0.1"


def state(running_requests: int = 0) -> RankState:
    return RankState(
        version=PROTOCOL_VERSION,
        pool_id="p",
        rank=1,
        incarnation="life",
        epoch=0,
        first=1,
        degree=1,
        manifest="m",
        running_requests=running_requests,
    )


STARTED = PrefillStarted(rank=1, incarnation="life", epoch=2, rids=("a", "b"))
FINISHED = PrefillFinished(
    rank=1,
    incarnation="life",
    epoch=2,
    done=(PrefillDone(rid="a", input_tokens=9, cached_tokens=4, compute_s=0.5),),
)


class Listener:
    """A router's end of the reports."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def next(self, timeout_s: float = 5.0) -> Report:
        assert self._socket.poll(int(timeout_s * 1000)), f"nothing came in {timeout_s} s"
        return decode_report(self._socket.recv_multipart())

    def drain(self) -> list[Report]:
        reports = []
        while self._socket.poll(0):
            reports.append(decode_report(self._socket.recv_multipart()))
        return reports


Start = Callable[[Callable[[], Report]], tuple[Reporter, Listener]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A reporter and a listener that hears it."""
    context = zmq.Context()
    reporters: list[Reporter] = []

    def begin(heartbeat: Callable[[], Report]) -> tuple[Reporter, Listener]:
        port = free_range(HOST, 1)
        reporter = Reporter(HOST, port, heartbeat, lambda: None)
        reporters.append(reporter)
        socket = context.socket(zmq.SUB)
        socket.subscribe(REPORT_TOPIC)
        socket.connect(f"tcp://{HOST}:{port}")
        listener = Listener(socket)
        listener.next()  # it hears
        return reporter, listener

    yield begin
    for reporter in reporters:
        reporter.close()
    context.destroy(linger=0)


def test_reports_arrive_as_they_were_sent(start: Start) -> None:
    reporter, listener = start(state)
    for report in (STARTED, FINISHED, RankLost(rank=1, cause="why")):
        reporter.send(report)
        assert listener.next() == report


def test_heartbeats_come_once_a_second(start: Start) -> None:
    numbers = count()
    _, listener = start(lambda: state(next(numbers)))
    arrivals = []
    for _ in range(3):
        beat = listener.next()
        assert isinstance(beat, RankState)
        arrivals.append((time.monotonic(), beat.running_requests))
    (first, n), _, (last, m) = arrivals
    assert m - n == 2
    assert 1.6 * HEARTBEAT_S < last - first < 4 * HEARTBEAT_S


def test_a_busy_main_thread_does_not_stop_the_heart(start: Start) -> None:
    _, listener = start(state)
    listener.drain()
    spun = time.monotonic()
    while time.monotonic() - spun < 2.5 * HEARTBEAT_S:
        sum(range(10_000))
    assert len(listener.drain()) >= 2


def test_a_stream_of_reports_does_not_stop_the_heart(start: Start) -> None:
    """Reports carry no load; a rank that is busy must not look like one that is not there."""
    reporter, listener = start(state)
    listener.drain()
    kinds: list[type] = []
    began = time.monotonic()
    while time.monotonic() - began < 2.5 * HEARTBEAT_S:
        reporter.send(STARTED)
        time.sleep(0.005)
        kinds += [type(report) for report in listener.drain()]
    assert kinds.count(PrefillStarted) > 50
    assert 2 <= kinds.count(RankState) <= 4


def test_a_beat_comes_at_once_and_describes_the_new_state(start: Start) -> None:
    current = [state(0)]
    reporter, listener = start(lambda: current[0])
    listener.next()  # a second is ahead
    current[0] = state(7)
    asked = time.monotonic()
    reporter.beat()
    assert listener.next() == state(7)
    assert time.monotonic() - asked < 0.5 * HEARTBEAT_S


def test_a_torn_read_costs_one_heartbeat(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    failures = [False, True, False]

    def heartbeat() -> Report:
        if failures and failures.pop(0):
            raise AttributeError("running_batch")
        return state()

    with caplog.at_level(logging.ERROR):
        reporter, listener = start(heartbeat)
        reporter.beat()
        reporter.send(STARTED)
        assert listener.next() == STARTED, "the failed beat is left out"
        assert listener.next() == state()
    assert "no heartbeat this time" in caplog.text and "running_batch" in caplog.text


def test_the_supervisor_hears_of_the_rank_whenever_the_router_does() -> None:
    """Also where the rank's state cannot be read: it is the process that lives."""
    alive = threading.Semaphore(0)

    def torn() -> Report:
        raise AttributeError("running_batch")

    reporter = Reporter(HOST, free_range(HOST, 1), torn, alive.release)
    try:
        began = time.monotonic()
        for _ in range(2):
            assert alive.acquire(timeout=5)
        assert time.monotonic() - began < 4 * HEARTBEAT_S
        reporter.beat()
        assert alive.acquire(timeout=0.5 * HEARTBEAT_S), "at once"
    finally:
        reporter.close()


def test_close_ends_the_thread_and_frees_the_port() -> None:
    port = free_range(HOST, 1)
    reporter = Reporter(HOST, port, state, lambda: None)
    reporter.close()
    assert not reporter._thread.is_alive()
    deadline = time.monotonic() + 5
    while True:  # libzmq lets go of the port on a thread of its own
        try:
            Reporter(HOST, port, state, lambda: None).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_taken_port_is_an_error_that_names_it(start: Start) -> None:
    port = free_range(HOST, 1)
    first = Reporter(HOST, port, state, lambda: None)
    try:
        with pytest.raises(OSError, match=f"cannot publish reports on {HOST}:{port}"):
            Reporter(HOST, port, state, lambda: None)
    finally:
        first.close()
