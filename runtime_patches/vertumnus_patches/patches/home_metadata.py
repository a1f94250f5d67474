"""Only the home of a request needs a place for the first token that goes to the decode server."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.in_hand import home_of
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def place_at_home(original: Callable[..., bool], queue: Any, req: Any) -> bool:
    return not seams.rank.answers(home_of(req)) or original(queue, req)


PATCH = Patch(
    id="home-metadata",
    target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.ensure_metadata_buffer",
    kind=Kind.AROUND,
    hook=place_at_home,
    processes=(Process.RANK,),
    why="the places are taken until a transfer has ended, which only the home follows; a rank "
    "that runs out of them for others would fall out of step",
    upstream="every rank of a CP group takes one for every request",
    remove_when="the sender of a request is chosen per request",
    signature=("self", "req"),
    fingerprint="362c6dfc6be3c487",
)
