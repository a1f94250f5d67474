"""Carry out what the control plane wants of cached prefixes: copies between ranks, deletions."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

from vertumnus_router.core.effects import Cause, Copy, Reclaim, TransferRefused
from vertumnus_router.core.events import (
    CopyEnded,
    Event,
    ReclaimEnded,
    ReclaimRequested,
    ReplicateRequested,
    TransferOutcome,
)
from vertumnus_router.core.types import BlockHash, Rank, TransferId, WorkerId
from vertumnus_router.io.fronts import Fronts, NoReport, command
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.protocol import (
    MAX_COPY_S,
    CopyCommand,
    CopyReport,
    ReclaimCommand,
    ReclaimReport,
)

log = logging.getLogger(__name__)

#: How much of the time for a copy the ranks have; the rest is for the answer.
_SHARE_OF_RANKS = 0.9
#: A rank's own deadlines end it sooner.
_RECLAIM_TIMEOUT_S = 15.0


class Ranks(Fronts, Protocol):
    """Also what is known of single ranks."""

    def kv_address(self, rank: Rank) -> str | None:
        """Where other ranks fetch from it, "host:port"; None if its pool has left or its ranks
        do not copy."""

    def batches_seen(self, rank: Rank) -> int | None:
        """How many batches of its KV events the index has taken in; None if none are followed."""


Order = Copy | Reclaim
Ended = CopyEnded | ReclaimEnded


@dataclass(frozen=True, slots=True)
class Transferred:
    """A copy or a deletion that an operator asked for, and how it ended."""

    order: Order
    ended: Ended


@dataclass(frozen=True, slots=True)
class _Running:
    order: Order
    begun_s: float
    ended: asyncio.Future[Transferred]


class Transfers:
    """Commands copies and deletions as tasks of their own. Whatever becomes of one, its end is
    told to the control plane, unless the router stops first. Deletions at a rank go one after
    the other, as they were ordered.

    ``pull_s``: how long after its begin a request waits for the copy that goes before it.
    ``copy_s``: how long any other copy may take.
    """

    def __init__(
        self,
        *,
        feed: Callable[[Event], None],
        ranks: Ranks,
        metrics: RouterMetrics,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        source: random.Random,
        pull_s: float,
        copy_s: float,
    ) -> None:
        self._feed = feed
        self._ranks = ranks
        self._metrics = metrics
        self._spawn = spawn
        self._source = source
        self._pull_s = pull_s
        self._copy_s = copy_s
        self._running: dict[TransferId, _Running] = {}
        self._deleting: WeakValueDictionary[Rank, asyncio.Lock] = WeakValueDictionary()
        #: what the control plane answers, while an operator's request is being fed
        self._answers: list[asyncio.Future[Transferred] | TransferRefused] | None = None

    # -- for the control plane -------------------------------------------------------------------

    def carry_out(self, order: Order | TransferRefused) -> None:
        """Returns at once."""
        match order:
            case Copy():
                self._begin(order, partial(self._copy, order, self._copy_s))
            case Reclaim(holder=holder):
                # What the index knows now: an order is not about what comes in between.
                as_of = self._ranks.batches_seen(holder.rank)
                turn = self._deleting.setdefault(holder.rank, asyncio.Lock())
                self._begin(order, partial(self._delete, order, as_of, turn))
            case TransferRefused():
                if self._answers is not None:
                    self._answers.append(order)

    def pull(self, order: Copy) -> None:
        """As ``carry_out``, with the deadline of the request that waits for it. Nothing for a copy
        that is in progress already."""
        if order.transfer not in self._running:
            self._begin(order, partial(self._copy, order, self._pull_s))

    def _begin(self, order: Order, work: Callable[[], Coroutine[Any, Any, Ended]]) -> None:
        loop = asyncio.get_running_loop()
        running = _Running(order, loop.time(), loop.create_future())
        self._running[order.transfer] = running
        if self._answers is not None:
            self._answers.append(running.ended)
        self._spawn(self._see_through(order, work))

    async def _see_through(
        self, order: Order, work: Callable[[], Coroutine[Any, Any, Ended]]
    ) -> None:
        try:
            try:
                ended = await work()
            except Exception as exc:
                log.exception("transfer %s failed inside the router", order.transfer)
                ended = _ended(order, TransferOutcome.FAILED, str(exc) or type(exc).__name__)
            self._tell(order, ended)
            self._feed(ended)
            self._running[order.transfer].ended.set_result(Transferred(order, ended))
        finally:
            running = self._running.pop(order.transfer)
            running.ended.cancel()  # no effect on one that has its result

    def _tell(self, order: Order, ended: Ended) -> None:
        if isinstance(ended, CopyEnded):
            self._metrics.copied(order.cause, ended)
            what = f"{ended.blocks} block(s), {ended.bytes} bytes in {ended.seconds:.3f} s"
        else:
            self._metrics.reclaimed(order.cause, ended)
            what = f"{ended.blocks} block(s) deleted"
        if isinstance(order, Copy):
            where = f"{order.source.rank} to {order.destination.rank}"
        else:
            where = str(order.holder.rank)
        says = ended.reason or what
        log.info("%s, %s, %s: %s", order.transfer, order.cause.value, where, says)

    # -- for those who wait ----------------------------------------------------------------------

    def when_pulled(self, transfer: TransferId, go: Callable[[], None]) -> None:
        """Call ``go`` once when the copy that goes before a request has ended, at the deadline for
        pulls at the latest."""
        loop = asyncio.get_running_loop()
        running = self._running.get(transfer)
        if running is None:
            loop.call_soon(go)
            return
        if running.order.cause is Cause.PULL:  # that is its own deadline
            running.ended.add_done_callback(lambda _: go())
            return

        def ended(_: asyncio.Future[Transferred]) -> None:
            deadline.cancel()
            go()

        def late() -> None:
            running.ended.remove_done_callback(ended)
            go()

        deadline = loop.call_at(running.begun_s + self._pull_s, late)
        running.ended.add_done_callback(ended)

    async def replicate(
        self, tip: BlockHash, worker: WorkerId
    ) -> tuple[Transferred, ...] | TransferRefused:
        """Returns when it has ended, well or badly. It goes on if the caller does not wait."""
        return await self._ask(ReplicateRequested(self._new_id(), tip, worker))

    async def reclaim(
        self, tip: BlockHash, worker: WorkerId
    ) -> tuple[Transferred, ...] | TransferRefused:
        """As ``replicate``. It takes one deletion for each path at each rank."""
        return await self._ask(ReclaimRequested(self._new_id(), tip, worker))

    def _new_id(self) -> TransferId:
        return TransferId(f"operator-{self._source.getrandbits(64):016x}")

    async def _ask(
        self, event: ReplicateRequested | ReclaimRequested
    ) -> tuple[Transferred, ...] | TransferRefused:
        answers: list[asyncio.Future[Transferred] | TransferRefused] = []
        self._answers = answers
        try:
            self._feed(event)
        finally:
            self._answers = None
        running = []
        for one in answers:
            if isinstance(one, TransferRefused):
                return one
            running.append(one)
        await asyncio.wait(running)
        return tuple(one.result() for one in running)

    # -- copies and deletions --------------------------------------------------------------------

    async def _copy(self, order: Copy, timeout_s: float) -> Ended:
        source = self._ranks.kv_address(order.source.rank)
        if source is None:
            return _ended(
                order,
                TransferOutcome.REFUSED,
                f"{order.source.rank} cannot be copied from: its pool has left, or its ranks have "
                "no KV service",
            )
        body = CopyCommand(
            rank=order.destination.rank.index,
            incarnation=order.destination.incarnation,
            source=source,
            source_incarnation=order.source.incarnation,
            blocks=order.blocks,
            timeout_s=min(_SHARE_OF_RANKS * timeout_s, MAX_COPY_S),
        )
        pool = order.destination.rank.pool
        told = await command(self._ranks, pool, "/vertumnus/kv/copy", body, CopyReport, timeout_s)
        if isinstance(told, NoReport):
            return _ended(order, _outcome(told), told.reason)
        outcome, reason = _as_told(told)
        return CopyEnded(
            order.transfer,
            outcome,
            told.blocks,
            told.bytes,
            told.seconds,
            told.transfer_s,
            reason,
        )

    async def _delete(self, order: Reclaim, as_of: int | None, turn: asyncio.Lock) -> Ended:
        rank = order.holder.rank
        if as_of is None:
            return _ended(order, TransferOutcome.REFUSED, f"the events of {rank} are not followed")
        body = ReclaimCommand(
            rank=rank.index,
            incarnation=order.holder.incarnation,
            blocks=order.blocks,
            keep=order.keep,
            as_of=as_of,
        )
        path, timeout_s = "/vertumnus/kv/reclaim", _RECLAIM_TIMEOUT_S
        async with turn:
            told = await command(self._ranks, rank.pool, path, body, ReclaimReport, timeout_s)
        if isinstance(told, NoReport):
            return _ended(order, _outcome(told), told.reason)
        outcome, reason = _as_told(told)
        return ReclaimEnded(order.transfer, outcome, told.blocks, reason)


def _ended(order: Order, outcome: TransferOutcome, reason: str) -> Ended:
    """With nothing to show."""
    kind = CopyEnded if isinstance(order, Copy) else ReclaimEnded
    return kind(order.transfer, outcome, reason=reason)


def _outcome(told: NoReport) -> TransferOutcome:
    return TransferOutcome.REFUSED if told.refused else TransferOutcome.FAILED


def _as_told(report: CopyReport | ReclaimReport) -> tuple[TransferOutcome, str | None]:
    try:
        return TransferOutcome(report.outcome), report.reason
    except ValueError:
        reason = f"its answer is not a report: {report.outcome!r} is no outcome"
        return TransferOutcome.FAILED, reason
