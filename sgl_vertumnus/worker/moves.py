"""The moves of one pool from composition to composition. Pure: no sockets, no clock.

A move is asked for, *drains* (PREPARE has gone out; the leaders of the blocks that end answer
when they stand at a step boundary), *switches* (COMMIT has gone out; every rank of the blocks
that begin answers when it serves there) and ends ``committed``, ``abandoned`` or ``failed``.
Whoever drives this hands in what happened and carries out the effects, in their order.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vertumnus_patches.regroup_message import Phase
from vertumnus_router.lattice import (
    Block,
    CompositionError,
    format_composition,
    parse_composition,
)
from vertumnus_router.protocol import BlockState, MoveReport, PoolComposition, Stages

from sgl_vertumnus.worker.control import (
    Entered,
    Moved,
    Ready,
    Refused,
    Rejected,
    Switched,
)
from sgl_vertumnus.worker.leaders import Leaders
from sgl_vertumnus.worker.silence import STOOD_STILL_S
from sgl_vertumnus.worker.stages import Draining, Plan, Switching

#: The longest wait for a step boundary: a running chunk of a prefill ends within it.
DRAIN_S = 10.0
#: The longest wait for all ranks to serve in their new blocks.
SWITCH_S = 6.0
#: A rank that has not answered COMMIT gets it again this often.
REPEAT_S = 1.0
#: Reports of ended moves that are kept.
HISTORY = 20
#: Commands that are remembered, so that a repeated one is answered once.
_KNOWN_COMMANDS = 100


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoveAsked:
    """``command`` names the question in its answer; ``epoch`` is the one the asker knows."""

    command: bytes
    composition: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class RankGone:
    """The rank has died, or is silent and as good as dead."""

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; comes every second or more often."""


Event = MoveAsked | Ready | Entered | Switched | Refused | RankGone | Tick


# -- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Give the ranks in ``to`` a command, in order with the requests around it."""

    phase: Phase
    epoch: int
    blocks: tuple[Block, ...]
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """End every rank of ``block`` and every request whose home is one of them."""

    block: Block
    cause: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The one answer to a command."""

    command: bytes
    answer: Rejected | Moved


Effect = Send | Fail | Answer


class MoveMachine:
    """Starts at epoch 0, every rank alone.

    The rules:

    * One move at a time; a command that names another epoch than the present one is rejected,
      and so is one that would change a failed block. A number that a move has used is spent,
      whatever became of the move.
    * The composition that is served already is committed at once: no number, no history.
    * Before COMMIT a death, a refusal or the deadline abandons the move; nothing has changed.
    * COMMIT decides. From then on the new leaders take the requests; a new block with a rank
      that dies or does not answer fails, the others are committed.
    * Time in which the driver stood still, deaf to every answer, does not count.
    * Messages that belong to no present stage of the present move are ignored, a refusal
      behind COMMIT among them: the deadline judges its rank.
    """

    def __init__(self, size: int, degrees: tuple[int, ...]) -> None:
        self._size = size
        self._degrees = degrees
        self._epoch = 0
        self._spent = 0
        self._blocks = tuple(Block(rank, 1) for rank in range(size))
        self._move: Draining | Switching | None = None
        self._reports: deque[MoveReport] = deque(maxlen=HISTORY)
        self._ticked_s: float | None = None
        self._commands: deque[bytes] = deque(maxlen=_KNOWN_COMMANDS)
        self.leaders = Leaders(size)

    @property
    def is_moving(self) -> bool:
        return self._move is not None

    def describe(self) -> PoolComposition:
        """What is committed, where the pool is moving, and its last moves."""
        return PoolComposition(
            epoch=self._epoch,
            composition=format_composition(self._blocks),
            blocks=tuple(
                BlockState(
                    first=block.first,
                    degree=block.degree,
                    state="failed" if self.leaders.is_failed(block) else "serving",
                )
                for block in self._blocks
            ),
            moving=format_composition(self._move.plan.after) if self._move else None,
            moves=tuple(self._reports),
        )

    def on_event(self, event: Event, now: float) -> list[Effect]:
        """What has to be done about ``event``, in this order. ``now``: monotonic seconds."""
        match event:
            case MoveAsked():
                return self._ask(event, now)
            case RankGone(rank, cause):
                return self._lose(rank, cause, now)
            case Tick():
                return self._tick(now)
            case _:
                return self._hear(event, now)

    # -- asking --------------------------------------------------------------

    def _ask(self, asked: MoveAsked, now: float) -> list[Effect]:
        if asked.command in self._commands:
            return []
        self._commands.append(asked.command)
        try:
            after = self._target(asked)
        except _Rejection as exc:
            return [Answer(asked.command, Rejected(str(exc)))]
        plan = Plan(asked.command, self._spent + 1, self._blocks, after, now)
        if not plan.arriving:
            return [Answer(plan.command, Moved(_report(plan, "committed", epoch=self._epoch)))]
        self._spent = plan.epoch
        self._move = Draining(plan, now + DRAIN_S)
        return [Send(Phase.PREPARE, plan.epoch, plan.after, plan.holders)]

    def _target(self, asked: MoveAsked) -> tuple[Block, ...]:
        if self._move is not None:
            plan = self._move.plan
            raise _Rejection(
                f"the pool is moving to {format_composition(plan.after)}, epoch {plan.epoch}"
            )
        if asked.epoch is not None and asked.epoch != self._epoch:
            raise _Rejection(f"the pool is at epoch {self._epoch}, not {asked.epoch}")
        try:
            after = parse_composition(asked.composition, self._size, self._degrees)
        except CompositionError as exc:
            raise _Rejection(str(exc)) from exc
        for block in self._blocks:
            if self.leaders.is_failed(block) and block not in after:
                raise _Rejection(f"{block} has failed and cannot change")
        return after

    # -- what ranks say ------------------------------------------------------

    def _hear(self, message: Ready | Entered | Switched | Refused, now: float) -> list[Effect]:
        move = self._move
        if move is None or message.epoch != move.plan.epoch or not move.plan.moves(message.rank):
            return []
        match move, message:
            case Draining(), Ready(rank, _, at_s) if rank in move.plan.holders:
                move.ready_s.setdefault(rank, at_s)
                if len(move.ready_s) == len(move.plan.holders):
                    return self._commit(move, now)
            case Draining(), Refused(rank, _, reason):
                return self._abandon(move, f"rank {rank}: {reason}")
            case Switching(), Entered(rank, _, at_s):
                move.entered_s.setdefault(rank, at_s)
            case Switching(), Switched(rank, _, at_s):
                move.switched_s.setdefault(rank, at_s)
                return self._settle(move, now)
        return []

    def _commit(self, move: Draining, now: float) -> list[Effect]:
        plan = move.plan
        everybody = tuple(self.leaders.alive)
        self.leaders.regroup(plan.after)
        ready_s = max(move.ready_s.values())
        self._move = Switching(plan, ready_s, now + SWITCH_S, now + REPEAT_S)
        return [Send(Phase.COMMIT, plan.epoch, plan.after, everybody)]

    def _abandon(self, move: Draining, reason: str) -> list[Effect]:
        plan, self._move = move.plan, None
        holders = tuple(rank for rank in plan.holders if rank in self.leaders.alive)
        return [
            Send(Phase.ABANDON, plan.epoch, plan.before, holders),
            self._end(plan, _report(plan, "abandoned", reason=reason)),
        ]

    def _settle(self, move: Switching, now: float) -> list[Effect]:
        """Commit the epoch once no block is awaited any more."""
        if move.pending:
            return []
        plan, self._move = move.plan, None
        self._epoch, self._blocks = plan.epoch, plan.after
        if not move.failed:
            return [self._end(plan, _report(plan, "committed", stages=move.stages(now)))]
        reason = "; ".join(dict.fromkeys(move.failed.values()))
        failed = sorted((block.first, block.degree) for block in move.failed)
        return [self._end(plan, _report(plan, "failed", reason=reason, failed=failed))]

    # -- what does not come --------------------------------------------------

    def _tick(self, now: float) -> list[Effect]:
        since_s = 0.0 if self._ticked_s is None else now - self._ticked_s
        self._ticked_s = now
        if self._move is not None and since_s > STOOD_STILL_S:
            self._move.give_up_s += since_s
        match self._move:
            case Draining() as move if now >= move.give_up_s:
                late = [rank for rank in move.plan.holders if rank not in move.ready_s]
                return self._abandon(move, f"ranks {late} were not ready within {DRAIN_S:g} s")
            case Switching() as move if now >= move.give_up_s:
                return self._give_up(move, now)
            case Switching() as move if now >= move.repeat_s:
                move.repeat_s = now + REPEAT_S
                return [self._repeat(move)]
        return []

    def _repeat(self, move: Switching) -> Send:
        plan = move.plan
        to = set().union(*(plan.listeners(block) for block in move.pending))
        living = tuple(rank for rank in sorted(to) if self.leaders.leader_for(rank) is not None)
        return Send(Phase.COMMIT, plan.epoch, plan.after, living)

    def _give_up(self, move: Switching, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for block in move.pending:
            cause = f"ranks {move.unheard(block)} did not switch within {SWITCH_S:g} s"
            self.leaders.lose(block.first)
            move.failed[block] = cause
            effects.append(Fail(block, cause))
        return [*effects, *self._settle(move, now)]

    def _lose(self, rank: int, cause: str, now: float) -> list[Effect]:
        block = self.leaders.lose(rank)
        if block is None:
            return []
        cause = f"rank {rank}: {cause}"
        effects: list[Effect] = [Fail(block, cause)]
        match self._move:
            case Draining() as move if block in move.plan.leaving:
                effects += self._abandon(move, cause)
            case Switching() as move if block in move.plan.arriving:
                move.failed[block] = cause
                effects += self._settle(move, now)
        return effects

    # -- parts of effects ----------------------------------------------------

    def _end(self, plan: Plan, report: MoveReport) -> Answer:
        self._reports.append(report)
        return Answer(plan.command, Moved(report))


class _Rejection(Exception):
    """Why a move is not begun."""


def _report(
    plan: Plan,
    outcome: str,
    *,
    epoch: int | None = None,
    reason: str | None = None,
    failed: Iterable[tuple[int, int]] = (),
    stages: Stages | None = None,
) -> MoveReport:
    return MoveReport(
        epoch=plan.epoch if epoch is None else epoch,
        before=format_composition(plan.before),
        after=format_composition(plan.after),
        outcome=outcome,
        reason=reason,
        failed=tuple(failed),
        stages=stages,
    )
