"""Let the home of a request, and no other rank of its block, stream its tokens."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.in_hand import home_of
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def stream_from_home(
    original: Callable[..., None],
    streamer: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
) -> None:
    ours = [request for request in reqs if seams.rank.answers(home_of(request))]
    if ours or not reqs:
        original(streamer, ours, return_logprob, skip_req)


PATCH = Patch(
    id="home-output",
    target="sglang.srt.managers.scheduler_components.output_streamer."
    "SchedulerOutputStreamer.stream_output",
    kind=Kind.AROUND,
    hook=stream_from_home,
    processes=(Process.RANK,),
    why="all ranks of a block have its tokens, and one must send them; the home of a request is "
    "in its block whatever the composition, so that its stream has one source and one order",
    upstream="ranks with attn_cp_rank > 0 get no socket at start, which is fixed for life",
    remove_when="the streamer consults the live CP rank",
    signature=("self", "reqs", "return_logprob", "skip_req"),
    fingerprint="66deba66992b5c9c",
)
