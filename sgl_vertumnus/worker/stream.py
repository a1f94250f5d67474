"""A one-way stream from the leader of a block to its members, on one machine.

What members must see in the order in which the leader sent it goes here: the requests of each
step, sampled tokens, KV that only the leader computed. A local socket takes tens of
microseconds where a collective takes hundreds.
"""

import os
import select
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from vertumnus_router.lattice import Block

_HEADER = struct.Struct("<cQ")
_PEER = struct.Struct("3i")  # pid, uid, gid
_JOIN_S = 60.0
#: A payload up to this size is copied behind its length, to be sent by one call.
_SMALL_BYTES = 1 << 16


class BlockBroken(ConnectionError):
    """A rank of the block is gone; the block cannot go on."""


class Content(Enum):
    """What a payload is, so that ranks that are out of step find out at once."""

    REQUESTS = b"r"
    TOKENS = b"t"
    KV = b"k"


class BlockStream:
    """The end that one rank holds. ``members`` is empty on a member, ``leader`` None on the
    leader."""

    def __init__(
        self, block: Block, members: list[socket.socket], leader: socket.socket | None
    ) -> None:
        self._block = block
        self._members = members
        self._leader = leader

    @classmethod
    def join(cls, pool_id: str, block: Block, rank: int, store: dist.Store) -> "BlockStream":
        """Connect ``rank`` to its block; returns when all ranks of the block have.

        Raises:
            BlockBroken: when the others did not come within a minute.
        """
        # Abstract: gone with the processes that hold it, whatever happens to them.
        address = f"\0sgl-vertumnus/{pool_id}/{block.first}x{block.degree}"
        key = f"stream/{block.first}x{block.degree}"
        try:
            if rank == block.leader:
                members = _accept(address, block.degree - 1, lambda: store.set(key, "listening"))
                return cls(block, members, None)
            store.wait([key], timedelta(seconds=_JOIN_S))
            leader = socket.socket(socket.AF_UNIX)
            leader.connect(address)
            return cls(block, [], leader)
        except (OSError, dist.DistError) as exc:
            raise BlockBroken(f"rank {rank} could not join {block}: {exc}") from exc

    def send(self, content: Content, payload: bytes | memoryview) -> None:
        """Leader: send to every member. Raises ``BlockBroken``."""
        header = _HEADER.pack(content.value, len(payload))
        small = len(payload) <= _SMALL_BYTES
        try:
            for member in self._members:
                if small:
                    member.sendall(header + payload)
                else:
                    member.sendall(header)
                    member.sendall(payload)
        except OSError as exc:
            raise BlockBroken(f"a member of {self._block} is gone: {exc}") from exc

    def receive(self, content: Content) -> bytearray:
        """Member: the next payload; blocks until the leader sends. Raises ``BlockBroken``."""
        payload = bytearray(self._next_length(content))
        self._fill(memoryview(payload))
        return payload

    def has_next(self, timeout_ms: int) -> bool:
        """Member: whether ``receive`` would not wait; waits itself for so long."""
        if self._leader is None:
            raise ValueError(f"the leader of {self._block} has nothing to receive")
        poller = select.poll()
        poller.register(self._leader, select.POLLIN)
        return bool(poller.poll(timeout_ms))

    def send_tensor(self, content: Content, tensor: torch.Tensor) -> None:
        """Leader: send a CPU tensor's elements to every member."""
        self.send(content, _bytes_of(tensor.contiguous()))

    def receive_tensor(self, content: Content, tensor: torch.Tensor) -> None:
        """Member: overwrite ``tensor`` (contiguous, CPU) with the leader's, in place."""
        view = _bytes_of(tensor)
        length = self._next_length(content)
        if length != len(view):
            raise BlockBroken(
                f"the ranks of {self._block} are out of step: {length} bytes came, "
                f"{len(view)} were due"
            )
        self._fill(view)

    def close(self) -> None:
        for end in (*self._members, *([self._leader] if self._leader else [])):
            end.close()

    def _next_length(self, due: Content) -> int:
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        kind, length = _HEADER.unpack(header)
        if kind != due.value:
            raise BlockBroken(
                f"the ranks of {self._block} are out of step: {kind!r} came, {due} was due"
            )
        return int(length)

    def _fill(self, view: memoryview) -> None:
        if self._leader is None:
            raise ValueError(f"the leader of {self._block} has nothing to receive")
        while len(view):
            try:
                count = self._leader.recv_into(view, len(view), socket.MSG_WAITALL)
            except OSError as exc:
                raise BlockBroken(f"the leader of {self._block} is gone: {exc}") from exc
            if not count:
                raise BlockBroken(f"the leader of {self._block} is gone")
            view = view[count:]


def _accept(address: str, count: int, listening: Callable[[], None]) -> list[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(count)
        listener.settimeout(_JOIN_S)
        listening()
        members: list[socket.socket] = []
        while len(members) < count:
            member, _ = listener.accept()
            if _uid_of(member) == os.getuid():  # anyone on the machine can connect
                member.setblocking(True)
                members.append(member)
            else:
                member.close()
        return members


def _uid_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(credentials)[1])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
