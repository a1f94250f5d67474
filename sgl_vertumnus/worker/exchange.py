"""How one step's requests travel from a block's leader to its members."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vertumnus_patches.messages import decode_requests, encode_requests


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


def send_step(requests: list[Any], group: dist.ProcessGroup) -> None:
    """Leader's half of the exchange: SGLang's msgpack form, length first."""
    payload = encode_requests(requests)
    dist.broadcast(torch.tensor([len(payload)]), src=0, group=group)
    if payload:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=group)


def receive_step(group: dist.ProcessGroup) -> list[Any]:
    """A member's half: blocks until the leader's step begins."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, src=0, group=group)
    size = int(length)
    if not size:
        return []
    data = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return decode_requests(data.numpy().tobytes())
