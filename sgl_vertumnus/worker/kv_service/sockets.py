"""ZMQ sockets between KV services, encrypted; only who knows the pool's secret gets in."""

import hashlib
import hmac
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import zmq
from vertumnus_router.clock import WallClock
from zmq.utils import z85

from sgl_vertumnus.worker.kv_service.messages import (
    MAX_BYTES,
    Question,
    ServiceError,
    decode_answer,
    encode_error,
    encode_question,
)

logger = logging.getLogger(__name__)

#: Questions that a service takes; the rest is told that it is busy.
MAX_IN_HAND = 64
_ZAP = "inproc://zeromq.zap.01"
_STRANGER = (
    "it does not know this pool's secret: give all pools the same --admin-api-key, without one "
    "only ranks of the same pool copy from each other"
)
_LOST = (
    zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
Answer = TypeVar("Answer")
#: What a service does with a question, as frames; answers with frames, and never raises.
Handler = Callable[[list[bytes]], list[bytes]]


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys, Z85: every service has the one pair, everybody who asks the other."""

    service: tuple[bytes, bytes]
    asker: tuple[bytes, bytes]


def keys_of(secret: str) -> Keys:
    """Derived from the secret that all ranks share that may copy from each other."""

    def pair(role: str) -> tuple[bytes, bytes]:
        name = f"sgl-vertumnus kv {role}".encode()
        private = z85.encode(hmac.digest(secret.encode(), name, hashlib.sha256))
        return zmq.curve_public(private), private

    return Keys(pair("service"), pair("asker"))


class Server:
    """Answers questions on ``address``, "host:port", until ``close``; a thread of its own has the
    sockets, ``threads`` others answer."""

    def __init__(self, address: str, keys: Keys, handle: Handler, threads: int) -> None:
        self._handle = handle
        self._questions: queue.SimpleQueue[tuple[bytes, list[bytes]] | None] = queue.SimpleQueue()
        self._in_hand = 0
        self._asker = z85.decode(keys.asker[0])
        self._answers: deque[list[bytes]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopped = False
        # Of its own, as a context has one judge of who gets in.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._judge = self._context.socket(zmq.REP)
        self._judge.bind(_ZAP)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, 4 * MAX_BYTES)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, keys.service[1])
        self._router.setsockopt_string(zmq.ZAP_DOMAIN, "vertumnus")
        try:
            self._router.bind(f"tcp://{address}")
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise OSError(f"cannot answer ranks on {address}: {exc}") from exc
        # Daemons, not an executor's: Python waits for those at exit, and a rank whose scheduler
        # has failed must not seem to live on until its last copy has given up.
        self._workers = [
            threading.Thread(target=self._work, name=f"vertumnus-kv-{number}", daemon=True)
            for number in range(threads)
        ]
        self._thread = threading.Thread(target=self._run, name="vertumnus-kv", daemon=True)
        for thread in (self._thread, *self._workers):
            thread.start()

    def close(self) -> None:
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for _ in self._workers:
            self._questions.put(None)
        for worker in self._workers:
            worker.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._judge, self._router, self._wake):
            poller.register(socket, zmq.POLLIN)
        while not self._stopped:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._judge in ready:
                self._judge_peer()
            if self._router in ready:
                self._take(self._router.recv_multipart())
            while self._answers:
                self._in_hand -= 1
                self._router.send_multipart(self._answers.popleft())
        self._context.destroy(linger=0)

    def _judge_peer(self) -> None:
        frames = self._judge.recv_multipart()
        request = frames[1] if len(frames) > 1 else b""
        is_known = len(frames) == 7 and hmac.compare_digest(frames[6], self._asker)
        verdict = (b"200", b"OK") if is_known else (b"400", b"not of this pool")
        self._judge.send_multipart([b"1.0", request, *verdict, b"", b""])

    def _take(self, frames: list[bytes]) -> None:
        peer, *question = frames
        self._in_hand += 1
        if self._in_hand > MAX_IN_HAND:
            self._answers.append([peer, *encode_error("busy: too many questions wait here")])
        else:
            self._questions.put((peer, question))

    def _work(self) -> None:
        while (asked := self._questions.get()) is not None:
            peer, question = asked
            self._answers.append([peer, *self._handle(question)])
            os.eventfd_write(self._wake, 1)


class Peer:
    """A connection to one service; of one thread."""

    def __init__(self, address: str, keys: Keys) -> None:
        self._address = address
        self._clock = WallClock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4 * MAX_BYTES)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.service[0])
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.asker[0])
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.asker[1])
        self._monitor: Any = self._socket.get_monitor_socket(
            _LOST | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.CONNECTED
        )
        self._was_reached = self._was_let_in = False
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as exc:
            self.close()
            raise ServiceError(f"{address} is no address: {exc}") from exc

    def ask(self, question: Question, timeout_s: float) -> Any:
        """The answer, of the question's ``answer`` type.

        Raises:
            ServiceError: when it is an error, when the connection is lost, or when time is up.
        """
        deadline = self._clock.now() + timeout_s
        self._socket.send_multipart(encode_question(question))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left_s := deadline - self._clock.now()) > 0:
            ready = dict(poller.poll(int(left_s * 1000) + 1))
            if self._socket in ready:
                return decode_answer(self._socket.recv_multipart(), question.answer)
            if self._monitor in ready:
                self._follow(zmq.Event(self._event()))
        raise ServiceError(f"{self._address} did not answer in {timeout_s:.1f} s")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _event(self) -> int:
        from zmq.utils.monitor import recv_monitor_message

        return int(recv_monitor_message(self._monitor)["event"])

    def _follow(self, event: zmq.Event) -> None:
        if event is zmq.Event.CONNECTED:
            self._was_reached = True
        elif event is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._was_let_in = True
        elif self._was_let_in:
            raise ServiceError(f"the rank at {self._address} is gone")
        elif self._was_reached:
            raise ServiceError(f"the rank at {self._address} does not answer; {_STRANGER}")
        else:
            raise ServiceError(f"no rank listens at {self._address}")
