"""Reserved prefill work: what q_w is made of.

One reservation per request, named by the request. ``RequestTable`` is the only caller of
``release``; releasing what is not reserved is no error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vertumnus_router.core.chains import shared_depth
from vertumnus_router.core.types import BlockHash, RequestId, WorkerId

_NO_LOAD = (0, 0)


@dataclass(slots=True)
class Reservation:
    """Predicted prefill work of one request at one worker, and the blocks it will leave there."""

    worker: WorkerId
    service_s: float
    uncached_tokens: int
    blocks: tuple[BlockHash, ...] = ()
    #: whether somebody will tell when the prefill ends. If not, this lasts as long as the answer,
    #: and its tokens count in no ``load``
    told: bool = True
    started: bool = False
    #: another prefill ran at the worker meanwhile, or it moved between workers: the reported
    #: time is not that of one prefill at one worker
    shared: bool = False

    @property
    def load_tokens(self) -> int:
        return self.uncached_tokens if self.told else 0


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
    #: uncached tokens, and without the last bound
    load: tuple[int, int] = _NO_LOAD

    def queue_s(self, now: float) -> float:
        """Predicted remaining seconds."""
        left_s = self.running_s - (now - self.as_of_s)
        return (self.waiting_s if self.waiting_s > 0.0 else 0.0) + (left_s if left_s > 0.0 else 0.0)

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
        #: the reservations that will leave blocks, by the first of them
        self._leaving: dict[BlockHash, dict[RequestId, Reservation]] = {}
        #: grows with every change of what prefills will leave
        self.version = 0

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
        told: bool = True,
    ) -> None:
        """Reserve the prefill of ``request`` at ``worker``. ``ValueError`` if it has one."""
        if request in self._where:
            raise ValueError(f"request {request} is reserved at {self._where[request]} already")
        account = self._accounts.setdefault(worker, _Account())
        reservation = Reservation(worker, service_s, uncached_tokens, blocks, told)
        account.reserved[request] = reservation
        account.waiting_s += service_s
        before = account.load[0]
        account.load = before + reservation.load_tokens, before
        self._where[request] = worker
        if blocks:
            self._leaving.setdefault(blocks[0], {})[request] = reservation
            self.version += 1

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
        if reservation.blocks:
            alike = self._leaving[reservation.blocks[0]]
            del alike[request]
            if not alike:
                del self._leaving[reservation.blocks[0]]
            self.version += 1
        if not account.reserved:
            del self._accounts[worker]  # idle: no rounding error may remain
            return reservation
        account.settle(now)
        tokens = account.load[0] - reservation.load_tokens
        last = next(reversed(account.reserved.values()))
        account.load = tokens, tokens - last.load_tokens
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
        self.reserve(request, worker, left_s * scale, old.uncached_tokens, old.blocks, old.told)
        if old.started:
            self.start(request, now)
        self._accounts[worker].reserved[request].shared = True

    def queue_s(self, worker: WorkerId, now: float) -> float:
        """q_w: predicted remaining seconds of the prefills assigned to ``worker``."""
        account = self._accounts.get(worker)
        return 0.0 if account is None else account.queue_s(now)

    def queues_s(self, workers: Iterable[WorkerId], now: float) -> list[float]:
        """q_w of each."""
        queues_s = []
        for account in map(self._accounts.get, workers):
            if account is None:
                queues_s.append(0.0)
                continue
            # In line, for every request asks about every worker.
            left_s = account.running_s - (now - account.as_of_s)
            waiting_s = account.waiting_s
            queues_s.append(
                (waiting_s if waiting_s > 0.0 else 0.0) + (left_s if left_s > 0.0 else 0.0)
            )
        return queues_s

    def running(self, worker: WorkerId, now: float) -> Mapping[RequestId, float]:
        """The prefills that have begun at ``worker``, and the seconds that each has left."""
        account = self._accounts.get(worker)
        return {} if account is None else account.left(now)

    def load(self, worker: WorkerId) -> tuple[int, int]:
        """Uncached tokens of the unfinished prefills, and of those without the last bound."""
        account = self._accounts.get(worker)
        return _NO_LOAD if account is None else account.load

    def loads(self, workers: Iterable[WorkerId]) -> list[tuple[int, int]]:
        """The same of each."""
        accounts = map(self._accounts.get, workers)
        return [_NO_LOAD if account is None else account.load for account in accounts]

    def computing(self, blocks: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many blocks of the chain unfinished prefills will leave, by worker; without those
        that will leave none."""
        depths: dict[WorkerId, int] = {}
        if blocks and blocks[0] in self._leaving:
            count = len(blocks)
            for one in self._leaving[blocks[0]].values():
                depth, theirs = depths.get(one.worker, 1), one.blocks
                # Most share a first block that all prompts begin with, and no more.
                if depth < count and depth < len(theirs) and theirs[depth] == blocks[depth]:
                    depth = shared_depth(theirs, blocks)
                depths[one.worker] = depth
        return depths

    def _account_of(self, request: RequestId) -> _Account | None:
        worker = self._where.get(request)
        return None if worker is None else self._accounts[worker]
