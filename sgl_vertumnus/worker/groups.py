"""The connections of the lattice, as one rank sees them."""

import logging
from collections.abc import Callable, Mapping
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
#: The same between GPUs, where a chunk takes seconds and the first one may wait for a kernel to be
#: compiled. Behind it torch ends the process, which the supervisor sees: the block has failed.
GPU_GROUP_TIMEOUT = timedelta(minutes=5)


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
    config: PoolConfig,
    rank: int,
    store: dist.Store,
    device: torch.device,
    *,
    free_bytes: Callable[[], int] | None = None,
) -> Mapping[Block, Links]:
    """Create and warm the links of every block of degree > 1 that ``rank`` belongs to.

    Collective over the ranks of each block; all ranks walk the lattice in the same order. What a
    communicator takes of the device's memory is told by ``free_bytes`` (default: the driver's
    count, on a GPU) and logged. It is there before SGLang sizes its KV pool, which makes room.
    """
    if device.type == "cuda" and free_bytes is None:
        free_bytes = _free_gpu_bytes
    timeout = GROUP_TIMEOUT if device.type == "cpu" else GPU_GROUP_TIMEOUT
    links: dict[Block, Links] = {}
    taken: dict[Block, int] = {}
    for block in lattice(config.size, config.degrees):
        if block.degree == 1 or rank not in block:
            continue
        before = free_bytes() if free_bytes is not None else 0
        group = CpGroup(
            name=f"{config.pool_id}/cp/{block.first}x{block.degree}",
            store=store,
            size=block.degree,
            rank=rank - block.first,
            device=device,
            timeout=timeout,
        )
        group.warm_up()
        if free_bytes is not None:
            taken[block] = before - free_bytes()
        links[block] = Links(group, BlockStream.join(config.pool_id, block, rank, store))
    logger.info("CP groups ready: %s", ", ".join(_in_words(b, taken.get(b)) for b in links))
    return links


def _in_words(block: Block, taken_bytes: int | None) -> str:
    name = f"{block.first}x{block.degree}"
    return name if taken_bytes is None else f"{name} ({taken_bytes / 2**20:.0f} MiB of the device)"


def _free_gpu_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return int(free)
