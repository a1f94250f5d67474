"""Give a request a sender at its home, and a stand-in on the other ranks of its block."""

from collections.abc import Callable
from typing import Any

from vertumnus_patches.in_hand import home_of
from vertumnus_patches.record import Kind, Patch, Process
from vertumnus_patches.seams import seams
from vertumnus_patches.transfers import Elsewhere


def send_from_home(original: Callable[..., bool], queue: Any, req: Any, num_kv_heads: int) -> bool:
    if seams.rank.answers(home_of(req)):
        return original(queue, req, num_kv_heads)
    if queue._check_if_req_exceed_kv_capacity(req):
        return False
    req.disagg_kv_sender = Elsewhere()
    queue._process_req(req)
    req.pending_bootstrap = True
    return True


PATCH = Patch(
    id="home-sender",
    target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
    kind=Kind.AROUND,
    hook=send_from_home,
    processes=(Process.RANK,),
    why="decode servers fetch KV from the rank that a request names, which is registered once "
    "and for life; the CP group around it changes",
    upstream="CP rank 0 sends, or all do, as decided and registered at start",
    remove_when="the sender of a request is chosen per request",
    signature=("self", "req", "num_kv_heads"),
    fingerprint="a03caa8c3e91c4ee",
)
