"""A request goes on when its home can send it."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.in_hand import home_of
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams
from vertumnus_patches.transfers import ready_or_later


def pop_ready(original: Callable[..., list[Any]], queue: Any) -> list[Any]:
    with ready_or_later(queue, lambda request: seams.rank.answers(home_of(request))):
        return original(queue)


PATCH = Patch(
    id="home-handshake",
    target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped",
    kind=Kind.AROUND,
    hook=pop_ready,
    processes=(Process.RANK,),
    why="which requests of the queue go on must be the same on all ranks of a block, and the "
    "home alone knows whether it has a place for the first token",
    upstream="every rank of a CP group decides by its own places, after all agree on the "
    "handshakes",
    remove_when="readiness is agreed on across a CP group as a whole",
    signature=("self",),
    fingerprint="5993163af57e6026",
)
