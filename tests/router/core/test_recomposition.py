"""The controller inside the control plane: what it is told, and what it may command."""

from typing import Any

import pytest
from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.effects import Effect, PlanEnded, Regroup
from vertumnus_router.core.events import (
    MoveOutcome,
    RankLost,
    ReconfigureRequested,
    RegroupEnded,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.types import PlanId, PoolId, Rank, RequestId, worker_id
from vertumnus_router.core.verdict import Action, Reason, Verdict
from vertumnus_router.lattice import Block, format_composition, parse_composition

from tests.router.core.scene import Scene, chain, joined, reported, with_overhead

P = PoolId("p")
#: Ê_1 = R/1000, Ê_2 = 0.5 + R/2000: 1000 tokens take 1 s at either degree, so κ is 10 s at both.
PROFILE = with_overhead(0.5)


class Controlled(Scene):
    """``window`` lets requests come and go, and gives the verdict and what follows from it."""

    def __init__(self, composition: str = "1x2,2x1", mode: str = "on", **other: Any) -> None:
        config = ControllerConfig(mode=mode, rho=0.5, window_s=20.0)
        super().__init__(composition, PROFILE, controller=config, **other)
        self.names = 0
        self.feed(Tick())

    def requests(self, *tokens: int, **other: Any) -> None:
        for length in tokens:
            self.names += 1
            self.arrive(f"r{self.names}", length, **other)
            self.feed(RequestFinished(RequestId(f"r{self.names}")))

    def window(self, *tokens: int) -> tuple[Verdict, list[Effect]]:
        self.requests(*tokens)
        self.wait(20.0)
        verdict, *effects = self.feed(Tick())
        assert isinstance(verdict, Verdict)
        return verdict, effects

    def verdict(self, *tokens: int) -> Verdict:
        verdict, effects = self.window(*tokens)
        assert effects == []
        return verdict

    def become(self, composition: str, epoch: int) -> list[Effect]:
        effects = []
        for block in parse_composition(composition, 4, (1, 2, 4)):
            for rank in block.ranks:
                effects += self.feed(reported(rank, block, epoch=epoch))
        return effects


OVER = (1000,) * 28  # of 30 s


def test_demand_counts_what_no_rank_has_cached() -> None:
    scene = Controlled()
    scene.store(1, chain(1, 8))  # 800 tokens, on one rank of the larger block
    scene.requests(1000, blocks=chain(1, 10))
    verdict = scene.verdict(2000)
    assert verdict.demand_s == pytest.approx(0.2 + 2.0)
    assert verdict.requests == 2
    assert verdict.reference_degree == 1


def test_a_request_that_is_refused_is_no_demand() -> None:
    scene = Controlled()
    scene.arrive("huge", 200_000)
    verdict = scene.verdict(1000)
    assert (verdict.requests, verdict.demand_s) == (1, pytest.approx(1.0))


def test_demand_that_finds_the_queue_full_is_still_demand() -> None:
    scene = Controlled(composition="2x1", policy="late", queue_limit=1)
    for name in "abcdefgh":
        scene.arrive(name, 3000)
    assert scene.verdict().requests == 8


def test_capacity_is_that_of_the_serving_blocks() -> None:
    scene = Controlled()
    assert scene.verdict(1000).capacity_s == pytest.approx(3 * 10.0)
    scene.feed(RankLost(Rank(P, 3), "it died", "life-1"))
    assert scene.verdict(1000).capacity_s == pytest.approx(2 * 10.0)


def test_degrees_are_compared_by_the_nearest_correction() -> None:
    """The machine is three times slower than profiled, and only degree 1 was ever tried."""
    scene = Controlled(composition="4x1", correction=CorrectionConfig(gain=1.0))
    worker = scene.dispatched("slow", 1000).worker
    scene.start("slow", worker)
    scene.first_token("slow", worker, cached_tokens=0, compute_s=3.0)
    scene.finish("slow")
    verdict = scene.verdict(*(1000,) * 9)
    assert verdict.demand_s == pytest.approx(1.0 + 9 * 3.0)  # the first came before the report
    # A degree-2 worker is no faster than a rank with this mix, however slow the machine is.
    assert dict(verdict.kappa_s)[2] < 1.1 * dict(verdict.kappa_s)[1]


def test_a_pool_that_cannot_be_planned_does_not_hold_the_others() -> None:
    """Some of q's ranks died before anybody here heard of them."""
    scene = Controlled("2x2")
    scene.feed(joined("q", size=4))
    scene.feed(reported(0, Block(0, 1), pool="q"))
    scene.verdict()  # another composition than before
    scene.verdict()
    over = (1000,) * 48  # of 50 s
    assert scene.verdict(*over).reason is Reason.NOT_YET
    verdict, effects = scene.window(*over)
    assert verdict.reason is Reason.OVERLOAD
    assert [effect.pool for effect in effects if isinstance(effect, Regroup)] == [P]


def test_overload_commands_a_split() -> None:
    scene = Controlled()
    assert scene.verdict(*OVER).reason is Reason.NOT_YET
    verdict, effects = scene.window(*OVER)
    assert (verdict.action, verdict.reason) == (Action.SPLIT, Reason.OVERLOAD)
    [command] = effects
    assert isinstance(command, Regroup)
    assert (command.pool, command.plan, command.epoch) == (P, PlanId("controller-2"), 1)
    assert format_composition(command.after) == "4x1"
    assert "p/0x2" not in scene.serving()  # it drains
    scene.feed(RegroupEnded(command.plan, P, MoveOutcome.COMMITTED, 2))
    [ended] = scene.become("4x1", epoch=2)
    assert isinstance(ended, PlanEnded)
    assert ended.reason is None
    assert scene.verdict(*OVER).reason is Reason.COOL_DOWN
    assert scene.verdict(*OVER).capacity_s == pytest.approx(40.0)


def test_underload_commands_a_merge() -> None:
    scene = Controlled(composition="4x1")
    scene.verdict(1000, 1000, 1000)
    verdict, effects = scene.window(1000, 1000, 1000)
    assert verdict.reason is Reason.UNDERLOAD
    [command] = effects
    assert isinstance(command, Regroup)
    assert format_composition(command.after) == "1x2,2x1"


def test_what_the_pool_refuses_is_tried_again_later() -> None:
    scene = Controlled()
    scene.verdict(*OVER)
    _, [command] = scene.window(*OVER)
    assert isinstance(command, Regroup)
    scene.feed(RegroupEnded(command.plan, P, MoveOutcome.REFUSED, None, "busy"))
    reasons = [scene.verdict(*OVER).reason for _ in range(2)]
    assert reasons == [Reason.COOL_DOWN, Reason.NOT_YET]
    _, [again] = scene.window(*OVER)
    assert isinstance(again, Regroup)
    assert again.plan == "controller-5"


def test_observing_names_the_move_and_leaves_the_pool_alone() -> None:
    scene = Controlled(mode="observe")
    scene.verdict(*OVER)
    verdict = scene.verdict(*OVER)
    assert (verdict.action, verdict.reason) == (Action.SPLIT, Reason.OVERLOAD)
    assert verdict.chosen is not None
    assert format_composition(verdict.chosen.move.after) == "4x1"
    assert "p/0x2" in scene.serving()


def test_off_there_is_none() -> None:
    scene = Scene("2x1", PROFILE)
    assert scene.control.controller is None
    scene.arrive("a")
    scene.wait(100.0)
    assert scene.feed(Tick()) == []


def test_an_operators_plan_is_left_alone() -> None:
    scene = Controlled()
    scene.verdict(*OVER)
    scene.feed(ReconfigureRequested(PlanId("by hand"), P, parse_composition("2x2", 4, (1, 2))))
    verdict = scene.verdict(*OVER)
    assert verdict.reason is Reason.UNSETTLED
    assert verdict.detail == "pool p: the pool is moving from 1x2,2x1 to 2x2"
    scene.feed(RegroupEnded(PlanId("by hand"), P, MoveOutcome.COMMITTED, 2))
    scene.become("2x2", epoch=2)
    assert scene.verdict(*OVER).reason is Reason.CHANGED
    assert scene.verdict(*OVER).reason is Reason.COOL_DOWN


def test_ranks_that_do_not_agree_are_waited_for() -> None:
    scene = Controlled(composition="2x2")
    scene.feed(reported(0, Block(0, 1), epoch=2))
    verdict = scene.verdict(*OVER)
    assert verdict.reason is Reason.UNSETTLED
    assert verdict.detail == "pool p: block p/2x2 has not reported epoch 2 yet"


def test_a_failed_block_is_no_candidate() -> None:
    scene = Controlled(composition="2x2")
    scene.feed(RankLost(Rank(P, 0), "it died", "life-1"))
    load = (1000,) * 9  # of the 10 s that are left
    scene.verdict(*load)
    verdict, effects = scene.window(*load)
    assert verdict.reason is Reason.OVERLOAD
    assert [c.option.move.leaving for c in verdict.candidates] == [(Block(2, 2),)]
    [command] = effects
    assert isinstance(command, Regroup)
    assert format_composition(command.after) == "1x2,2x1"


def test_the_block_that_drains_first_goes_first() -> None:
    scene = Controlled(composition="2x2", mode="observe")
    scene.verdict(*(1000,) * 18)
    scene.requests(*(1000,) * 17)
    busy = scene.dispatched("long", 4000)
    scene.wait(20.0)
    scene.start("long", busy.worker)
    verdict, *_ = scene.feed(Tick())
    assert isinstance(verdict, Verdict)
    [first, second] = verdict.candidates
    assert first.option.priced.drain_s == 0.0
    # one chunk of 2000 tokens at degree 2
    assert second.option.priced.drain_s == pytest.approx(0.5 + 2000 / 2000)
    assert worker_id(P, second.option.move.leaving[0]) == busy.worker
    assert verdict.chosen == first.option


def test_a_merge_names_what_it_has_to_reconcile() -> None:
    scene = Controlled(composition="4x1", mode="observe")
    scene.store(0, chain(1, 5))
    scene.verdict(1000, 1000)
    verdict = scene.verdict(1000, 1000)
    assert [c.option.priced.reconcile_tokens for c in verdict.candidates] == [0, 500]
    assert verdict.chosen is not None
    assert verdict.chosen.move.leaving == (Block(2, 1), Block(3, 1))


def test_several_pools_are_one_cluster() -> None:
    scene = Controlled(composition="2x1")
    scene.verdict(1000)
    scene.launch("1x2", pool="q")
    verdict = scene.verdict(1000)
    assert verdict.reason is Reason.CHANGED  # a pool joined
    assert verdict.capacity_s == pytest.approx(3 * 10.0)
    scene.verdict(*OVER)
    scene.verdict(*OVER)
    verdict, [command] = scene.window(*OVER)
    assert isinstance(command, Regroup)
    assert command.pool == "q"
