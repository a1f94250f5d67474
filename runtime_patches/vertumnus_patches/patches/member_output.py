"""Let one rank of a block say that a request has ended."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def mute_others(
    original: Callable[..., None], sender: Any, output: Any, recv_obj: Any = None
) -> None:
    if _ends_or_lives(output) and not seams.rank.answers(getattr(recv_obj, "routed_dp_rank", None)):
        return
    original(sender, output, recv_obj)


def _ends_or_lives(output: Any) -> bool:
    """Whether one rank of the block must say so. Control answers are awaited from every rank,
    and tokens are sent for the requests of this home only."""
    from sglang.srt.managers.io_struct import (
        AbortReq,
        ConfigureLoggingReq,
        FreezeGCReq,
        HealthCheckOutput,
    )

    return isinstance(output, (AbortReq, ConfigureLoggingReq, FreezeGCReq, HealthCheckOutput))


PATCH = Patch(
    id="member-output",
    target="sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output",
    kind=Kind.AROUND,
    hook=mute_others,
    processes=(Process.RANK,),
    why="all ranks of a block end a request; the client must hear it once, from the rank that "
    "tells it everything else",
    upstream="ranks with attn_cp_rank > 0 get no socket at start, which is fixed for life",
    remove_when="the sender consults the live CP rank",
    signature=("self", "output", "recv_obj"),
    fingerprint="8a3624d9a7aeba96",
)
