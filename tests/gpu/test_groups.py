"""The lattice's communicators over NCCL, a rank a GPU."""

from typing import Any

import pytest
import torch
from vertumnus_router.lattice import lattice

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.groups import build_links, connect_store
from sgl_vertumnus.worker.rendezvous import open_store
from tests.worker.configs import config_of
from tests.worker.ranks import run


def collectives(_: Any, config: PoolConfig, rank: int) -> dict[str, Any]:
    """What each block of this rank gathers and is told, on the rank's own device."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    seen: dict[str, Any] = {}
    for block, links in build_links(config, rank, connect_store(config), device).items():
        gathered = torch.empty(block.degree, device=device)
        links.group.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device=device))
        told = torch.tensor([rank], device=device)
        links.group.broadcast_from_leader(told)
        seen[str(block)] = (gathered.tolist(), told.item())
    return seen


def test_every_block_of_the_lattice_gathers_and_broadcasts() -> None:
    size = 2 ** (torch.cuda.device_count().bit_length() - 1)
    if size < 2:
        pytest.skip("needs two GPUs: NCCL has one rank a device")
    degrees = tuple(2**k for k in range(size.bit_length()))
    config = config_of(size, degrees, device="cuda")
    store = open_store(config)
    answers = run(collectives, [(config, rank) for rank in range(size)])
    del store
    for block in lattice(size, degrees):
        if block.degree > 1:
            for rank in block.ranks:
                assert answers[rank][str(block)] == (
                    [float(member) for member in block.ranks],
                    block.leader,
                )
