"""Reconfigurations of a pool that answers, fails and falls silent at every step.

The pool here commits, abandons or loses what it likes, tells the router late or never, and its
ranks report one by one. Whatever happens, every plan ends once, every command starts from what
the pool is, and no request is lost or goes to a block that is about to end. That holds for the
plans of operators, and with a hasty controller among them.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vertumnus_router.core.config import ControllerConfig, PolicyConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import Abort, Dispatch, Effect, PlanEnded, Regroup
from vertumnus_router.core.events import (
    Event,
    Failure,
    MoveOutcome,
    RankLost,
    ReconfigureRequested,
    RegroupEnded,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.regroups import SETTLE_S
from vertumnus_router.core.types import PlanId, PoolId, Rank, RequestId, WorkerId, worker_id
from vertumnus_router.core.verdict import Verdict
from vertumnus_router.lattice import Block, parse_composition

from tests.router.core.scene import joined, reported, request, with_overhead

P, LADDER = PoolId("p"), (1, 2, 4)
COMPOSITIONS = ["4x1", "2x1,1x2", "1x2,2x1", "2x2", "1x4"]
UNDONE = [MoveOutcome.ABANDONED, MoveOutcome.REFUSED, MoveOutcome.UNKNOWN]


class Moves(RuleBasedStateMachine):
    controller = ControllerConfig(mode="observe")

    def __init__(self) -> None:
        super().__init__()
        config = PolicyConfig(queue_timeout_s=1000.0, attempts=99, controller=self.controller)
        self.control = ControlPlane(config, with_overhead(0.1))
        self.now = 0.0
        self.names = 0
        self.plan: PlanId | None = None
        self.command: Regroup | None = None
        self.switched = False
        # The pool as it is, and what each rank has told of it.
        self.epoch = 1
        self.burned = 0
        self.blocks: tuple[Block, ...] = ()
        self.dead: set[int] = set()
        self.told: dict[int, tuple[int, Block]] = {}
        self.live: dict[RequestId, WorkerId | None] = {}

    def feed(self, event: Event) -> list[Effect]:
        effects = self.control.on_event(event, self.now)
        for effect in effects:
            match effect:
                case Verdict():
                    if effect.command is not None:
                        assert self.plan is None, "nobody interferes with a plan"
                        self.plan = PlanId(f"controller-{effect.window}")
                case Regroup():
                    self.take_command(effect)
                case PlanEnded():
                    assert effect.plan == self.plan, "a plan ends once"
                    assert self.command is None
                    self.plan = None
                case Dispatch():
                    assert self.live[effect.request_id] is None
                    if self.command is not None:
                        leaving = set(self.command.before) - set(self.command.after)
                        assert effect.worker not in {worker_id(P, block) for block in leaving}
                    self.live[effect.request_id] = effect.worker
                case Abort():
                    worker = self.live[effect.request_id]
                    self.live[effect.request_id] = None
                    failed = RequestFailed(
                        effect.request_id, Failure.WORKER_LOST, "lost", worker=worker
                    )
                    self.feed(failed)
                case _:
                    del self.live[effect.request_id]
        return effects

    def take_command(self, command: Regroup) -> None:
        assert self.command is None, "one move at a time"
        assert command.plan == self.plan
        smaller, larger = sorted(
            (set(command.before) - set(command.after), set(command.after) - set(command.before)),
            key=len,
        )
        assert (len(smaller), len(larger)) == (1, 2), "adjacent"
        self.command, self.switched = command, False
        assert not self.dead & self.ranks_that_move()

    @initialize(composition=st.sampled_from(COMPOSITIONS))
    def launch(self, composition: str) -> None:
        self.blocks = parse_composition(composition, 4, LADDER)
        self.feed(joined())
        for rank in range(4):
            self.rank_reports(rank)

    # -- what the operator and the clients do ---------------------------------------------------

    @rule(composition=st.sampled_from(COMPOSITIONS))
    def ask(self, composition: str) -> None:
        target = parse_composition(composition, 4, LADDER)
        self.names += 1
        asked = PlanId(f"plan-{self.names}")
        if self.plan is not None:
            effects = self.control.on_event(ReconfigureRequested(asked, P, target), self.now)
            assert [type(effect) for effect in effects] == [PlanEnded]
            return
        self.plan = asked
        self.feed(ReconfigureRequested(asked, P, target))

    @rule(tokens=st.sampled_from([100, 3000, 20_000]))
    def arrive(self, tokens: int) -> None:
        self.names += 1
        new = request(f"r{self.names}", tokens)
        self.live[new.id] = None
        self.feed(RequestArrived(new))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([r for r, worker in self.live.items() if worker]))
        del self.live[request_id]
        self.feed(RequestFinished(request_id))

    # -- what the pool does ---------------------------------------------------------------------

    @precondition(lambda self: self.command is not None and not self.switched)
    @rule(burned=st.integers(0, 2))
    def pool_switches(self, burned: int) -> None:
        assert self.command is not None
        failed = {block for block in self.blocks if self.dead & set(block.ranks)}
        if self.command.epoch == self.epoch and failed <= set(self.command.after):
            assert self.command.before == self.blocks
            self.epoch += 1 + burned
            self.blocks, self.switched = self.command.after, True

    def ranks_that_move(self) -> set[int]:
        assert self.command is not None
        leaving = set(self.command.before) - set(self.command.after)
        return {rank for block in leaving for rank in block.ranks}

    @precondition(lambda self: self.command is not None)
    @rule(undone=st.sampled_from(UNDONE), heard=st.booleans())
    def pool_answers(self, undone: MoveOutcome, heard: bool) -> None:
        command, self.command = self.command, None
        assert command is not None
        if not self.switched:
            ended = RegroupEnded(command.plan, P, undone, None, "it could not")
        elif not heard:
            ended = RegroupEnded(command.plan, P, MoveOutcome.UNKNOWN, None, "no answer")
        else:
            lost = {block for block in self.blocks if self.dead & set(block.ranks)}
            new = lost - set(command.before)
            outcome = MoveOutcome.FAILED if new else MoveOutcome.COMMITTED
            ended = RegroupEnded(command.plan, P, outcome, self.epoch, None, tuple(new))
        self.feed(ended)

    @rule(rank=st.integers(0, 3))
    def rank_reports(self, rank: int) -> None:
        if rank not in self.dead:
            block = next(block for block in self.blocks if rank in block)
            self.told[rank] = self.epoch, block
            self.feed(reported(rank, block, epoch=self.epoch))

    @precondition(lambda self: len(self.dead) < 2)
    @rule(rank=st.integers(0, 3))
    def rank_dies(self, rank: int) -> None:
        """Its block goes with it."""
        block = next(block for block in self.blocks if rank in block)
        for member in block.ranks:
            if member not in self.dead:
                self.dead.add(member)
                self.feed(RankLost(Rank(P, member), "it died", "life-1"))

    @rule(seconds=st.sampled_from([0.1, SETTLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.control.violations() == []
        assert self.control.pending_count == len(self.live)
        assert (self.control.moving(P) is None) == (self.plan is None)

    @invariant()
    def nothing_drains_without_need(self) -> None:
        """With no plan and every living rank heard, what lives serves."""
        if self.plan is None and self.all_heard():
            draining = [w for w in self.control.workers(self.now) if w.state.value == "draining"]
            assert draining == []

    def all_heard(self) -> bool:
        return all(
            self.told.get(rank) == (self.epoch, block)
            for block in self.blocks
            for rank in block.ranks
            if rank not in self.dead
        )

    def teardown(self) -> None:
        """Once the pool answers and its ranks report, the plan ends."""
        for _ in range(10):
            if self.command is not None:
                self.pool_answers(MoveOutcome.ABANDONED, True)
            for rank in range(4):
                self.rank_reports(rank)
            self.time_passes(SETTLE_S)
        assert self.plan is None
        self.nothing_drains_without_need()
        # What ends may let one that waited begin.
        while bound := [one for one, worker in self.live.items() if worker is not None]:
            del self.live[bound[0]]
            self.feed(RequestFinished(bound[0]))
        self.books_are_in_order()
        assert all(worker.queue_s == 0.0 for worker in self.control.workers(self.now))


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Controlled(Moves):
    controller = ControllerConfig(
        mode="on", window_s=0.1, persistence=1, sigmas=0.0, upper=0.5, lower=0.35
    )


TestControlled = Controlled.TestCase
TestControlled.settings = TestMoves.settings
