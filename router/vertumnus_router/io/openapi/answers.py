"""The shapes of what the router answers, from which the document's schemas are made.

Nothing is decoded into these; the tests of the document hold the live answers against them.
"""

from typing import Any, Literal

import msgspec


class _Closed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No other fields than these."""


class _Open(msgspec.Struct, kw_only=True):
    """These fields, and maybe others."""


class Fault(_Closed):
    """``code`` is for programs, ``message`` says what to do, ``param`` names the field."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str


class Error(_Closed):
    """Every error that is the router's own, in OpenAI's shape."""

    error: Fault


class EngineFault(_Open):
    message: str


class EngineError(_Open):
    """What a server had against a request, in OpenAI's shape."""

    error: EngineFault


class NotDone(_Open):
    """What was ordered was not done, or not all of it. The other fields say how far it came."""

    error: Fault


class Health(_Closed):
    status: str


class Readiness(_Closed):
    """``reasons``: why requests should not come here yet."""

    status: Literal["ready", "not ready"]
    ready: bool
    reasons: list[str]
    healthy_workers: int
    total_workers: int


class ModelCard(_Closed):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(_Closed):
    object: Literal["list"]
    data: list[ModelCard]


class Price(_Closed):
    """One candidate: ``total_s`` = queue + β·service + λ·extra GPU time, in seconds."""

    worker: str
    degree: int
    cached_tokens: int
    reconcile_tokens: int
    pull_tokens: int
    pull_s: float
    queue_s: float
    service_s: float
    extrapolated: bool
    extra_gpu_s: float
    beta: float
    lam: float = msgspec.field(name="lambda")
    lambda_term_s: float
    total_s: float


class Exclusion(_Closed):
    worker: str
    reason: str


class Explanation(_Open):
    """Where the request would go now, and why; cheapest candidate first. With decode servers also
    which of those."""

    endpoint: str
    input_tokens: int
    output_tokens: int
    exact: bool
    blocks: int
    policy: str
    choice: str | None
    candidates: list[Price]
    excluded: list[Exclusion]
    ttft: dict[str, Any]


class Worker(_Closed):
    id: str
    pool: str
    degree: int
    worker_type: Literal["prefill", "regular"]
    ranks: list[int]
    epoch: int
    state: str
    reason: str | None
    breaker: str
    resting: str | None
    queue_s: float
    requests: int
    load: int
    cached_blocks: int
    partial_blocks: int
    rank_blocks: list[int]
    running_requests: int
    waiting_requests: int
    rank_kv_used_tokens: list[int]


class Move(_Open):
    """A split or a merge. A planned one has its price, one that has ended its outcome and times."""

    before: str = msgspec.field(name="from")
    after: str = msgspec.field(name="to")


class Pool(_Closed):
    pool: str | None
    url: str
    epoch: int | None
    composition: str | None
    workers: list[Worker]
    moving: str | None
    moves: list[Move]
    trouble: str | None


class Controller(_Closed):
    """The last verdicts, oldest first."""

    mode: str
    last_decisions: list[dict[str, Any]]


class Compositions(_Closed):
    pools: list[Pool]
    controller: Controller


class Reconfigured(_Closed):
    """The moves that it took, or with ``dry_run`` would take."""

    pool: str
    moves: list[Move]
    composition: str | None
    epoch: int | None


class HotPrefix(_Closed):
    """Block hashes are 64-bit integers, written as strings."""

    tip: str
    tokens: int
    ranks: list[str]
    workers: list[str]
    accesses: dict[str, float]
    missed_s: dict[str, float]


class Index(_Closed):
    blocks: int
    bytes: int


class Bandwidth(_Closed):
    latency_s: float
    bytes_per_s: float
    copies: int


class Links(_Closed):
    same_pool: Bandwidth
    other_pool: Bandwidth


class Prefixes(_Closed):
    """What is hot and who holds it, what is in flight, what was decided."""

    mode: str
    pull: bool
    scans: int
    scanning: bool
    index: Index
    hot: list[HotPrefix]
    transfers: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    bandwidth: Links


class Transferred(_Closed):
    """All copies or deletions that an order took."""

    tip: str
    worker: str
    outcome: Literal["done"]
    blocks: int
    bytes: int
    seconds: float
    transfers: list[dict[str, Any]]


class Listed(_Open):
    """A worker, with the fields of those in ``/vertumnus/composition``, or a decode server."""

    id: str
    worker_type: Literal["regular", "prefill", "decode"]
    state: str
    reason: str | None
    load: int
    is_healthy: bool
    url: str
    server_id: str
    model_id: str
    priority: int
    cost: float
    connection_mode: str
    metadata: dict[str, str]
    disable_health_check: bool


class Counts(_Closed):
    prefill_count: int
    decode_count: int
    regular_count: int


class Server(_Closed):
    """A URL that the router follows. ``trouble``: why it is not here."""

    url: str
    pool: str | None
    server_id: str
    trouble: str | None
    stale_s: float | None


class Workers(_Closed):
    workers: list[Listed]
    total: int
    stats: Counts
    queued: int
    pending: int
    pools: list[Server]


class Accepted(_Open):
    """It will be done; ``GET /workers/{worker_id}`` tells how it goes."""

    status: Literal["accepted"]
    worker_id: str
    message: str


class Load(_Closed):
    """Tokens of the requests that a server has; -1 if it does not say."""

    worker: str
    load: int


class Loads(_Closed):
    workers: list[Load]


class Flushed(_Closed):
    status: Literal["success", "failure"]
    message: str
    workers_flushed: int
    total_http_workers: int
    total_workers: int
    answers: dict[str, str]
