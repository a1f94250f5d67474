"""The front's ear for dead ranks, and what it makes of SGLang's control requests."""

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vertumnus_patches import engine
from vertumnus_router.protocol import (
    PROTOCOL_VERSION,
    REPORT_TOPIC,
    RankLost,
    RankState,
    encode_report,
)

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.losses import LossWatch
from tests.worker.configs import config_of


def until(what: str, true: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# -- what it hears --------------------------------------------------------------------------------


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What SGLang was told to expect, time by time."""
    counts: list[int] = []
    monkeypatch.setattr(engine, "expect_control_answers", counts.append)
    return counts


@pytest.fixture
def controller() -> Iterator[Callable[[PoolConfig], Any]]:
    """The controller's report socket of a pool."""
    context = zmq.Context()

    def bind(config: PoolConfig) -> Any:
        socket = context.socket(zmq.XPUB)
        socket.bind(f"tcp://{config.host}:{config.ports.reports + config.size}")
        return socket

    yield bind
    context.destroy(linger=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "127.0.0.2"])
def test_each_loss_lowers_what_is_expected(
    expected: list[int], controller: Callable[[PoolConfig], Any], host: str
) -> None:
    config = config_of(4, host=host)
    socket = controller(config)
    LossWatch(config).start()
    assert socket.poll(10_000) and socket.recv()[:1] == b"\1", "it has subscribed"
    for rank, count in ((3, 3), (2, 2), (2, 2), (0, 1), (1, 0)):
        before = len(expected)
        socket.send_multipart(encode_report(RankLost(rank=rank, cause="its process exited")))
        until("the loss was heard", lambda before=before: len(expected) > before)  # type: ignore[misc]
        assert expected[-1] == count


def test_noise_is_survived(expected: list[int], controller: Callable[[PoolConfig], Any]) -> None:
    config = config_of(4)
    socket = controller(config)
    LossWatch(config).start()
    assert socket.poll(10_000)
    state = RankState(
        version=PROTOCOL_VERSION,
        pool_id="p",
        rank=0,
        incarnation="i",
        epoch=0,
        first=0,
        degree=1,
        manifest="m",
    )
    for frames in ([b"x"], [REPORT_TOPIC, b"\xc1"], encode_report(state)):
        socket.send_multipart(frames)
    socket.send_multipart(encode_report(RankLost(rank=1, cause="c")))
    until("the loss was heard", lambda: expected == [3])


# -- what SGLang does then ------------------------------------------------------------------------


class Manager:
    """A tokenizer manager with the real communicators, on an event loop of its own thread."""

    def __init__(self, fan_out: int) -> None:
        from sglang.srt.managers.communicator import FanOutCommunicator
        from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS

        self.event_loop = asyncio.get_running_loop()
        self.sent: list[Any] = []
        for spec in _COMMUNICATOR_SPECS:
            communicator = FanOutCommunicator(self.sent.append, fan_out)
            setattr(self, f"{spec[0]}_communicator", communicator)


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    http_server = pytest.importorskip("sglang.srt.entrypoints.http_server", reason="needs sglang")

    def make(fan_out: int) -> Any:
        manager = Manager(fan_out)
        state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "get_global_state", lambda: state)
        return manager

    return make


def test_a_request_under_way_ends_with_the_answers_of_the_living(
    front: Callable[[int], Any],
) -> None:
    async def scenario() -> None:
        manager = front(4)
        communicator = manager.flush_cache_communicator
        call = asyncio.create_task(communicator("flush"))
        await asyncio.sleep(0)
        for answer in (1, 2):
            communicator.handle_recv(answer)
        engine.expect_control_answers(3)
        await asyncio.sleep(0.05)
        assert not call.done(), "one is still due"
        communicator.handle_recv(3)
        assert await asyncio.wait_for(call, 5) == [1, 2, 3]

        call = asyncio.create_task(communicator("flush"))
        await asyncio.sleep(0)
        for answer in (1, 2):
            communicator.handle_recv(answer)
        engine.expect_control_answers(2)
        assert await asyncio.wait_for(call, 5) == [1, 2]
        call = asyncio.create_task(communicator("flush"))
        await asyncio.sleep(0)
        communicator.handle_recv(1)
        communicator.handle_recv(2)
        assert await asyncio.wait_for(call, 5) == [1, 2], "later requests, too"

    asyncio.run(scenario())


def test_every_kind_of_control_request_is_covered(front: Callable[[int], Any]) -> None:
    async def scenario() -> None:
        manager = front(4)
        engine.expect_control_answers(3)
        await asyncio.sleep(0.05)
        communicators = [c for name, c in vars(manager).items() if name.endswith("_communicator")]
        assert len(communicators) > 10
        assert {communicator._fan_out for communicator in communicators} == {3}

    asyncio.run(scenario())
