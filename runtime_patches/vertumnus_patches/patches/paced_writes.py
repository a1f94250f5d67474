"""Sleep, and do not spin, while Mooncake writes KV."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams
from vertumnus_patches.transfers import write


def sleep_meanwhile(
    original: Callable[..., int],
    engine: Any,
    session_id: str,
    buffers: list[int],
    peer_buffer_addresses: list[int],
    lengths: list[int],
) -> int:
    if not seams.rank.computes_on_cpu:
        return original(engine, session_id, buffers, peer_buffer_addresses, lengths)
    return write(engine.engine, session_id, buffers, peer_buffer_addresses, lengths)


PATCH = Patch(
    id="paced-writes",
    target="sglang.srt.distributed.device_communicators.mooncake_transfer_engine."
    "MooncakeTransferEngine.batch_transfer_sync",
    kind=Kind.AROUND,
    hook=sleep_meanwhile,
    processes=(Process.RANK,),
    why="Mooncake waits for a batch in a busy loop; on a CPU that takes the cores from the ranks, "
    "and from the decode server that the batch waits for",
    upstream="made for RDMA, where a batch takes microseconds and the cores are idle",
    remove_when="Mooncake can wait for a batch without spinning",
    signature=("self", "session_id", "buffers", "peer_buffer_addresses", "lengths"),
    fingerprint="d391ec989304f758",
)
