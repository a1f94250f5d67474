"""A CP communicator over ranks that live in different SGLang replicas."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class CpGroup:
    """What SGLang reads of a ``GroupCoordinator``, for one block of the lattice.

    SGLang's coordinator splits one WORLD; the ranks of a block are WORLDs of their own. Ranks
    here are group-local, 0 leads. ``device_group`` moves tensors of the model (NCCL on GPUs),
    ``cpu_group`` moves control data (gloo).
    """

    def __init__(
        self,
        *,
        name: str,
        store: dist.Store,
        size: int,
        rank: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.unique_name = name
        self.ranks = list(range(size))
        self.world_size = size
        self.rank = self.rank_in_group = rank
        self.first_rank = 0
        self.device = device
        self.cpu_group = _new_group("gloo", f"{name}/cpu", store, size, rank, timeout)
        self.device_group = (
            self.cpu_group
            if device.type == "cpu"
            else _new_group("nccl", f"{name}/device", store, size, rank, timeout)
        )

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Concatenate ``input`` [n, ...] of all ranks into ``output`` [size * n, ...]."""
        dist.all_gather_into_tensor(output, input, group=self.device_group)

    def broadcast_from_leader(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` on the model's device with the leader's, in place."""
        dist.broadcast(tensor, src=0, group=self.device_group)

    def broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        """Overwrite ``tensor`` on the model's device with the one of rank ``owner``, in place."""
        dist.broadcast(tensor, group_src=owner, group=self.device_group)

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The equally many numbers of each rank."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = torch.empty(self.world_size * len(numbers), dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, mine, group=self.cpu_group)
        rows: list[list[int]] = everyone.view(self.world_size, len(numbers)).tolist()
        return rows

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """What each rank passed, in rank order."""
        sizes = [size for (size,) in self.gather_numbers([len(payload)])]
        longest = max(sizes)
        if not longest:
            return [b""] * self.world_size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:  # a buffer without bytes is refused
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = torch.empty(self.world_size * longest, dtype=torch.uint8)
        dist.all_gather_into_tensor(everyone, mine, group=self.cpu_group)
        rows = everyone.view(self.world_size, longest)
        return [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]

    def warm_up(self) -> None:
        """Open every connection now, so that the first regroup does not pay for it."""
        dist.barrier(group=self.cpu_group)
        mine = torch.full((1,), float(self.rank), device=self.device)
        everyone = torch.empty(self.world_size, device=self.device)
        self.all_gather_into_tensor(everyone, mine)
        expected = torch.arange(self.world_size, dtype=everyone.dtype, device=self.device)
        if not torch.equal(everyone, expected):
            raise RuntimeError(f"{self.unique_name}: gathered {everyone.tolist()}")


def _new_group(
    backend: str, name: str, store: dist.Store, size: int, rank: int, timeout: timedelta
) -> Any:
    from sglang.srt.utils.common import init_custom_process_group

    return init_custom_process_group(
        backend=backend,
        store=dist.PrefixStore(name, store),
        world_size=size,
        rank=rank,
        group_name=name,
        timeout=timeout,
    )
