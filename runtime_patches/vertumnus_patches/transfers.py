"""KV on its way from a prefill pool to decode servers.

Every rank of a block holds the KV of all its requests, so any of them could send it. The home of a
request does: it is registered at the bootstrap server once, it is in the block that serves the
request whatever the composition, and no other rank of the block knows of the transfer. For them
the request ends with its prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "Elsewhere",
    "advance",
    "bootstrapping",
    "end_aborted",
    "guard_sent",
    "is_prefill_side",
    "let_go",
    "only_waits",
    "polled_here",
    "ready_or_later",
    "release_guards",
    "take_over",
    "write",
]

#: Attribute of SGLang's scheduler: (request, lock) of KV that is being sent while its request
#: waits to go on.
_GUARDS = "vertumnus_guards"
#: After so long a transfer has failed, and its request is tried again.
WRITE_S = 5.0
#: Shortest and longest pause between two looks at a transfer.
_PAUSES_S = (0.0002, 0.002)


class Elsewhere:
    """Stands for the sender of a request on the ranks that are not its home.

    It never holds the block back: what the block waits for is the home's sender.
    """

    def __init__(self) -> None:
        self._aborted = False

    def poll(self) -> int:
        from sglang.srt.disaggregation.base.conn import KVPoll

        return int(KVPoll.Failed if self._aborted else KVPoll.WaitingForInput)

    def abort(self) -> None:
        self._aborted = True

    def failure_exception(self) -> None:
        raise RuntimeError("aborted, or its home could not begin the transfer")

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Nothing is sent from here."""

    def pop_decode_prefix_len(self) -> int:
        return 0


def is_prefill_side(scheduler: Any) -> bool:
    """Whether this rank prefills for decode servers."""
    return getattr(scheduler, "disagg_prefill_bootstrap_queue", None) is not None


def bootstrapping(scheduler: Any) -> list[Any]:
    """Requests whose decode server has not yet said where their KV goes."""
    return list(scheduler.disagg_prefill_bootstrap_queue.queue)


@contextmanager
def ready_or_later(queue: Any, is_home: Callable[[Any], bool]) -> Iterator[None]:
    """Let requests at home here be ready only if their first token has a place to be sent from.

    The other ranks of the block need none, and must not go on without the home.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    later = []
    for request in queue.queue:
        if request.metadata_buffer_index >= 0 or not is_home(request):
            continue
        sender = request.disagg_kv_sender
        status = sender.poll()
        if status >= KVPoll.WaitingForInput:
            if queue.ensure_metadata_buffer(request):
                continue
            status = KVPoll.Bootstrapping
        # Asked again in this pass, it could say more than there is a place for.
        sender.poll = lambda status=status: status
        later.append(sender)
    try:
        yield
    finally:
        for sender in later:
            del sender.poll


@contextmanager
def polled_here(scheduler: Any) -> Iterator[None]:
    """What this rank sends is nobody else's business: poll without the block."""
    block = scheduler.attn_cp_cpu_group
    scheduler.attn_cp_cpu_group = scheduler.attn_tp_cpu_group  # a group of one
    try:
        yield
    finally:
        scheduler.attn_cp_cpu_group = block


def take_over(scheduler: Any, request: Any) -> None:
    """Wait for the handshake of a request that another rank, its home, has begun."""
    if request.disagg_kv_sender is None:  # one with a grammar has not come so far
        heads = scheduler.model_config.num_key_value_heads
        scheduler.disagg_prefill_bootstrap_queue.create_sender(request, heads)


def let_go(scheduler: Any, is_home: Callable[[Any], bool]) -> None:
    """Forget the requests of the last step that have been prefilled and are sent by others; their
    KV stays as cached prefixes."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
    from sglang.srt.mem_cache.common import release_kv_cache

    stays = []
    for request in scheduler.disagg_prefill_inflight_queue:
        if is_home(request):
            stays.append(request)
            continue
        if request.finished_reason is None:
            request.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(request, scheduler.tree_cache, checkpoint=True)
        scheduler.tree_cache.finish(request.cache_request_handle, CacheRequestOutcome.SUCCESS)
    scheduler.disagg_prefill_inflight_queue = stays


def advance(scheduler: Any) -> bool:
    """End the requests whose KV has been sent; whether others are still being sent."""
    scheduler.process_disagg_prefill_inflight_queue()
    return bool(scheduler.disagg_prefill_inflight_queue)


def only_waits(scheduler: Any) -> bool:
    """Whether nothing can be computed before a handshake or a transfer has ended."""
    if scheduler.waiting_queue or scheduler.chunked_req is not None:
        return False
    return bool(bootstrapping(scheduler) or scheduler.disagg_prefill_inflight_queue)


def write(
    engine: Any, session: str, sources: list[int], targets: list[int], lengths: list[int]
) -> int:
    """Write memory into another process's with Mooncake, addresses and lengths in bytes; blocks
    until all of it has arrived. 0, or -1 if something has not.

    One transfer for each piece: the status of a batch is that of its first piece only.
    """
    give_up = time.perf_counter() + WRITE_S
    failed = False
    pending: list[int] = []
    for piece in zip(sources, targets, lengths, strict=True):
        transfer = engine.batch_transfer_async_write(session, *([part] for part in piece))
        if transfer == 0:
            failed = True
            break
        pending.append(transfer)
    pause_s = _PAUSES_S[0]
    # Also after a failure: what has begun still reads its source, which the caller gives back.
    while pending and time.perf_counter() < give_up:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])
        left = []
        for transfer in pending:
            status = engine.transfer_check_status(transfer)
            if status == 0:
                left.append(transfer)
            failed |= status < 0
        pending = left
    return -1 if failed or pending else 0


def end_aborted(scheduler: Any, request: Any) -> None:
    """Give up what a request that is aborted while it waits holds for its transfer."""
    if is_prefill_side(scheduler):
        scheduler.release_aborted_prefill_waiting_req(request)


def guard_sent(scheduler: Any, request: Any) -> None:
    """Keep the KV that has been sent of a suspended request in place: it may still be read."""
    from vertumnus_patches import prefixes  # here: a router lists the patches without torch

    page = prefixes.page_tokens(scheduler)
    sent = request.start_send_idx // page * page
    if sent:
        lock = prefixes.lock(scheduler, request, sent)
        guards = getattr(scheduler, _GUARDS, [])
        setattr(scheduler, _GUARDS, [*guards, (request, lock)])


def release_guards(scheduler: Any) -> None:
    """For requests that have run again as a whole, and keep their KV themselves, or have ended."""
    guards: Sequence[tuple[Any, Any]] = getattr(scheduler, _GUARDS, ())
    if not guards:
        return
    waiting = {id(request) for request in (*scheduler.waiting_queue, scheduler.chunked_req)}
    stay = []
    for request, lock in guards:
        if id(request) in waiting:
            stay.append((request, lock))
        else:
            scheduler.tree_cache.unlock(lock)
    setattr(scheduler, _GUARDS, stay)
