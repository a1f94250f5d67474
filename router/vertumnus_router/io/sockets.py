"""Receive from ZMQ sockets on the event loop, without a thread or a poller of our own."""

import asyncio
from collections.abc import Callable

import zmq

Frames = list[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

#: Messages taken in one go before other work of the loop gets its turn.
_BURST = 256


class SocketReader:
    """Calls ``on_frames`` for every message of ``socket`` until closed.

    ZMQ's descriptor is edge-triggered: it becomes readable once, and what has arrived must
    then be taken to the end. An idle socket costs nothing.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[Frames], None],
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_frames = on_frames
        self._descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._drain)
        # Connecting may already have used up the edge.
        loop.call_soon(self._drain)

    def send(self, frames: Frames) -> None:
        """Send without waiting; sending can swallow the edge of what has arrived."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=0)

    def _drain(self) -> None:
        for _ in range(_BURST):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except BaseException:
                # What is left must not wait for an edge that has been used up.
                self._loop.call_soon(self._drain)
                raise
        self._loop.call_soon(self._drain)


def subscribe(context: Context, topic: bytes, *urls: str) -> zmq.Socket[bytes]:
    """A SUB socket on every one of ``urls``; nothing is dropped on this side."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    _notice_dead_peers(socket)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    for url in urls:
        socket.connect(url)
    return socket


def ask(context: Context, url: str) -> zmq.Socket[bytes]:
    """A DEALER socket for one question with many answers."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 0)
    _notice_dead_peers(socket)
    socket.connect(url)
    return socket


def _notice_dead_peers(socket: zmq.Socket[bytes]) -> None:
    """Find out about a host that vanished without closing, and reconnect quickly."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)


def host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tcp_url(host: str, port: int) -> str:
    """``tcp://host:port``."""
    return f"tcp://{host_port(host, port)}"
