"""Keep members of a block from answering requests that their leader answers."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def mute_member(
    original: Callable[..., None], sender: Any, output: Any, recv_obj: Any = None
) -> None:
    if seams.rank.is_member and _answers_a_client(output):
        return
    original(sender, output, recv_obj)


def _answers_a_client(output: Any) -> bool:
    """Whether ``output`` belongs to a request; control answers are awaited from every rank."""
    from sglang.srt.managers.io_struct import (
        AbortReq,
        BaseBatchReq,
        ConfigureLoggingReq,
        FreezeGCReq,
        HealthCheckOutput,
    )

    return isinstance(
        output, (AbortReq, BaseBatchReq, ConfigureLoggingReq, FreezeGCReq, HealthCheckOutput)
    )


PATCH = Patch(
    id="member-output",
    target="sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output",
    kind=Kind.AROUND,
    hook=mute_member,
    processes=(Process.RANK,),
    why="members compute the same tokens as their leader; one answer must reach the client",
    upstream="ranks with attn_cp_rank > 0 get no socket at start, which is fixed for life",
    remove_when="the sender consults the live CP rank",
    signature=("self", "output", "recv_obj"),
    fingerprint="8a3624d9a7aeba96",
)
