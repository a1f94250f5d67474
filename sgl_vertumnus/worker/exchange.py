"""How one step's requests travel from a block's leader to its members."""

from collections import deque
from collections.abc import Callable
from typing import Any

from vertumnus_patches.messages import decode_requests, encode_requests

from sgl_vertumnus.worker.stream import BlockStream, Content


class Ingress:
    """The leader's inbox. A step ends at a regroup command: what follows it belongs to the
    next geometry."""

    def __init__(self, is_regroup: Callable[[Any], bool]) -> None:
        self._is_regroup = is_regroup
        self._held: deque[Any] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._held

    def take(self, received: list[Any]) -> list[Any]:
        """The requests of this step, in order; the rest is held for the next."""
        self._held.extend(received)
        step: list[Any] = []
        while self._held:
            step.append(self._held.popleft())
            if self._is_regroup(step[-1]):
                break
        return step


def send_step(requests: list[Any], stream: BlockStream) -> None:
    """Leader's half of the exchange, in SGLang's msgpack form."""
    stream.send(Content.REQUESTS, encode_requests(requests))


def receive_step(stream: BlockStream) -> list[Any]:
    """A member's half: blocks until the leader's step begins."""
    return decode_requests(bytes(stream.receive(Content.REQUESTS)))
