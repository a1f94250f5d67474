"""The communicators of the lattice, as one rank sees them."""

import logging
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from vertumnus_patches.cp_group import CpGroup
from vertumnus_router.lattice import Block, lattice

from sgl_vertumnus.config import PoolConfig

logger = logging.getLogger(__name__)

#: Longest silence inside a block. Members wait for their leader at most a second when idle and
#: one forward step when busy; a step of a very long chunk on a slow device may take minutes.
GROUP_TIMEOUT = timedelta(minutes=30)


def connect_store(config: PoolConfig) -> dist.TCPStore:
    """The rendezvous store that the pool's front keeps."""
    return dist.TCPStore(config.host, config.ports.store, is_master=False)


def build_groups(
    config: PoolConfig, rank: int, store: dist.Store, device: torch.device
) -> Mapping[Block, CpGroup]:
    """Create and warm the group of every block of degree > 1 that ``rank`` belongs to.

    Collective over the ranks of each block; all ranks walk the lattice in the same order.
    """
    groups: dict[Block, CpGroup] = {}
    for block in lattice(config.size, config.degrees):
        if block.degree == 1 or rank not in block:
            continue
        group = CpGroup(
            name=f"{config.pool_id}/cp/{block.first}x{block.degree}",
            store=store,
            size=block.degree,
            rank=rank - block.first,
            device=device,
            timeout=GROUP_TIMEOUT,
        )
        group.warm_up()
        groups[block] = group
    logger.info("CP groups ready: %s", ", ".join(f"{b.first}x{b.degree}" for b in groups))
    return groups
