"""The connections of the lattice, as one rank sees them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from vertumnus_patches.cp_group import CpGroup
from vertumnus_router.lattice import Block, lattice

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.stream import BlockStream

logger = logging.getLogger(__name__)

#: Longest that a rank waits in a collective for the others: they compute the same step, whose
#: layers may take seconds on a slow device and a very long chunk.
GROUP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Links:
    """What ties the ranks of one block together: ``group`` for the model's collectives,
    ``stream`` for what the leader tells its members."""

    group: CpGroup
    stream: BlockStream


def connect_store(config: PoolConfig) -> dist.TCPStore:
    """The rendezvous store that the pool's front keeps."""
    return dist.TCPStore("127.0.0.1", config.ports.store, is_master=False)


def build_links(
    config: PoolConfig, rank: int, store: dist.Store, device: torch.device
) -> Mapping[Block, Links]:
    """Create and warm the links of every block of degree > 1 that ``rank`` belongs to.

    Collective over the ranks of each block; all ranks walk the lattice in the same order.
    """
    links: dict[Block, Links] = {}
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
        links[block] = Links(group, BlockStream.join(config.pool_id, block, rank, store))
    logger.info("CP groups ready: %s", ", ".join(f"{b.first}x{b.degree}" for b in links))
    return links
