"""Reconfigurations: one plan at a time per pool, and one move of it at a time.

A move takes the blocks that end out of placement when it is commanded. The next one begins when
the pool has committed it and the ranks report the new blocks. What does not go well ends the
plan: then the ranks' reports say what serves.
"""

from dataclasses import dataclass, field

from vertumnus_router.core.effects import Effect, PlanEnded, Regroup
from vertumnus_router.core.events import (
    MoveOutcome,
    PoolComposed,
    PoolJoined,
    ReconfigureRequested,
    RegroupEnded,
)
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.moves import Move, PricedMove, adjacent, plan
from vertumnus_router.core.requests import Entry, RequestTable
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import PlanId, PoolId, WorkerState, worker_id
from vertumnus_router.core.verdict import MoveOption, PoolView
from vertumnus_router.core.workers import Worker
from vertumnus_router.lattice import Block, format_composition

#: After a commit the ranks report their new blocks at once; a report that is lost comes again
#: with the next heartbeat.
SETTLE_S = 10.0
#: Weight of a new move in ``step_s``.
_GAIN = 0.2


class RegroupRefused(Exception):
    """The composition cannot be had now; the message says why."""


class OnTheWay(RegroupRefused):
    """The pool is on its way to another composition."""


@dataclass(slots=True)
class _Running:
    """A plan under way. ``epoch`` is the pool's, ``at`` the move that was commanded last;
    ``settle_by_s`` is set once that is committed, while its ranks are yet to report, and
    ``commanded_s`` is when that was."""

    plan: PlanId
    pool: PoolId
    moves: tuple[PricedMove, ...]
    epoch: int
    at: int = 0
    ended: list[RegroupEnded] = field(default_factory=list)
    settle_by_s: float | None = None
    commanded_s: float = 0.0

    @property
    def move(self) -> Move:
        return self.moves[self.at].move

    @property
    def next(self) -> Move | None:
        return self.moves[self.at + 1].move if self.at + 1 < len(self.moves) else None


class Regroups:
    """Plans and commands moves. It changes the membership only by what drains."""

    def __init__(
        self,
        model: PrefillModel,
        index: PrefixIndex,
        membership: Membership,
        ledger: Ledger,
        table: RequestTable,
    ) -> None:
        self._model = model
        self._index = index
        self._membership = membership
        self._ledger = ledger
        self._table = table
        self._running: dict[PoolId, _Running] = {}
        #: the last epoch and composition that each pool has told us, and the blocks of it that
        #: have failed
        self._committed: dict[PoolId, tuple[int, tuple[Block, ...]]] = {}
        self._failed: dict[PoolId, frozenset[Block]] = {}
        self._failures: dict[PoolId, tuple[int, float]] = {}
        #: how long a move takes, from the command until its blocks serve and without the time to
        #: drain; a moving average, None before the first
        self.step_s: float | None = None

    # -- being told -------------------------------------------------------------------------------

    def composed(self, event: PoolComposed) -> None:
        """Take in what the pool says, unless we have heard of a later epoch from it."""
        if self._membership.pool(event.pool) is None:
            return
        known = self._committed.get(event.pool)
        if known is None or event.epoch >= known[0]:
            self._committed[event.pool] = event.epoch, event.blocks
            self._failed[event.pool] = frozenset(event.failed)

    # -- asking -----------------------------------------------------------------------------------

    def composition(self, pool: PoolJoined) -> tuple[Block, ...] | None:
        """The blocks of the pool, failed ones included; None while that is not known."""
        try:
            return self._current(pool)[1]
        except RegroupRefused:
            return None

    def moving(self, pool: PoolId) -> Move | None:
        """The move that the pool is in the middle of, as far as this router commanded it."""
        running = self._running.get(pool)
        return None if running is None else running.move

    def destination(self, pool: PoolId) -> tuple[Block, ...] | None:
        """The composition at the end of the plan under way, None if there is none."""
        running = self._running.get(pool)
        return None if running is None else running.moves[-1].move.after

    def failures(self, pool: PoolId) -> tuple[int, float]:
        """How many plans of the pool have stopped short in a row, and when the last one did."""
        return self._failures.get(pool, (0, 0.0))

    def note(self, pool: PoolId, reason: str | None, now: float) -> None:
        """A plan of the pool is over, and ``reason`` says why it stopped short."""
        if reason is None:
            self._failures.pop(pool, None)
        else:
            self._failures[pool] = self.failures(pool)[0] + 1, now

    def plan(self, pool: PoolId, target: tuple[Block, ...], now: float) -> tuple[PricedMove, ...]:
        """The moves that lead from what the pool is to ``target``, with what each would cost at
        ``now``. Raises ``RegroupRefused``."""
        return self._plan(pool, target, now)[1]

    def _plan(
        self, name: PoolId, target: tuple[Block, ...], now: float
    ) -> tuple[int, tuple[PricedMove, ...]]:
        pool = self._membership.pool(name)
        if pool is None:
            raise RegroupRefused(f"no pool {name} has joined this router")
        if name in self._running:
            raise OnTheWay(f"the pool is moving from {self._running[name].move}")
        epoch, current = self._current(pool)
        for block in current:
            failure = self._failure(name, block)
            if failure is not None and block not in target:
                raise RegroupRefused(
                    f"block {worker_id(name, block)} has failed ({failure}): only a composition "
                    f"that leaves it as it is can be had"
                )
        try:
            moves = plan(current, target, pool.degrees)
        except ValueError as exc:
            raise RegroupRefused(str(exc)) from exc
        for degree in {block.degree for move in moves for block in move.arriving}:
            if (fault := self._membership.degree_fault(degree)) is not None:
                raise RegroupRefused(fault)
        return epoch, tuple(self.price(pool, move, now) for move in moves)

    def _current(self, pool: PoolJoined) -> tuple[int, tuple[Block, ...]]:
        """The epoch and the composition that the pool is at: what it told us, unless a rank
        reports a later epoch, else what all ranks report."""
        committed = self._committed.get(pool.pool)
        epoch = self._membership.epoch(pool.pool)
        if committed is not None and committed[0] >= epoch:
            return committed
        workers = self._membership.workers_of(pool.pool)
        for worker in workers:
            if worker.state is WorkerState.FORMING:
                raise OnTheWay(f"block {worker.id} does not serve yet: {worker.reason}")
            if worker.formed and worker.epoch < epoch:
                raise OnTheWay(f"block {worker.id} has not reported epoch {epoch} yet")
        blocks = tuple(worker.candidate.block for worker in workers)
        if sorted(rank for block in blocks for rank in block.ranks) != list(range(pool.size)):
            raise RegroupRefused("not all ranks of the pool have reported a block that can serve")
        return epoch, blocks

    def _failure(self, pool: PoolId, block: Block) -> str | None:
        """Why a block of the current composition serves no more, None if it works.
        ``RegroupRefused`` if that is not known yet."""
        if block in self._failed.get(pool, ()):
            return "its pool says so"
        here = [
            worker
            for worker in self._membership.workers_of(pool)
            if worker.candidate.block.first in block or block.first in worker.candidate.block
        ]
        if any(worker.formed and worker.candidate.block == block for worker in here):
            return None
        for worker in here:
            if worker.state in (WorkerState.LOST, WorkerState.REFUSED):
                return worker.reason
        raise RegroupRefused(f"block {worker_id(pool, block)} has not reported yet")

    def view(self, pool: PoolJoined, now: float) -> PoolView:
        """The pool as the controller sees it, with every move of one step."""
        workers = self._membership.workers_of(pool.pool)
        serving = tuple(worker.candidate.block for worker in workers if worker.serving)
        try:
            if (move := self.moving(pool.pool)) is not None:
                raise OnTheWay(f"the pool is moving from {move}")
            _, blocks = self._current(pool)
            failed = {block for block in blocks if self._failure(pool.pool, block) is not None}
        except RegroupRefused as exc:
            blocks = tuple(worker.candidate.block for worker in workers)
            unsettled = str(exc) if isinstance(exc, OnTheWay) else None
            return PoolView(pool.pool, blocks, serving, unsettled=unsettled)
        moves = (move for move in adjacent(blocks, pool.degrees) if failed.isdisjoint(move.leaving))
        options = tuple(MoveOption(pool.pool, self.price(pool, move, now)) for move in moves)
        return PoolView(pool.pool, blocks, serving, options=options)

    def price(self, pool: PoolJoined, move: Move, now: float) -> PricedMove:
        """What a move of the pool would cost at ``now``. A later move of a plan begins at blocks
        that do not serve yet: those that serve on their ranks now stand for them."""
        ranks = {rank for block in move.leaving for rank in block.ranks}
        touched = [
            worker
            for worker in self._membership.workers_of(pool.pool)
            if not ranks.isdisjoint(worker.candidate.block.ranks)
        ]
        drain_s = max((self._drain_s(worker, now) for worker in touched), default=0.0)
        blocks = 0
        if move.merges:
            (merged,) = move.arriving
            blocks = self._index.partial_blocks(self._membership.mask(pool.pool, merged))
        return PricedMove(move, drain_s, blocks * pool.block_tokens)

    def _drain_s(self, worker: Worker, now: float) -> float:
        """Predicted time until the worker stands at a step boundary: what its prefills have
        left, or one chunk of them."""
        running = self._ledger.running(worker.id, now)
        entries = map(self._table.get, running)
        chunks = (self._last_chunk_s(entry, worker) for entry in entries if entry is not None)
        return min(sum(running.values()), max(chunks, default=0.0))

    def _last_chunk_s(self, entry: Entry, worker: Worker) -> float:
        """The last chunk of a prefill is the longest: it attends to all the others."""
        candidate = worker.candidate
        reservation = self._ledger.get(entry.id)
        uncached = (
            entry.request.input_tokens if reservation is None else reservation.uncached_tokens
        )
        chunk = min(uncached, candidate.pool.chunk_tokens)
        before = max(0, entry.request.input_tokens - chunk)
        return self._model.service_s(candidate.degree, chunk, before)

    # -- carrying out -----------------------------------------------------------------------------

    def request(self, event: ReconfigureRequested, now: float) -> list[Effect]:
        try:
            epoch, moves = self._plan(event.pool, event.blocks, now)
        except RegroupRefused as exc:
            return [PlanEnded(event.plan, event.pool, reason=str(exc))]
        if not moves:
            return [PlanEnded(event.plan, event.pool)]
        running = self._running[event.pool] = _Running(event.plan, event.pool, moves, epoch)
        return [self._command(running, now)]

    def ended(self, event: RegroupEnded, now: float) -> list[Effect]:
        """Take in how a move ended. One that was not commanded, or ended already, is no news."""
        running = self._running.get(event.pool)
        if running is None or running.plan != event.plan or running.settle_by_s is not None:
            return []
        running.ended.append(event)
        match event.outcome:
            case MoveOutcome.COMMITTED | MoveOutcome.FAILED:
                if event.epoch is not None:
                    running.epoch = event.epoch
                # Its old blocks take no requests until the ranks report that they are gone.
                self._membership.end_drain(event.pool, until=running.epoch)
                failed = self._failed.get(event.pool, frozenset()) | {*event.failed}
                self._committed[event.pool] = running.epoch, running.move.after
                self._failed[event.pool] = failed
                if event.outcome is MoveOutcome.COMMITTED:
                    running.settle_by_s = now + SETTLE_S
                    return self.advance(now)
            case _:
                self._membership.end_drain(event.pool)
        return [self._stop(running, event.reason or event.outcome.value, now)]

    def advance(self, now: float) -> list[Effect]:
        """Go on with the plans whose last move the ranks' reports show, and give up those that
        they do not show in time."""
        effects: list[Effect] = []
        for running in list(self._running.values()):
            if running.settle_by_s is not None:
                effects += self._settled(running, running.settle_by_s, now)
        return effects

    def leave(self, pool: PoolId, cause: str, now: float) -> list[Effect]:
        """All that the pool was is gone."""
        self._committed.pop(pool, None)
        self._failed.pop(pool, None)
        running = self._running.get(pool)
        effects: list[Effect] = [] if running is None else [self._stop(running, cause, now)]
        self._failures.pop(pool, None)
        return effects

    def _settled(self, running: _Running, by_s: float, now: float) -> list[Effect]:
        workers = {w.candidate.block: w for w in self._membership.workers_of(running.pool)}
        following = running.next
        needed = running.move.arriving + (() if following is None else following.leaving)
        for worker in (workers[block] for block in needed if block in workers):
            if worker.state in (WorkerState.LOST, WorkerState.REFUSED):
                reason = f"block {worker.id} has failed: {worker.reason}"
                return [self._stop(running, reason, now)]
        arrived = [workers.get(block) for block in running.move.arriving]
        if all(w is not None and w.formed and w.epoch >= running.epoch for w in arrived):
            running.settle_by_s = None
            self._measure(running, now)
            if following is None:
                self._membership.end_drain(running.pool)
                return [self._stop(running, None, now)]
            running.at += 1
            return [self._command(running, now)]
        if now >= by_s:
            self._membership.end_drain(running.pool)
            new = format_composition(running.move.after)
            reason = f"the ranks do not report {new}, which was committed"
            return [self._stop(running, reason, now)]
        return []

    def _measure(self, running: _Running, now: float) -> None:
        """What the move took beyond what its ranks had to finish first."""
        stages = running.ended[-1].stages
        if stages is not None:
            took_s = max(0.0, now - running.commanded_s - stages.drain / 1000)
            before_s = took_s if self.step_s is None else self.step_s
            self.step_s = before_s + _GAIN * (took_s - before_s)

    def _command(self, running: _Running, now: float) -> Regroup:
        move, running.commanded_s = running.move, now
        self._membership.drain(running.pool, move.leaving, f"the pool is moving from {move}")
        return Regroup(running.plan, running.pool, running.epoch, move.before, move.after)

    def _stop(self, running: _Running, reason: str | None, now: float) -> PlanEnded:
        del self._running[running.pool]
        self.note(running.pool, reason, now)
        return PlanEnded(running.plan, running.pool, running.moves, tuple(running.ended), reason)
