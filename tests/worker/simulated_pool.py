"""Ranks and their supervisor in virtual time, around the machine that decides the moves."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from vertumnus_patches.regroup_message import Phase
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import MoveReport

from sgl_vertumnus.worker.control import (
    SILENT_S,
    Entered,
    Moved,
    Ready,
    Refused,
    Rejected,
    Switched,
)
from sgl_vertumnus.worker.moves import (
    Answer,
    Effect,
    Event,
    Fail,
    MoveAsked,
    MoveMachine,
    RankGone,
    Send,
    Tick,
)

#: A power of two, so that times are exact.
STEP_S = 1 / 16
Report = Ready | Entered | Switched | Refused


@dataclass(frozen=True, slots=True)
class Command:
    phase: Phase
    epoch: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Request:
    home: int


@dataclass(slots=True)
class Rank:
    """One rank: reads its socket while it leads, its leader's stream while it does not."""

    number: int
    block: Block
    epoch: int = 0
    entering: Block | None = None
    alive: bool = True
    stopped_s: float | None = None
    period: int = 2  # acts in every ``period``-th step of time
    refuses: bool = False
    socket: deque[Command | Request] = field(default_factory=deque)
    stream: deque[Command | Request] = field(default_factory=deque)

    @property
    def leads(self) -> bool:
        return self.block.leader == self.number

    @property
    def inbox(self) -> deque[Command | Request]:
        return self.socket if self.leads else self.stream


class SimulatedPool:
    """``distort_command`` and ``distort_report`` say how often a message arrives: 1 unless a
    fault is wanted."""

    def __init__(self, size: int, degrees: tuple[int, ...]) -> None:
        self.machine = MoveMachine(size, degrees)
        self.ranks = [Rank(number, Block(number, 1)) for number in range(size)]
        self.now = 1000.0
        self.steps = count(1)
        self.distort_command: Callable[[Send, int], int] = lambda send, to: 1
        self.distort_report: Callable[[Report], int] = lambda report: 1
        self.asked_s: dict[bytes, float] = {}
        self.answers: dict[bytes, Rejected | Moved] = {}
        self.answered_s: dict[bytes, float] = {}
        self.answer_counts: Counter[bytes] = Counter()
        self.sent: list[Send] = []
        self.failed: list[Block] = []
        self.failed_when_sent: list[list[Block]] = []
        self.exits: deque[int] = deque()
        self.reports: deque[Report] = deque()
        self.lost_commit = False

    # -- what a test does ----------------------------------------------------

    def ask(self, composition: str, epoch: int | None = None) -> bytes:
        command = b"%d" % len(self.asked_s)
        self.asked_s[command] = self.now
        self.feed(MoveAsked(command, composition, epoch))
        return command

    def request(self, home: int) -> None:
        leader = self.machine.leaders.leader_for(home)
        if leader is not None:
            self.ranks[leader].socket.append(Request(home))

    def kill(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.alive:
            rank.alive = False
            self.exits.append(number)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def until_answered(self, command: bytes, limit_s: float = 20) -> Rejected | Moved:
        until = self.now + limit_s
        while command not in self.answers:
            assert self.now < until, "no answer"
            self.step()
        return self.answers[command]

    def settle(self) -> None:
        """Let everything under way end: no new faults, every rank at its best speed."""
        for rank in self.ranks:
            rank.period = 1
        until = self.now + 30
        while not self.is_quiet:
            assert self.now < until, "it does not come to rest"
            self.step()

    @property
    def is_quiet(self) -> bool:
        return not (
            self.machine.is_moving
            or self.reports
            or self.exits
            or any(
                rank.alive and (rank.stopped_s is not None or rank.inbox or rank.entering)
                for rank in self.ranks
            )
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(Block(b.first, b.degree) for b in self.machine.describe().blocks)

    @property
    def history(self) -> tuple[MoveReport, ...]:
        return self.machine.describe().moves

    # -- the supervisor ------------------------------------------------------

    def feed(self, event: Event) -> None:
        for effect in self.machine.on_event(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self.sent.append(effect)
                self.failed_when_sent.append(list(self.failed))
                command = Command(effect.phase, effect.epoch, effect.blocks)
                for to in effect.to:
                    times = self.distort_command(effect, to)
                    self.lost_commit |= times == 0 and effect.phase is Phase.COMMIT
                    self.ranks[to].socket.extend([command] * times)
            case Fail(block):
                self.failed.append(block)
                for number in block.ranks:
                    self.kill(number)
            case Answer(command, answer):
                self.answer_counts[command] += 1
                self.answers[command] = answer
                self.answered_s[command] = self.now

    def step(self) -> None:
        self.now += STEP_S
        while self.reports:
            self.feed(self.reports.popleft())
        while self.exits:
            self.feed(RankGone(self.exits.popleft(), "its process exited"))
        for rank in self.ranks:
            if rank.stopped_s is not None and self.now - rank.stopped_s > SILENT_S:
                self.feed(RankGone(rank.number, f"silent for {SILENT_S:g} s"))
        self.feed(Tick())
        number = next(self.steps)
        for rank in self.ranks:
            turn = (number + rank.number) % rank.period == 0
            if turn and rank.alive and rank.stopped_s is None:
                self.act(rank)

    # -- a rank --------------------------------------------------------------

    def act(self, rank: Rank) -> None:
        """All that has arrived, up to a switch that must wait for others."""
        while rank.inbox and rank.entering is None:
            message = rank.inbox.popleft()
            members = self.ranks[rank.block.first + 1 : rank.block.first + rank.block.degree]
            if rank.leads:
                for member in members:
                    member.stream.append(message)
            match message:
                case Request(home):
                    assert home in rank.block or self.lost_commit, (
                        f"{rank.number} was given a request of {home}"
                    )
                case Command():
                    self.follow(rank, message)
        if rank.entering is not None:
            self.join(rank, rank.entering)

    def follow(self, rank: Rank, command: Command) -> None:
        number, epoch = rank.number, command.epoch
        match command.phase:
            case Phase.PREPARE if rank.refuses:
                self.report(Refused(number, epoch, "it cannot"))
            case Phase.PREPARE if rank.leads:
                self.report(Ready(number, epoch, self.now))
            case Phase.COMMIT if epoch == rank.epoch:
                self.report(Switched(number, epoch, self.now))
            case Phase.COMMIT if epoch > rank.epoch:
                rank.epoch = epoch
                self.report(Entered(number, epoch, self.now))
                block = next(block for block in command.blocks if number in block)
                if block.degree > rank.block.degree:
                    rank.entering = block
                else:
                    self.switch(rank, block)

    def join(self, rank: Rank, block: Block) -> None:
        """A merge: nobody goes on before all have come."""
        others = [self.ranks[number] for number in block.ranks]
        if all(one.alive and (one.entering or one.block) == block for one in others):
            self.switch(rank, block)

    def switch(self, rank: Rank, block: Block) -> None:
        rank.block, rank.entering = block, None
        self.report(Switched(rank.number, rank.epoch, self.now))

    def report(self, report: Report) -> None:
        self.reports.extend([report] * self.distort_report(report))
