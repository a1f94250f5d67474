"""Reserved prefill work: what q_w is made of.

One reservation per request, named by the request. ``RequestTable`` is the only caller of
``release``; releasing what is not reserved is no error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vertumnus_router.core.types import BlockHash, RequestId, WorkerId

_NOTHING: Mapping[BlockHash, int] = {}


@dataclass(slots=True)
class Reservation:
    """Predicted prefill work of one request at one worker, and the blocks it will leave there."""

    worker: WorkerId
    service_s: float
    uncached_tokens: int
    blocks: tuple[BlockHash, ...] = ()
    started: bool = False
    #: another prefill ran at the worker meanwhile, or it moved between workers: the reported
    #: time is not that of one prefill at one worker
    shared: bool = False


@dataclass(slots=True)
class _Account:
    """The reservations of one worker, in the order they were bound.

    ``running_s`` is the work that the started ones had left at ``as_of_s``; the ranks are one
    timeline, so elapsed time is spent on the running ones together, once.
    """

    reserved: dict[RequestId, Reservation] = field(default_factory=dict)
    running: dict[RequestId, float] = field(default_factory=dict)
    waiting_s: float = 0.0
    running_s: float = 0.0
    as_of_s: float = 0.0
    tokens: int = 0
    #: how many of the reservations will leave a block
    blocks: dict[BlockHash, int] = field(default_factory=dict)

    def left(self, now: float) -> dict[RequestId, float]:
        """What the running prefills have left, in the order they began: the time since
        ``as_of_s`` was spent on the first, then on the next."""
        left = dict(self.running)
        elapsed_s = now - self.as_of_s
        for request, left_s in self.running.items():
            spent_s = min(left_s, elapsed_s)
            left[request] = left_s - spent_s
            elapsed_s -= spent_s
            if elapsed_s <= 0:
                break
        return left

    def settle(self, now: float) -> None:
        """Let what is left at ``now`` be what is known."""
        self.running, self.as_of_s = self.left(now), now
        self.running_s = sum(self.running.values())


class Ledger:
    """Reservations by worker. q_w ages with the running prefill; queued ones do not age.

    A reservation covers the prefill only. Requests that decode at a colocated worker slow its
    prefills down, and q_w leaves that out: the online correction of the model absorbs it on
    average.
    """

    def __init__(self) -> None:
        self._accounts: dict[WorkerId, _Account] = {}
        self._where: dict[RequestId, WorkerId] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._where

    def get(self, request: RequestId) -> Reservation | None:
        account = self._account_of(request)
        return None if account is None else account.reserved[request]

    def reserve(
        self,
        request: RequestId,
        worker: WorkerId,
        service_s: float,
        uncached_tokens: int,
        blocks: tuple[BlockHash, ...] = (),
    ) -> None:
        """Reserve the prefill of ``request`` at ``worker``. ``ValueError`` if it has one."""
        if request in self._where:
            raise ValueError(f"request {request} is reserved at {self._where[request]} already")
        account = self._accounts.setdefault(worker, _Account())
        account.reserved[request] = Reservation(worker, service_s, uncached_tokens, blocks)
        account.waiting_s += service_s
        account.tokens += uncached_tokens
        for block in blocks:
            account.blocks[block] = account.blocks.get(block, 0) + 1
        self._where[request] = worker

    def start(self, request: RequestId, now: float) -> None:
        """The prefill of ``request`` began; a second start changes nothing."""
        account = self._account_of(request)
        if account is None or account.reserved[request].started:
            return
        reservation = account.reserved[request]
        account.settle(now)
        if account.running:
            reservation.shared = True
            for other in account.running:
                account.reserved[other].shared = True
        reservation.started = True
        account.waiting_s -= reservation.service_s
        account.running[request] = reservation.service_s
        account.running_s += reservation.service_s

    def release(self, request: RequestId, now: float) -> Reservation | None:
        """Give back what ``request`` has reserved; None if that is nothing."""
        account = self._account_of(request)
        if account is None:
            return None
        worker = self._where.pop(request)
        reservation = account.reserved.pop(request)
        if not account.reserved:
            del self._accounts[worker]  # idle: no rounding error may remain
            return reservation
        account.settle(now)
        account.tokens -= reservation.uncached_tokens
        for block in reservation.blocks:
            account.blocks[block] -= 1
            if not account.blocks[block]:
                del account.blocks[block]
        if reservation.started:
            account.running_s -= account.running.pop(request)
        else:
            account.waiting_s -= reservation.service_s
        return reservation

    def move(self, request: RequestId, worker: WorkerId, scale: float, now: float) -> None:
        """The rest of the prefill of ``request`` is done by ``worker``, which needs ``scale``
        times as long for it. Nothing to do for a request without a reservation."""
        account = self._account_of(request)
        if account is None:
            return
        account.settle(now)
        left_s = account.running.get(request, account.reserved[request].service_s)
        old = account.reserved[request]
        self.release(request, now)
        self.reserve(request, worker, left_s * scale, old.uncached_tokens, old.blocks)
        if old.started:
            self.start(request, now)
        self._accounts[worker].reserved[request].shared = True

    def queue_s(self, worker: WorkerId, now: float) -> float:
        """q_w: predicted remaining seconds of the prefills assigned to ``worker``."""
        account = self._accounts.get(worker)
        if account is None:
            return 0.0
        left_s = account.running_s - (now - account.as_of_s)
        return max(0.0, account.waiting_s) + max(0.0, left_s)

    def running(self, worker: WorkerId, now: float) -> Mapping[RequestId, float]:
        """The prefills that have begun at ``worker``, and the seconds that each has left."""
        account = self._accounts.get(worker)
        return {} if account is None else account.left(now)

    def load(self, worker: WorkerId) -> tuple[int, int]:
        """Uncached tokens of the unfinished prefills, and of those without the last bound."""
        account = self._accounts.get(worker)
        if account is None:
            return 0, 0
        last = next(reversed(account.reserved.values()))
        return account.tokens, account.tokens - last.uncached_tokens

    def reserved(self, worker: WorkerId) -> int:
        """How many unfinished prefills ``worker`` has."""
        account = self._accounts.get(worker)
        return 0 if account is None else len(account.reserved)

    def in_flight(self, worker: WorkerId) -> Mapping[BlockHash, int]:
        """The blocks that unfinished prefills at ``worker`` will leave there."""
        account = self._accounts.get(worker)
        return _NOTHING if account is None else account.blocks

    def _account_of(self, request: RequestId) -> _Account | None:
        worker = self._where.get(request)
        return None if worker is None else self._accounts[worker]
