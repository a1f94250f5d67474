"""Every way in which the control plane turns a request down, in the words the client reads."""

from collections.abc import Iterable

from vertumnus_router.core.effects import Reject
from vertumnus_router.core.events import Failure, Leg, PoolJoined, RequestFailed
from vertumnus_router.core.requests import Entry
from vertumnus_router.core.types import Request

_STATUS = {
    Failure.UNREACHABLE: (503, "worker_unreachable"),
    Failure.DISCONNECTED: (503, "worker_disconnected"),
    Failure.OVERLOADED: (503, "overloaded"),
    Failure.SERVER_ERROR: (502, "worker_error"),
    Failure.STALLED: (504, "worker_stalled"),
    Failure.CLIENT_ERROR: (400, "invalid_request"),
    Failure.WORKER_LOST: (503, "worker_lost"),
}


def no_pool(request: Request) -> Reject:
    return Reject(request.id, 503, "no_pool", "No pool has joined this router yet; try again.")


def too_large(request: Request, pools: Iterable[PoolJoined]) -> Reject:
    """No pool fits the request: OpenAI's words if the context is what it exceeds."""
    wanted = request.input_tokens + request.output_tokens
    context_tokens = max(pool.context_tokens for pool in pools)
    asked = (
        f"you requested {wanted} tokens ({request.input_tokens} in the messages, "
        f"{request.output_tokens} in the completion)"
    )
    if wanted > context_tokens:
        return Reject(
            request.id,
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {context_tokens} tokens. However, {asked}. "
            f"Please reduce the length of the messages or completion.",
        )
    kv_tokens = max(p.kv_capacity_tokens for p in pools if p.context_tokens >= wanted)
    return Reject(
        request.id,
        400,
        "kv_capacity_exceeded",
        f"A rank of this deployment has room for {kv_tokens} tokens of KV cache. However, {asked}. "
        f"Please reduce the length of the messages or completion.",
    )


def queue_full(request: Request, limit: int, wait_s: float | None) -> Reject:
    """``wait_s``: how long the work takes that the first worker to be done has."""
    return Reject(
        request.id,
        429,
        "queue_full",
        f"The router's queue is full ({limit} requests wait); try again later.",
        retry_s=wait_s,
    )


def no_worker(entry: Entry, timeout_s: float) -> Reject:
    because = f" Its last attempt: {entry.failure}." if entry.failure else ""
    return Reject(
        entry.id,
        503,
        "no_worker",
        f"No worker could take the request for {timeout_s:g} s.{because}",
    )


def no_decode(entry: Entry, timeout_s: float) -> Reject:
    return Reject(
        entry.id,
        503,
        "no_decode",
        f"No decode server was there to answer the request for {timeout_s:g} s.",
    )


def failed(entry: Entry, event: RequestFailed, *, over_budget: bool = False) -> Reject:
    """An attempt failed and there is not to be another: ``over_budget`` if others are being
    repeated instead."""
    status, code = _STATUS[event.failure]
    if event.leg is Leg.DECODE:
        code = code.replace("worker", "decode")
    attempts = f" (attempt {len(entry.tried)})" if len(entry.tried) > 1 else ""
    budget = " (not tried again: too many requests are at the moment)" if over_budget else ""
    return Reject(entry.id, status, code, f"{event.cause}{attempts}{budget}")
