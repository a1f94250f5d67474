"""Remember the message that a request was made from."""

from typing import Any

from vertumnus_patches.in_hand import MESSAGE
from vertumnus_patches.record import Kind, Patch, Process


def remember_message(result: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    setattr(result, MESSAGE, recv_req)


PATCH = Patch(
    id="request-source",
    target="sglang.srt.managers.scheduler.Scheduler._create_generation_req",
    kind=Kind.AFTER,
    hook=remember_message,
    processes=(Process.RANK,),
    why="ranks that join a block must make the requests that it has in hand; the message is the "
    "only complete description that travels",
    upstream="a request is known to the ranks that received its message",
    remove_when="SGLang can serialise a request",
    signature=("self", "recv_req", "args", "kwargs"),
    fingerprint="4d69d63747e18745",
)
