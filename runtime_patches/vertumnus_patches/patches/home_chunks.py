"""Send KV from the home of its request only."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.in_hand import home_of
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def send_at_home(
    original: Callable[..., None],
    scheduler: Any,
    req: Any,
    last_chunk: bool = False,
    end_idx: int | None = None,
) -> None:
    if seams.rank.answers(home_of(req)):
        original(scheduler, req, last_chunk, end_idx)


PATCH = Patch(
    id="home-chunks",
    target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
    kind=Kind.AROUND,
    hook=send_at_home,
    processes=(Process.RANK,),
    why="the other ranks of a block have neither a sender nor a place for the first token",
    upstream="every rank of a CP group has both, and is silent by a flag that is set at start",
    remove_when="the sender of a request is chosen per request",
    signature=("self", "req", "last_chunk", "end_idx"),
    fingerprint="0fb4ec8a366d80c2",
)
