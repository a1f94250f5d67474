"""The moves of a pool: each path by example, and all paths with faults at every step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vertumnus_patches.regroup_message import Phase
from vertumnus_router.lattice import Block, format_composition
from vertumnus_router.protocol import BlockState, MoveReport, Stages

from sgl_vertumnus.worker.control import Entered, Moved, Ready, Refused, Rejected, Switched
from sgl_vertumnus.worker.moves import (
    DRAIN_S,
    HISTORY,
    REPEAT_S,
    SWITCH_S,
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
from tests.worker.simulated_pool import STEP_S, SimulatedPool

DEGREES = (1, 2, 4)
A, B, C, D = (Block(rank, 1) for rank in range(4))
AB, CD, ALL = Block(0, 2), Block(2, 2), Block(0, 4)
#: From the question to the answer, whatever happens.
LONGEST_S = DRAIN_S + SWITCH_S + 1
SINGLE, PAIRS, MIXED = (A, B, C, D), (AB, CD), (AB, C, D)


# -- examples: what happens, event by event -------------------------------------------------------


class Scene:
    """A machine of four ranks; events at times given in seconds."""

    def __init__(self) -> None:
        self.machine = MoveMachine(4, DEGREES)

    def tick(self, begin: float, end: float) -> list[Effect]:
        """What ticks bring, one every half second, the last one at ``end``."""
        times = [begin + 0.5 * n for n in range(int(2 * (end - begin)))]
        return [effect for now in (*times, end) for effect in self.at(now, Tick())]

    def at(self, now: float, *events: Event) -> list[Effect]:
        return [effect for event in events for effect in self.machine.on_event(event, now)]

    def ask(self, composition: str, now: float = 0.0, epoch: int | None = None) -> list[Effect]:
        return self.at(now, MoveAsked(b"c", composition, epoch))

    def move(self, *blocks: Block) -> None:
        """Brings the pool to ``blocks``, at once."""
        epoch = self.machine.describe().epoch + 1
        (prepare,) = self.at(0.0, MoveAsked(b"to %d" % epoch, format_composition(blocks)))
        assert isinstance(prepare, Send)
        self.at(0.0, *(Ready(rank, epoch, 0.0) for rank in prepare.to))
        self.at(0.0, *(Switched(rank, epoch, 0.0) for rank in range(4)))
        assert self.states == dict.fromkeys(blocks, "serving")

    @property
    def states(self) -> dict[Block, str]:
        return {Block(b.first, b.degree): b.state for b in self.machine.describe().blocks}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def report_of(effects: list[Effect]) -> MoveReport:
    (answer,) = [effect for effect in effects if isinstance(effect, Answer)]
    assert isinstance(answer.answer, Moved)
    return answer.answer.report


def rejection_of(effects: list[Effect]) -> str:
    (answer,) = effects
    assert isinstance(answer, Answer) and isinstance(answer.answer, Rejected)
    return answer.answer.reason


def test_a_pool_begins_with_every_rank_alone(scene: Scene) -> None:
    told = scene.machine.describe()
    assert (told.epoch, told.composition, told.moving, told.moves) == (0, "4x1", None, ())
    assert told.blocks[1] == BlockState(first=1, degree=1, state="serving")


def test_a_merge_of_two_leaves_the_others_alone(scene: Scene) -> None:
    assert scene.ask("1x2,2x1", 10.0) == [Send(Phase.PREPARE, 1, MIXED, (0, 1))]
    assert scene.machine.describe().moving == "1x2,2x1"
    assert scene.at(10.2, Ready(1, 1, 10.1)) == []
    assert scene.machine.leaders.leader_for(1) == 1, "requests go as before"
    assert scene.at(10.4, Ready(0, 1, 10.25)) == [
        Send(Phase.COMMIT, 1, MIXED, (0, 1, 2, 3)),
    ]
    assert scene.machine.leaders.leader_for(1) == 0
    assert scene.machine.describe().epoch == 0
    events = (Entered(0, 1, 10.5), Entered(1, 1, 10.75), Switched(0, 1, 10.75))
    assert scene.at(10.8, *events) == []
    expected = MoveReport(
        epoch=1,
        before="4x1",
        after="1x2,2x1",
        outcome="committed",
        stages=Stages(drain=250.0, vote=500.0, switch=125.0, publish=1125.0),
    )
    assert scene.at(12.0, Switched(1, 1, 10.875)) == [Answer(b"c", Moved(expected))]
    told = scene.machine.describe()
    assert (told.epoch, told.composition, told.moving) == (1, "1x2,2x1", None)
    assert told.moves == (expected,)


def test_a_split_waits_for_every_rank_but_only_the_leader_holds(scene: Scene) -> None:
    scene.move(ALL)
    assert scene.ask("2x2") == [Send(Phase.PREPARE, 2, PAIRS, (0,))]
    assert scene.at(0.0, Ready(0, 2, 0.0)) == [
        Send(Phase.COMMIT, 2, PAIRS, (0,)),
    ]
    assert scene.at(0.0, *(Switched(rank, 2, 0.0) for rank in (0, 1, 3))) == []
    assert report_of(scene.at(0.0, Switched(2, 2, 0.0))).outcome == "committed"


def test_stages_are_never_negative_and_a_switch_counts_as_an_entry(scene: Scene) -> None:
    scene.ask("2x2", 5.0)
    scene.at(5.0, *(Ready(rank, 1, 4.0) for rank in range(4)))
    scene.at(5.0, Entered(0, 1, 3.5), Switched(0, 1, 3.0), Switched(1, 1, 4.5))
    report = report_of(scene.at(4.0, Switched(2, 1, 3.0), Switched(3, 1, 3.0)))
    assert report.stages == Stages(drain=0.0, vote=500.0, switch=0.0, publish=0.0)


def test_the_composition_that_is_served_costs_nothing(scene: Scene) -> None:
    scene.move(*PAIRS)
    report = report_of(scene.ask("2x2"))
    assert (report.epoch, report.outcome, report.stages) == (1, "committed", None)
    assert len(scene.machine.describe().moves) == 1
    assert scene.ask("2x2") == [], "the same command is answered once"


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stale_command_is_rejected(scene: Scene, epoch: int) -> None:
    scene.move(*PAIRS)
    reason = rejection_of(scene.ask("4x1", epoch=epoch))
    assert reason == f"the pool is at epoch 1, not {epoch}"


@pytest.mark.parametrize("composition", ["", "3x1", "1x8", "5x1", "1x1,1x2,1x1", "-1x4", "axb"])
def test_a_composition_that_does_not_fit_is_rejected(scene: Scene, composition: str) -> None:
    rejection_of(scene.ask(composition))
    assert not scene.machine.is_moving


@pytest.mark.parametrize("stage", ["drain", "switch"])
def test_there_is_one_move_at_a_time(scene: Scene, stage: str) -> None:
    scene.ask("1x4")
    if stage == "switch":
        scene.at(0.0, *(Ready(rank, 1, 0.0) for rank in range(4)))
    reason = rejection_of(scene.at(0.0, MoveAsked(b"d", "2x2")))
    assert reason == "the pool is moving to 1x4, epoch 1"
    assert scene.ask("1x4") == [], "it will be answered once"


def test_a_number_is_spent_by_a_move_that_was_abandoned(scene: Scene) -> None:
    scene.ask("1x4")
    scene.at(0.0, Refused(2, 1, "no"))
    assert scene.machine.describe().epoch == 0
    assert scene.at(0.0, MoveAsked(b"d", "2x2", 0))[0] == Send(
        Phase.PREPARE, 2, PAIRS, (0, 1, 2, 3)
    )


def test_a_refusal_abandons_the_move(scene: Scene) -> None:
    scene.ask("1x2,2x1")
    effects = scene.at(0.0, Ready(0, 1, 0.0), Refused(1, 1, "a session is open"))
    assert effects[0] == Send(Phase.ABANDON, 1, SINGLE, (0, 1))
    report = report_of(effects)
    assert (report.outcome, report.reason) == ("abandoned", "rank 1: a session is open")
    assert scene.states == dict.fromkeys(SINGLE, "serving")
    assert scene.at(0.0, Ready(1, 1, 0.0)) == []


def test_leaders_that_are_not_ready_in_time_abandon_the_move(scene: Scene) -> None:
    scene.ask("1x4", 10.0)
    scene.at(10.0, Ready(0, 1, 10.0), Ready(2, 1, 10.0))
    assert scene.tick(10.0, 10.0 + DRAIN_S - 0.1) == []
    effects = scene.at(10.0 + DRAIN_S, Tick())
    assert effects[0] == Send(Phase.ABANDON, 1, SINGLE, (0, 1, 2, 3))
    assert report_of(effects).reason == f"ranks [1, 3] were not ready within {DRAIN_S:g} s"
    assert not scene.machine.is_moving


def test_a_death_before_commit_abandons_the_move_and_ends_the_old_block(scene: Scene) -> None:
    scene.move(*PAIRS)
    scene.ask("1x4")
    effects = scene.at(0.0, Ready(0, 2, 0.0), RankGone(3, "its process exited"))
    assert effects[:2] == [
        Fail(CD, "rank 3: its process exited"),
        Send(Phase.ABANDON, 2, PAIRS, (0,)),
    ]
    report = report_of(effects)
    assert (report.outcome, report.reason) == ("abandoned", "rank 3: its process exited")
    assert scene.states == {AB: "serving", CD: "failed"}
    assert scene.at(0.0, RankGone(2, "its process exited")) == [], "it was ended with its block"


def test_a_death_elsewhere_does_not_stop_a_move(scene: Scene) -> None:
    scene.ask("1x2,2x1")
    assert scene.at(0.0, RankGone(3, "x")) == [Fail(D, "rank 3: x")]
    effects = scene.at(0.0, Ready(0, 1, 0.0), Ready(1, 1, 0.0))
    assert effects == [Send(Phase.COMMIT, 1, MIXED, (0, 1, 2))]
    assert scene.at(0.0, RankGone(2, "y")) == [Fail(C, "rank 2: y")]
    report = report_of(scene.at(0.0, Switched(0, 1, 0.0), Switched(1, 1, 0.0)))
    assert (report.outcome, report.failed) == ("committed", ())
    assert scene.states == {AB: "serving", C: "failed", D: "failed"}


def test_a_death_after_commit_ends_the_new_block_and_commits_the_others(scene: Scene) -> None:
    scene.ask("2x2")
    scene.at(0.0, *(Ready(rank, 1, 0.0) for rank in range(4)))
    assert scene.at(0.0, RankGone(1, "x")) == [Fail(AB, "rank 1: x")]
    assert scene.at(0.0, RankGone(0, "killed")) == []
    assert scene.at(0.0, Switched(2, 1, 0.0)) == []
    report = report_of(scene.at(0.0, Switched(3, 1, 0.0)))
    assert (report.epoch, report.outcome) == (1, "failed")
    assert (report.failed, report.reason, report.stages) == (((0, 2),), "rank 1: x", None)
    assert scene.machine.describe().epoch == 1
    assert scene.states == {AB: "failed", CD: "serving"}


def test_a_block_that_switched_and_died_before_the_move_ended_has_failed(scene: Scene) -> None:
    scene.ask("2x2")
    scene.at(0.0, *(Ready(rank, 1, 0.0) for rank in range(4)))
    scene.at(0.0, Switched(0, 1, 0.0), Switched(1, 1, 0.0), RankGone(0, "x"))
    report = report_of(scene.at(0.0, Switched(2, 1, 0.0), Switched(3, 1, 0.0)))
    assert (report.outcome, report.failed) == ("failed", ((0, 2),))


def test_a_move_whose_blocks_all_die_ends_at_once(scene: Scene) -> None:
    scene.ask("1x4")
    scene.at(0.0, *(Ready(rank, 1, 0.0) for rank in range(4)))
    effects = scene.at(0.0, RankGone(2, "x"))
    assert effects[:1] == [Fail(ALL, "rank 2: x")]
    assert report_of(effects).failed == ((0, 4),)
    assert "has failed" in rejection_of(scene.at(0.0, MoveAsked(b"d", "4x1")))


def test_ranks_that_do_not_switch_in_time_end_their_new_block(scene: Scene) -> None:
    scene.move(*PAIRS)
    scene.ask("4x1", 10.0)
    scene.at(11.0, Ready(0, 2, 11.0), Ready(2, 2, 11.0))
    scene.at(12.0, *(Switched(rank, 2, 12.0) for rank in (0, 2, 3)))
    assert all(isinstance(effect, Send) for effect in scene.tick(11.0, 11.0 + SWITCH_S - 0.1))
    effects = scene.at(11.0 + SWITCH_S, Tick())
    cause = f"ranks [1] did not switch within {SWITCH_S:g} s"
    assert effects[:1] == [Fail(B, cause)]
    report = report_of(effects)
    assert (report.outcome, report.failed, report.reason) == ("failed", ((1, 1),), cause)
    assert scene.states == {A: "serving", B: "failed", C: "serving", D: "serving"}


@pytest.mark.parametrize("stage", ["drain", "switch"])
def test_time_in_which_nobody_could_be_heard_does_not_count(scene: Scene, stage: str) -> None:
    scene.ask("2x2", 0.0)
    scene.at(0.0, Tick())
    if stage == "switch":
        scene.at(0.0, *(Ready(rank, 1, 0.0) for rank in range(4)))
    limit_s = DRAIN_S if stage == "drain" else SWITCH_S
    assert all(isinstance(effect, Send) for effect in scene.tick(100.0, 100.0 + limit_s - 0.1))
    effects = scene.at(100.0 + limit_s, Tick())
    assert report_of(effects).outcome == ("abandoned" if stage == "drain" else "failed")


def test_a_merge_that_one_rank_does_not_reach_ends_all_its_ranks(scene: Scene) -> None:
    scene.ask("2x2", 0.0)
    scene.at(0.0, *(Ready(rank, 1, 0.0) for rank in range(4)))
    scene.at(0.0, *(Switched(rank, 1, 0.0) for rank in (0, 2, 3)))
    scene.tick(0.0, SWITCH_S - 0.5)
    effects = scene.at(SWITCH_S, Tick())
    assert effects[:1] == [Fail(AB, f"ranks [1] did not switch within {SWITCH_S:g} s")]


def test_commit_is_repeated_through_old_and_new_leaders(scene: Scene) -> None:
    scene.move(AB, C, D)
    scene.ask("2x1,1x2", 0.0)
    after = (A, B, CD)
    scene.at(0.0, *(Ready(rank, 2, 0.0) for rank in (0, 2, 3)))
    assert scene.at(REPEAT_S - 0.1, Tick()) == []
    repeat = Send(Phase.COMMIT, 2, after, (0, 1, 2, 3))
    assert scene.at(REPEAT_S, Tick()) == [repeat]
    assert scene.at(REPEAT_S, Tick()) == []
    scene.at(REPEAT_S, *(Switched(rank, 2, 0.0) for rank in (0, 2, 3)))
    repeat = replace(repeat, to=(0, 1))
    assert scene.at(2 * REPEAT_S, Tick()) == [repeat], "only to where an answer is due"
    scene.at(2 * REPEAT_S, RankGone(0, "x"))
    assert scene.at(3 * REPEAT_S, Tick()) == [replace(repeat, to=(1,))]


def test_a_failed_block_cannot_change_but_others_can(scene: Scene) -> None:
    scene.move(AB, C, D)
    scene.at(0.0, RankGone(1, "x"))
    for composition in ("4x1", "1x4"):
        reason = rejection_of(scene.at(0.0, MoveAsked(composition.encode(), composition)))
        assert "has failed and cannot change" in reason
    assert scene.ask("2x2") == [Send(Phase.PREPARE, 2, PAIRS, (2, 3))]
    assert scene.at(0.0, Ready(2, 2, 0.0), Ready(3, 2, 0.0)) == [
        Send(Phase.COMMIT, 2, PAIRS, (2, 3)),
    ]


@pytest.mark.parametrize(
    "message",
    [
        Ready(0, 1, 0.0),  # of an older epoch
        Ready(0, 3, 0.0),  # of none that was ever begun
        Ready(1, 2, 0.0),  # a member does not answer for its block
        Ready(2, 2, 0.0),  # its block does not change
        Refused(2, 2, "x"),
        Refused(0, 1, "x"),
        Entered(0, 2, 0.0),  # too early
        Switched(0, 2, 0.0),
    ],
)
def test_what_does_not_belong_to_the_drain_is_ignored(scene: Scene, message: Event) -> None:
    scene.move(AB, C, D)
    scene.ask("4x1")
    assert scene.at(0.0, message) == []
    assert scene.at(0.0, Ready(0, 2, 0.0))[0] == Send(Phase.COMMIT, 2, SINGLE, (0, 2, 3))


@pytest.mark.parametrize(
    "message",
    [
        Ready(0, 2, 0.0),
        Refused(0, 2, "too late"),
        Switched(0, 1, 0.0),
        Switched(2, 2, 0.0),
        Entered(0, 1, 9.0),
    ],
)
def test_what_does_not_belong_to_the_switch_is_ignored(scene: Scene, message: Event) -> None:
    scene.move(AB, C, D)
    scene.ask("4x1")
    scene.at(0.0, Ready(0, 2, 0.0))
    assert scene.at(0.0, message) == []
    scene.at(0.0, Switched(1, 2, 0.0), Switched(1, 2, 5.0))
    report = report_of(scene.at(0.0, Switched(0, 2, 0.0)))
    assert report.stages == Stages(drain=0, vote=0, switch=0, publish=0)
    assert scene.at(0.0, message) == [], "nor after the move"


def test_the_last_moves_are_kept(scene: Scene) -> None:
    for number in range(HISTORY + 2):
        scene.move(*(PAIRS if number % 2 == 0 else SINGLE))
    moves = scene.machine.describe().moves
    assert [move.epoch for move in moves] == list(range(3, HISTORY + 3))


# -- one fault at every step ----------------------------------------------------------------------

Fault = Callable[[SimulatedPool, int], None]
#: Longer than a move without faults takes.
STEPS = 10


def compositions(size: int) -> list[tuple[Block, ...]]:
    """All ways to divide the pool, by hand: four ranks at a time."""
    four = [SINGLE, (AB, C, D), (A, B, CD), (AB, CD), (ALL,)]
    if size == 4:
        return four
    shifted = [tuple(Block(b.first + 4, b.degree) for b in blocks) for blocks in four]
    return [(*low, *high) for low in four for high in shifted]


def kill(pool: SimulatedPool, rank: int) -> None:
    pool.kill(rank)


def stop(pool: SimulatedPool, rank: int) -> None:
    pool.ranks[rank].stopped_s = pool.now


def slow_down(pool: SimulatedPool, rank: int) -> None:
    pool.ranks[rank].period = 32  # two seconds


def distort_commands(pool: SimulatedPool, rank: int, times: int) -> None:
    until = pool.now + STEP_S
    pool.distort_command = lambda send, to: times if to == rank and pool.now <= until else 1


def distort_reports(pool: SimulatedPool, rank: int, times: int) -> None:
    until = pool.now + 4 * STEP_S
    pool.distort_report = lambda report: times if report.rank == rank and pool.now <= until else 1


@pytest.mark.parametrize(
    ("fault", "is_fatal"),
    [
        (kill, True),
        (stop, True),
        (slow_down, False),
        (partial(distort_commands, times=0), False),
        (partial(distort_commands, times=2), False),
        (partial(distort_reports, times=0), False),
        (partial(distort_reports, times=2), False),
    ],
    ids=["kill", "stop", "slow", "lose-command", "repeat-command", "lose-report", "repeat-report"],
)
def test_a_single_fault_is_over_in_ten_seconds(fault: Fault, is_fatal: bool) -> None:
    for before, after in permutations(compositions(4), 2):
        for rank, steps in product(range(4), range(-1, STEPS)):
            pool = SimulatedPool(4, DEGREES)
            pool.until_answered(pool.ask(format_composition(before)))
            pool.settle()
            for one in pool.ranks:
                one.period = 2
            if steps < 0:
                fault(pool, rank)
            command = pool.ask(format_composition(after))
            if steps >= 0:
                pool.advance(steps * STEP_S)
                fault(pool, rank)
            answer = pool.until_answered(command)
            assert isinstance(answer, Moved)
            assert pool.answered_s[command] - pool.asked_s[command] <= 10 + 2 * STEP_S
            pool.settle()
            check_quiescence(pool)
            lost = {number for block in pool.failed for number in block.ranks}
            assert bool(lost) == is_fatal == (rank in lost)
            mates = {number for b in (*before, *after) if rank in b for number in b.ranks}
            assert lost <= mates, "other workers serve on"


def check_quiescence(pool: SimulatedPool) -> None:
    told = pool.machine.describe()
    states = {Block(b.first, b.degree): b.state for b in told.blocks}
    for block, state in states.items():
        for number in block.ranks:
            rank = pool.ranks[number]
            assert rank.alive == (state == "serving"), f"{block} is {state}"
            if rank.alive:
                assert rank.block == block and rank.entering is None
                assert rank.epoch == told.epoch or pool.lost_commit
    assert pool.machine.leaders.alive == [
        b.leader for b, state in states.items() if state == "serving"
    ]


# -- many faults at all times ---------------------------------------------------------------------


class FaultyPool(RuleBasedStateMachine):
    @initialize(data=st.data(), size=st.sampled_from([4, 8]))
    def start(self, data: st.DataObject, size: int) -> None:
        self.pool = SimulatedPool(size, DEGREES)
        self.pool.distort_command = lambda send, to: self.command_faults.pop(to, 1)
        self.pool.distort_report = lambda report: self.report_faults.pop(report.rank, 1)
        self.command_faults: dict[int, int] = {}
        self.report_faults: dict[int, int] = {}
        self.epoch = 0
        blocks = data.draw(st.sampled_from(compositions(size)), label="blocks")
        self.pool.until_answered(self.pool.ask(format_composition(blocks)))

    def rank(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.pool.ranks) - 1), label="rank")

    @rule(data=st.data(), steps=st.integers(0, 8))
    def move(self, data: st.DataObject, steps: int) -> None:
        """Somewhere where the pool can go, if it is not on the move."""
        failed = {
            Block(b.first, b.degree)
            for b in self.pool.machine.describe().blocks
            if b.state == "failed"
        }
        targets = [c for c in compositions(len(self.pool.ranks)) if failed <= set(c)]
        target = data.draw(st.sampled_from(targets), label="blocks")
        self.pool.ask(format_composition(target))
        self.pool.advance(steps * STEP_S)

    @rule(data=st.data(), back=st.sampled_from([None, 0, 1]))
    def ask(self, data: st.DataObject, back: int | None) -> None:
        """Anything at any time."""
        blocks = data.draw(st.sampled_from(compositions(len(self.pool.ranks))), label="blocks")
        known = None if back is None else self.pool.machine.describe().epoch - back
        self.pool.ask(format_composition(blocks), known)

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(sorted(self.pool.asked_s)), label="command")
        self.pool.feed(MoveAsked(command, "4x1"))

    @rule(steps=st.integers(1, 8))
    def pass_moments(self, steps: int) -> None:
        self.pool.advance(steps * STEP_S)

    @rule(seconds=st.sampled_from([1.5, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.pool.advance(seconds)

    @rule()
    def request(self) -> None:
        for home in self.pool.machine.leaders.serving:
            self.pool.request(home)

    @precondition(lambda self: len(self.pool.failed) < 3)
    @rule(data=st.data(), fault=st.sampled_from([kill, stop]))
    def lose(self, data: st.DataObject, fault: Fault) -> None:
        fault(self.pool, self.rank(data))

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.pool.ranks[self.rank(data)].stopped_s = None

    @rule(data=st.data(), period=st.sampled_from([1, 3, 20, 100, 250]))
    def slow_down(self, data: st.DataObject, period: int) -> None:
        self.pool.ranks[self.rank(data)].period = period

    @rule(data=st.data(), refuses=st.booleans())
    def refuse(self, data: st.DataObject, refuses: bool) -> None:
        self.pool.ranks[self.rank(data)].refuses = refuses

    @rule(data=st.data(), times=st.sampled_from([0, 2, 3]))
    def distort_next_command(self, data: st.DataObject, times: int) -> None:
        self.command_faults[self.rank(data)] = times

    @rule(data=st.data(), times=st.sampled_from([0, 2, 3]))
    def distort_next_report(self, data: st.DataObject, times: int) -> None:
        self.report_faults[self.rank(data)] = times

    @invariant()
    def every_command_is_answered_once_and_in_time(self) -> None:
        pool = self.pool
        for command, asked_s in pool.asked_s.items():
            times = pool.answer_counts[command]
            assert times <= 1
            assert pool.answered_s.get(command, pool.now) - asked_s < LONGEST_S

    @invariant()
    def epochs_only_grow(self) -> None:
        epoch = self.pool.machine.describe().epoch
        assert epoch >= self.epoch
        self.epoch = epoch
        begun = [send.epoch for send in self.pool.sent if send.phase is Phase.PREPARE]
        assert begun == sorted(set(begun)), "no number is used twice"

    @invariant()
    def no_move_touches_a_failed_block(self) -> None:
        """``failed_when_sent`` are the blocks that had failed when the command went out."""
        for send, failed in zip(self.pool.sent, self.pool.failed_when_sent, strict=True):
            if send.phase is Phase.PREPARE:
                assert set(failed) <= set(send.blocks)

    @invariant()
    def those_who_lead_are_known(self) -> None:
        leaders = self.pool.machine.leaders
        assert {leaders.leader_for(home) for home in leaders.serving} == set(leaders.alive)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.command_faults.clear()
        self.report_faults.clear()
        self.pool.settle()
        self.every_command_is_answered_once_and_in_time()
        check_quiescence(self.pool)
        assert all(self.pool.answer_counts[command] == 1 for command in self.pool.asked_s)


TestFaultyPool = FaultyPool.TestCase
TestFaultyPool.settings = settings(deadline=None, max_examples=300, stateful_step_count=30)
