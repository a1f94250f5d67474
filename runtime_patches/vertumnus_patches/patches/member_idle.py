"""Members wait for their leader, not on their own sockets."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams


def sleep_if_allowed(original: Callable[..., None], scheduler: Any) -> None:
    seams.rank.sleep(lambda: original(scheduler))


PATCH = Patch(
    id="member-idle",
    target="sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
    kind=Kind.AROUND,
    hook=sleep_if_allowed,
    processes=(Process.RANK,),
    why="a member that sleeps on its own socket would answer its leader up to a second late; "
    "it blocks in the request exchange instead",
    upstream="the idle sleeper is decided at start, by the launch rank",
    remove_when="the idle sleeper consults the live CP rank",
    signature=("self",),
    fingerprint="9431306c7280bd87",
)
