"""Reconfigurations: what is commanded when, what drains meanwhile, and every way to the end."""

import pytest
from vertumnus_router.core.effects import Dispatch, Effect, PlanEnded, Regroup, Reject
from vertumnus_router.core.events import (
    BlocksStored,
    MoveOutcome,
    PoolComposed,
    PoolLost,
    RankLost,
    ReconfigureRequested,
    RegroupEnded,
    Tick,
)
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.regroups import SETTLE_S, RegroupRefused
from vertumnus_router.core.types import PlanId, PoolId, Rank, WorkerState
from vertumnus_router.lattice import Block, format_composition, parse_composition
from vertumnus_router.protocol import Stages

from tests.router.core.scene import IDEAL, Scene, chain, joined, only, reported

P, PLAN = PoolId("p"), PlanId("plan-1")


def laid_out(composition: str, size: int = 4) -> tuple[Block, ...]:
    return parse_composition(composition, size, (1, 2, 4))


def ask(scene: Scene, composition: str, plan: str = PLAN, size: int = 4) -> list[Effect]:
    return scene.feed(ReconfigureRequested(PlanId(plan), P, laid_out(composition, size)))


def ends(
    scene: Scene, outcome: MoveOutcome, epoch: int | None = None, reason: str | None = None
) -> list[Effect]:
    return scene.feed(RegroupEnded(PLAN, P, outcome, epoch, reason))


def report(scene: Scene, composition: str, epoch: int, size: int = 4) -> list[Effect]:
    effects: list[Effect] = []
    for block in laid_out(composition, size):
        for rank in block.ranks:
            effects += scene.feed(reported(rank, block, epoch=epoch))
    return effects


def commanded(effects: list[Effect]) -> tuple[str, str, int]:
    command = only(Regroup, effects)
    return format_composition(command.before), format_composition(command.after), command.epoch


def states(scene: Scene) -> dict[str, str]:
    return {w.id: w.state.value for w in scene.control.workers(scene.now)}


# -- the straight way -----------------------------------------------------------------------------


def test_one_move_from_command_to_service() -> None:
    scene = Scene("2x1,1x2")
    assert commanded(ask(scene, "2x2")) == ("2x1,1x2", "2x2", 1)
    assert states(scene) == {"p/0x1": "draining", "p/1x1": "draining", "p/2x2": "serving"}
    (drained, *_) = scene.control.workers(scene.now)
    assert drained.reason == "the pool is moving from 2x1,1x2 to 2x2"
    assert scene.dispatched("a", 100).worker == "p/2x2"  # the small ones would be cheaper
    assert ends(scene, MoveOutcome.COMMITTED, 2) == []
    assert states(scene)["p/0x1"] == "draining"  # until its rank says that it is gone
    effects = report(scene, "2x2", 2)
    ended = only(PlanEnded, effects)
    assert (ended.plan, ended.pool, ended.reason, len(ended.ended)) == (PLAN, P, None, 1)
    assert states(scene) == {"p/0x2": "serving", "p/2x2": "serving"}
    assert scene.control.moving(P) is None


def test_the_ranks_may_be_heard_before_the_pools_answer() -> None:
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    assert report(scene, "1x2", 2, size=2) == []
    assert states(scene) == {"p/0x2": "serving"}
    assert only(PlanEnded, ends(scene, MoveOutcome.COMMITTED, 2)).reason is None


def test_each_move_waits_for_the_blocks_of_the_one_before() -> None:
    scene = Scene("1x4")
    assert commanded(ask(scene, "4x1")) == ("1x4", "2x2", 1)
    assert ends(scene, MoveOutcome.COMMITTED, 2) == []
    assert report(scene, "1x4", 1) == []  # old news
    effects = report(scene, "2x2", 2)
    assert commanded(effects) == ("2x2", "2x1,1x2", 2)
    assert states(scene) == {"p/0x2": "draining", "p/2x2": "serving"}
    assert ends(scene, MoveOutcome.COMMITTED, 5) == []  # the numbers between were burned
    effects = report(scene, "2x1,1x2", 5)
    assert commanded(effects) == ("2x1,1x2", "4x1", 5)
    ends(scene, MoveOutcome.COMMITTED, 6)
    ended = only(PlanEnded, report(scene, "4x1", 6))
    assert ended.reason is None
    assert [one.epoch for one in ended.ended] == [2, 5, 6]
    assert len(ended.moves) == 3


def test_what_is_asked_for_already_is_done_at_once() -> None:
    scene = Scene("2x1,1x2")
    assert ask(scene, "2x1,1x2") == [PlanEnded(PLAN, P)]


def test_stage_times_are_handed_on() -> None:
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    report(scene, "1x2", 2, size=2)
    stages = Stages(drain=1.0, vote=2.0, switch=3.0, publish=4.0)
    done = RegroupEnded(PLAN, P, MoveOutcome.COMMITTED, 2, stages=stages)
    assert only(PlanEnded, scene.feed(done)).ended == (done,)


# -- traffic meanwhile ----------------------------------------------------------------------------


def test_requests_wait_while_everything_drains_and_the_router_stays_ready() -> None:
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    assert scene.arrive("a") == []
    assert scene.control.is_ready()
    scene.feed(reported(0, Block(0, 2), epoch=2))
    assert scene.control.is_ready()  # nothing serves for this moment
    dispatch = only(Dispatch, scene.feed(reported(1, Block(0, 2), epoch=2)))
    assert dispatch.worker == "p/0x2"


def test_requests_that_drain_go_on_and_move_along() -> None:
    scene = Scene("2x1")
    for name in "ab":
        scene.dispatched(name, 1000)
    assert only(Regroup, ask(scene, "1x2", size=2))
    assert scene.control.violations() == []
    scene.start("a", "p/0x1")
    scene.wait(0.5)
    assert scene.queue_s("p/0x1") == 0.5
    assert report(scene, "1x2", 2, size=2) == []
    assert [w.requests for w in scene.control.workers(scene.now)] == [("a", "b")]
    assert scene.control.violations() == []


def test_a_request_that_failed_everywhere_else_waits_for_what_drains() -> None:
    scene = Scene("2x1,1x2", attempts=9)
    scene.dispatched("a", 9000)
    ask(scene, "2x2")
    assert scene.fail("a") == []
    assert scene.control.queued_count == 1
    effects = ends(scene, MoveOutcome.ABANDONED, 1, "a rank was too slow")
    assert [type(effect) for effect in effects] == [PlanEnded, Dispatch]


def test_explain_says_that_a_worker_drains() -> None:
    scene = Scene("2x1,1x2")
    ask(scene, "2x2")
    dispatch = scene.dispatched("a")
    assert dict(dispatch.decision.excluded)["p/0x1"] == (
        "draining: the pool is moving from 2x1,1x2 to 2x2"
    )


# -- moves that do not go well --------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome", [MoveOutcome.ABANDONED, MoveOutcome.REFUSED, MoveOutcome.UNKNOWN]
)
def test_a_move_that_did_not_happen_ends_the_plan_and_the_old_blocks_serve(
    outcome: MoveOutcome,
) -> None:
    scene = Scene("1x4")
    ask(scene, "4x1")
    assert scene.arrive("a") == []
    effects = ends(scene, outcome, None, "it could not")
    ended, dispatch = effects
    assert isinstance(ended, PlanEnded) and isinstance(dispatch, Dispatch)
    assert (ended.reason, len(ended.moves), len(ended.ended)) == ("it could not", 3, 1)
    assert dispatch.worker == "p/0x4"
    assert scene.control.moving(P) is None


def test_a_failed_move_leaves_to_the_ranks_what_serves() -> None:
    scene = Scene("2x1,1x2")
    ask(scene, "2x2")
    failed = RegroupEnded(PLAN, P, MoveOutcome.FAILED, 2, "rank 1 died", (Block(0, 2),))
    assert only(PlanEnded, scene.feed(failed)).reason == "rank 1 died"
    assert states(scene)["p/0x1"] == "draining"  # the epoch holds: they are gone
    scene.feed(RankLost(Rank(P, 1), "it died"))
    scene.feed(RankLost(Rank(P, 0), "it died"))
    assert scene.serving() == ["p/2x2"]


def test_the_others_move_on_beside_a_block_that_died_before_it_reported() -> None:
    scene = Scene("2x2")
    ask(scene, "1x2,2x1")
    scene.feed(RankLost(Rank(P, 2), "it died"))
    scene.feed(RegroupEnded(PLAN, P, MoveOutcome.FAILED, 2, "rank 2 died", (Block(2, 1),)))
    for rank, block in ((0, Block(0, 2)), (1, Block(0, 2)), (3, Block(3, 1))):
        scene.feed(reported(rank, block, epoch=2))
    assert commanded(ask(scene, "4x1", "plan-2")) == ("1x2,2x1", "4x1", 2)


def test_a_block_that_died_before_it_reported_cannot_change() -> None:
    scene = Scene("2x2")
    ask(scene, "1x2,2x1")
    scene.feed(RankLost(Rank(P, 2), "it died"))
    scene.feed(RegroupEnded(PLAN, P, MoveOutcome.FAILED, 2, "rank 2 died", (Block(2, 1),)))
    scene.feed(reported(3, Block(3, 1), epoch=2))
    reason = only(PlanEnded, ask(scene, "2x2", "plan-2")).reason
    assert reason is not None and "p/2x1 has failed (its pool says so)" in reason


def half_dead() -> Scene:
    """A router that came after ranks 2 and 3 had died: they never report to it."""
    scene = Scene(None)
    scene.feed(joined("p"))
    for rank in (0, 1):
        scene.feed(reported(rank, Block(0, 2), epoch=3))
    return scene


def test_a_router_that_came_later_learns_of_the_dead_from_the_pool() -> None:
    scene = half_dead()
    reason = only(PlanEnded, ask(scene, "2x1,1x2")).reason
    assert reason == "not all ranks of the pool have reported a block that can serve"
    assert scene.control.composition(P) is None
    scene.feed(PoolComposed(P, 3, (Block(0, 2), Block(2, 2)), (Block(2, 2),)))
    assert scene.control.composition(P) == (Block(0, 2), Block(2, 2))
    assert commanded(ask(scene, "2x1,1x2")) == ("2x2", "2x1,1x2", 3)


def test_a_block_that_failed_before_this_router_came_cannot_change() -> None:
    scene = half_dead()
    scene.feed(PoolComposed(P, 3, (Block(0, 2), Block(2, 2)), (Block(2, 2),)))
    reason = only(PlanEnded, ask(scene, "1x4")).reason
    assert reason is not None and "p/2x2 has failed" in reason


def test_what_the_pool_said_before_its_last_move_is_no_news() -> None:
    scene = Scene("2x1,1x2")
    ask(scene, "2x2")
    ends(scene, MoveOutcome.COMMITTED, 2)
    report(scene, "2x2", 2)
    scene.feed(PoolComposed(P, 1, (Block(0, 1), Block(1, 1), Block(2, 2))))
    assert scene.control.composition(P) == (Block(0, 2), Block(2, 2))
    scene.feed(PoolComposed(PoolId("nobody"), 1, (Block(0, 1),)))  # it has left meanwhile


def test_ranks_that_report_a_later_epoch_know_better() -> None:
    scene = Scene("2x1,1x2")
    scene.feed(PoolComposed(P, 1, (Block(0, 1), Block(1, 1), Block(2, 2))))
    report(scene, "2x2", 2)  # another router moved it
    assert scene.control.composition(P) == (Block(0, 2), Block(2, 2))


def test_a_new_block_that_dies_before_it_reports_ends_the_plan() -> None:
    scene = Scene("1x4")
    ask(scene, "4x1")
    ends(scene, MoveOutcome.COMMITTED, 2)
    for rank in (0, 1, 2):
        scene.feed(reported(rank, Block(rank // 2 * 2, 2), epoch=2))
    ended = only(PlanEnded, scene.feed(RankLost(Rank(P, 3), "it died")))
    assert ended.reason == "block p/2x2 has failed: rank 3: it died"
    assert states(scene) == {"p/0x2": "serving", "p/2x2": "lost"}


def test_ranks_that_never_report_end_the_plan() -> None:
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    ends(scene, MoveOutcome.COMMITTED, 2)
    scene.wait(SETTLE_S - 0.1)
    assert scene.feed(Tick()) == []
    scene.wait(0.1)
    ended = only(PlanEnded, scene.feed(Tick()))
    assert ended.reason == "the ranks do not report 1x2, which was committed"
    assert set(states(scene).values()) == {"serving"}


def test_a_pool_that_leaves_ends_its_plan() -> None:
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    ended = only(PlanEnded, scene.feed(PoolLost(P, "front dead")))
    assert ended.reason == "front dead"
    scene.launch("2x1")
    assert set(states(scene).values()) == {"serving"}
    assert ends(scene, MoveOutcome.COMMITTED, 2) == []  # nobody asked any more
    assert only(Regroup, ask(scene, "1x2", "plan-2", 2)).plan == "plan-2"
    assert ends(scene, MoveOutcome.ABANDONED) == []
    assert scene.control.moving(P) is not None


def test_a_pool_that_is_relaunched_ends_its_plan() -> None:
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    effects = scene.feed(joined("p", 2, context_tokens=5))
    assert only(PlanEnded, effects).reason == "the pool was relaunched"


def test_a_block_that_a_move_left_alone_may_report_late() -> None:
    scene = Scene("2x1,1x2")
    ask(scene, "2x2")
    ends(scene, MoveOutcome.COMMITTED, 2)
    for rank in (0, 1):
        effects = scene.feed(reported(rank, Block(0, 2), epoch=2))
    assert only(PlanEnded, effects).reason is None
    assert commanded(ask(scene, "1x4")) == ("2x2", "1x4", 2)


def test_what_another_router_did_is_waited_for() -> None:
    scene = Scene("2x1,1x2")
    for rank in (0, 1):
        scene.feed(reported(rank, Block(0, 2), epoch=2))
    assert refusal(scene, "1x4") == "block p/2x2 has not reported epoch 2 yet"
    for rank in (2, 3):
        scene.feed(reported(rank, Block(2, 2), epoch=2))
    assert commanded(ask(scene, "1x4")) == ("2x2", "1x4", 2)


def test_a_block_that_is_to_move_next_and_dies_ends_the_plan() -> None:
    scene = Scene("4x1")
    ask(scene, "2x2")
    ends(scene, MoveOutcome.COMMITTED, 2)
    scene.feed(reported(0, Block(0, 2), epoch=2))
    ended = only(PlanEnded, scene.feed(RankLost(Rank(P, 3), "it died")))
    assert ended.reason == "block p/3x1 has failed: rank 3: it died"


def test_a_composition_that_comes_back_later_serves() -> None:
    """What was drained is a block in the epochs before the move, not in those after it."""
    scene = Scene("2x1")
    ask(scene, "1x2", size=2)
    failed = RegroupEnded(PLAN, P, MoveOutcome.FAILED, 2, "it hung")
    scene.feed(failed)
    report(scene, "2x1", 3, size=2)
    assert set(states(scene).values()) == {"serving"}


# -- what is refused ------------------------------------------------------------------------------


def refusal(scene: Scene, composition: str, size: int = 4) -> str:
    before = states(scene)
    ended = only(PlanEnded, ask(scene, composition, "refused", size))
    assert ended.moves == ended.ended == ()
    assert ended.reason is not None
    with pytest.raises(RegroupRefused) as refused:
        scene.control.plan(P, laid_out(composition, size), scene.now)
    assert str(refused.value) == ended.reason
    assert states(scene) == before
    return ended.reason


def test_a_pool_that_is_not_there() -> None:
    assert refusal(Scene(None), "4x1") == "no pool p has joined this router"


def test_a_second_plan_while_one_is_under_way() -> None:
    scene = Scene("2x1,1x2")
    ask(scene, "2x2")
    assert refusal(scene, "4x1") == "the pool is moving from 2x1,1x2 to 2x2"


def test_ranks_that_have_not_reported_or_do_not_agree() -> None:
    scene = Scene(None)
    scene.feed(joined())
    assert refusal(scene, "4x1") == "not all ranks of the pool have reported a block that can serve"
    scene.feed(reported(0, Block(0, 2)))
    assert refusal(scene, "4x1") == ("block p/0x2 does not serve yet: rank 1 has not reported yet")


def test_failed_blocks_stay_as_they_are() -> None:
    scene = Scene("2x1,1x2")
    scene.feed(RankLost(Rank(P, 2), "it died"))
    assert refusal(scene, "4x1") == (
        "block p/2x2 has failed (rank 2: it died): only a composition that leaves it as it is can "
        "be had"
    )
    assert commanded(ask(scene, "2x2")) == ("2x1,1x2", "2x2", 1)


def test_a_new_block_that_never_reported_has_failed_as_one() -> None:
    scene = Scene("4x1")
    ask(scene, "1x2,2x1")
    ends(scene, MoveOutcome.COMMITTED, 2)
    for rank in (0, 1):
        effects = scene.feed(RankLost(Rank(P, rank), "it died"))
    scene.wait(SETTLE_S)
    scene.feed(Tick())
    assert refusal(scene, "2x1,1x2").startswith("block p/0x2 has failed (rank 0: it died)")
    assert commanded(ask(scene, "2x2")) == ("1x2,2x1", "2x2", 2)
    assert effects == []


def test_a_degree_that_the_router_cannot_price() -> None:
    scene = Scene(None)
    scene.launch("4x1,1x4", degrees=(1, 4, 8))
    target = (Block(0, 8),)
    with pytest.raises(RegroupRefused, match="8"):
        scene.control.plan(P, target, scene.now)


def test_other_ranks_than_the_pools() -> None:
    assert refusal(Scene("4x1"), "1x2", 2).startswith("not the ranks of one pool")


# -- what a plan is predicted to cost -------------------------------------------------------------


def priced(scene: Scene, composition: str) -> list[tuple[float, int]]:
    moves = scene.control.plan(P, laid_out(composition), scene.now)
    return [(pytest.approx(move.drain_s), move.reconcile_tokens) for move in moves]


def test_an_idle_pool_with_nothing_cached_costs_nothing() -> None:
    assert priced(Scene("1x4"), "4x1") == [(0.0, 0)] * 3


def test_the_drain_is_what_the_running_prefill_has_left() -> None:
    scene = Scene("4x1")
    for name, tokens in (("a", 1000), ("b", 1500)):
        worker = scene.dispatched(name, tokens).worker
        scene.start(name, worker)
    scene.dispatched("queued", 1900)
    scene.wait(0.4)
    assert priced(scene, "1x2,2x1") == [(1.1, 0)]
    assert priced(scene, "2x1,1x2") == [(0.0, 0)]
    scene.wait(5.0)
    assert priced(scene, "1x2,2x1") == [(0.0, 0)]  # overdue: any moment


def test_the_drain_is_one_chunk_at_most() -> None:
    scene = Scene("2x1,1x2")
    worker = scene.dispatched("a", 90_000).worker
    assert worker == "p/2x2"
    scene.start("a", worker)
    assert priced(scene, "4x1") == [(1.0, 0)]  # 2000 tokens at degree 2


def test_the_last_chunk_attends_to_all_that_came_before() -> None:
    values = {name: getattr(IDEAL, name) for name in IDEAL.__struct_fields__}
    scene = Scene("2x1,1x2", Profile(**values | {"alpha_s_per_pair": 1e-8}))
    scene.start("a", scene.dispatched("a", 90_000).worker)
    # R = 2000 behind P = 88,000 at degree 2: (c·R + α·(R·P + R(R+1)/2)) / 2
    assert priced(scene, "4x1") == [((2.0 + 1e-8 * (176e6 + 2_001_000)) / 2, 0)]


def test_a_merge_has_to_reconcile_what_only_some_of_its_ranks_hold() -> None:
    scene = Scene("4x1")
    scene.store(0, chain(1, 10))
    scene.store(1, chain(1, 4))
    scene.store(3, chain(2, 3))
    assert priced(scene, "1x4") == [(0.0, 600), (0.0, 300), (0.0, 1300)]
    for rank in range(4):
        scene.feed(BlocksStored(Rank(P, rank), None, chain(1, 10)))
    assert priced(scene, "1x2,2x1") == [(0.0, 0)]


def test_a_split_has_nothing_to_reconcile() -> None:
    scene = Scene("1x4")
    scene.store(0, chain(1, 10))
    assert priced(scene, "2x2") == [(0.0, 0)]


def test_asking_changes_nothing() -> None:
    scene = Scene("4x1")
    scene.start("a", scene.dispatched("a").worker)
    before = scene.control.workers(scene.now)
    priced(scene, "1x4")
    assert scene.control.workers(scene.now) == before
    assert all(worker.state is WorkerState.SERVING for worker in before)


def test_a_drain_without_end_does_not_hold_requests_for_ever() -> None:
    scene = Scene("2x1", queue_timeout_s=30.0)
    ask(scene, "1x2", size=2)
    scene.arrive("a")
    scene.wait(29.0)
    assert scene.feed(Tick()) == []
    scene.wait(1.0)
    assert only(Reject, scene.feed(Tick())).code == "no_worker"
