"""Fluid composition: a request may have the block made that is best for it."""

from itertools import pairwise

import msgspec
import pytest
from vertumnus_router.core.config import (
    ConfigError,
    ControllerConfig,
    FluidConfig,
    PolicyConfig,
    PrefixConfig,
)
from vertumnus_router.core.effects import Dispatch, Effect, PlanEnded, Regroup, Reject
from vertumnus_router.core.events import (
    DecodeJoined,
    DecodeLost,
    MoveOutcome,
    PoolLost,
    RankLost,
    ReconfigureRequested,
    RegroupEnded,
    RequestCancelled,
    Tick,
)
from vertumnus_router.core.policy import FluidPolicy
from vertumnus_router.core.profile import Coefficients, Profile
from vertumnus_router.core.types import DecodeId, PlanId, PoolId, Rank, RequestId
from vertumnus_router.lattice import Block, format_composition
from vertumnus_router.protocol import Stages

from tests.router.core.scene import IDEAL, Scene, chain, only, reported, request, with_overhead

STEP_S = 0.02
AT_FOUR_ONE_SECOND_MORE = msgspec.structs.replace(
    IDEAL, degrees={**IDEAL.degrees, 4: Coefficients(d_s=1.0, a_s_per_token=0.0)}
)


class Pool(Scene):
    """A prefill pool of four ranks that does as it is told, one move at a time."""

    def __init__(
        self, profile: Profile = IDEAL, *, prefill_only: bool = True, **config: object
    ) -> None:
        config.setdefault("fluid", FluidConfig(lam=0.3, lam_busy=0, step_s=STEP_S, rest_s=1.0))
        super().__init__(None, profile, policy="fluid", **config)
        self.feed(DecodeJoined(DecodeId("d"), "1", 100))
        self.launch("4x1", prefill_only=prefill_only)
        self.epoch = 1
        self.commanded: list[str] = []

    def follow(self, effects: list[Effect]) -> list[Effect]:
        """Carry out every move among the effects, and those that these lead to; the others."""
        rest: list[Effect] = []
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Regroup):
                effects += self.commit(effect)
            elif not isinstance(effect, PlanEnded):
                rest.append(effect)
        return rest

    def commit(self, order: Regroup, stages: Stages | None = None) -> list[Effect]:
        self.commanded.append(format_composition(order.after))
        self.epoch += 1
        ended = RegroupEnded(
            order.plan, order.pool, MoveOutcome.COMMITTED, self.epoch, stages=stages
        )
        effects = self.feed(ended)
        for block in order.after:
            for rank in block.ranks:
                effects += self.feed(reported(rank, block, epoch=self.epoch))
        return effects

    def refuse(self, order: Regroup) -> list[Effect]:
        return self.feed(RegroupEnded(order.plan, order.pool, MoveOutcome.REFUSED, reason="no"))


def test_a_long_prompt_has_its_block_made_and_then_goes_there() -> None:
    pool = Pool()
    effects = pool.arrive("long", 4000)
    assert format_composition(only(Regroup, list(effects)).after) in {"2x1,1x2", "1x2,2x1"}
    assert pool.control.queued_count == 1
    dispatch = only(Dispatch, pool.follow(effects))
    assert dispatch.worker == "p/0x4"
    assert pool.commanded[-1] == "1x4"
    assert len(pool.commanded) == 3
    assert pool.control.violations() == []


def test_a_short_one_takes_what_is_there() -> None:
    pool = Pool(with_overhead(0.1))
    assert pool.dispatched("short", 50).worker in {f"p/{rank}x1" for rank in range(4)}
    # Three moves there and back cost more than a shorter prefill saves.
    assert not pool.commanded


def test_what_ranks_stand_still_has_a_price() -> None:
    """Four ranks, three moves: 4·2·60 ms of GPU time, and 60 ms to wait."""
    told = Pool().control.explain(request("x", 4000), 1000.0)
    terms = {terms.worker: terms for terms in told.candidates}
    wide, narrow = terms["p/0x4"], terms["p/0x1"]
    assert wide.queue_s == pytest.approx(3 * STEP_S)
    assert wide.extra_gpu_s == pytest.approx(4 * 2 * 3 * STEP_S)
    assert wide.total == pytest.approx(0.06 + 1.0 + 0.3 * 0.48)
    assert (narrow.queue_s, narrow.extra_gpu_s, narrow.total) == (0.0, 0.0, 4.0)
    assert told.chosen == wide


def test_ranks_that_wait_for_another_cost_their_time() -> None:
    pool = Pool()
    busy = pool.dispatched("short", 50).worker
    pool.start("short", busy)
    told = pool.control.explain(request("x", 4000), pool.now)
    terms = {terms.worker: terms for terms in told.candidates}
    # Three ranks wait 50 ms for the fourth, then come 3 steps.
    assert terms["p/0x4"].queue_s == pytest.approx(0.05 + 3 * STEP_S)
    assert terms["p/0x4"].extra_gpu_s == pytest.approx(3 * 0.05 + 4 * 2 * 3 * STEP_S)
    # The other half is idle.
    (half,) = [name for name in ("p/0x2", "p/2x2") if not ranks_of(name) & ranks_of(busy)]
    assert terms[half].queue_s == pytest.approx(STEP_S)
    assert terms[half].extra_gpu_s == pytest.approx(2 * 2 * STEP_S)


def test_a_block_with_busy_ranks_is_made_when_they_are_done_and_nobody_slips_in() -> None:
    pool = Pool(AT_FOUR_ONE_SECOND_MORE)
    taken = {}
    for name in "abcd":
        worker = pool.dispatched(name, 50).worker
        taken[name] = worker
        pool.start(name, worker)
    assert len(set(taken.values())) == 4
    # 11 s at four ranks, 20 s at two.
    assert pool.arrive("long", 40_000, priority=1) == []
    pool.wait(0.05)
    for name in "abc":
        assert pool.finish(name) == []
    # Three ranks are idle, and promised. At four it would take 1 s.
    assert pool.arrive("short", 50) == []
    assert pool.control.queued_count == 2
    orders = pool.finish("d")
    assert isinstance(orders[0], Regroup)
    assert only(Dispatch, pool.follow(orders)).request_id == "long"
    assert pool.control.violations() == []


def test_one_block_of_a_pool_is_made_at_a_time() -> None:
    pool = Pool(AT_FOUR_ONE_SECOND_MORE)
    pool.feed(DecodeLost(DecodeId("d"), "gone"))
    for name in "ab":
        assert pool.arrive(name, 2000) == []  # two ranks: 1 s, four: 1.5 s
    order = only(Regroup, pool.feed(DecodeJoined(DecodeId("d"), "2", 100)))
    effects = pool.follow([order])
    assert [e.request_id for e in effects if isinstance(e, Dispatch)] == ["a", "b"]
    assert pool.commanded[-1] == "2x2"


def test_a_pool_rests_while_its_ranks_are_busy() -> None:
    pool = Pool()
    (order,) = pool.arrive("first", 4000)
    assert isinstance(order, Regroup)
    pool.refuse(order)
    pool.feed(RequestCancelled(RequestId("first")))
    for number in range(4):
        pool.start(f"{number}", pool.dispatched(f"{number}", 1500).worker)
    told = pool.control.explain(request("x", 4000), pool.now)
    wide = next(terms for terms in told.candidates if terms.worker == "p/0x4")
    # 1.5 s until all are free; the rest of 1 s is over by then.
    assert wide.queue_s == pytest.approx(1.5 + 3 * STEP_S)


def test_a_wide_block_is_split_for_short_prompts() -> None:
    pool = Pool(AT_FOUR_ONE_SECOND_MORE)
    pool.follow(pool.arrive("long", 40_000))
    pool.start("long", "p/0x4")
    assert pool.arrive("short", 100) == []
    pool.commanded.clear()
    # Where it is it would take 1.025 s.
    dispatch = only(Dispatch, pool.follow(pool.finish("long")))
    assert dispatch.worker != "p/0x4"
    assert pool.commanded[0] == "2x2"
    assert pool.control.violations() == []


def test_what_is_computed_on_a_rank_counts_in_every_block_that_has_it() -> None:
    pool = Pool(AT_FOUR_ONE_SECOND_MORE)
    blocks = chain(1, 2)
    where = pool.dispatched("a", 100 * 2 - 150, blocks=blocks).worker
    told = pool.control.explain(request("b", 250, blocks=blocks), pool.now)
    cached = {terms.worker: terms.cached_tokens for terms in told.candidates}
    assert len(cached) == 7
    for worker, tokens in cached.items():
        assert tokens == (200 if ranks_of(where) & ranks_of(worker) else 0), worker


def ranks_of(worker: str) -> set[int]:
    first, degree = map(int, worker.removeprefix("p/").split("x"))
    return set(range(first, first + degree))


def test_a_pool_that_refuses_is_left_alone_for_longer_and_longer() -> None:
    """1 s, then 2 s; before 4 s more, one rank that serves is the faster choice."""
    pool = Pool()
    found = pool.arrive("long", 4000)
    asked_s = []
    while isinstance(found[-1], Regroup) and len(asked_s) < 10:
        asked_s.append(pool.now)
        found = pool.refuse(found[-1])
        for _ in range(20):
            if not isinstance(found[-1], PlanEnded):
                break
            pool.wait(0.25)
            found = pool.feed(Tick()) or found
    assert [b - a for a, b in pairwise(asked_s)] == [1.0, 2.0]
    assert isinstance(found[-1], Dispatch)
    assert found[-1].worker in {f"p/{rank}x1" for rank in range(4)}
    assert pool.now == asked_s[-1]


def test_a_pool_that_decodes_as_well_is_not_moved() -> None:
    pool = Pool(prefill_only=False)
    assert pool.dispatched("long", 4000).worker in {f"p/{rank}x1" for rank in range(4)}


def test_blocks_with_a_lost_rank_are_no_candidates() -> None:
    pool = Pool()
    before = pool.control.explain(request("a", 4000), pool.now)
    assert any(3 in ranks_of(terms.worker) for terms in before.candidates)
    pool.feed(RankLost(Rank(PoolId("p"), 3), "it died", "life-1"))
    told = pool.control.explain(request("x", 4000), pool.now)
    assert {terms.worker for terms in told.candidates} == {"p/0x1", "p/1x1", "p/2x1", "p/0x2"}


def test_gpu_time_costs_more_while_ranks_are_busy() -> None:
    pool = Pool(fluid=FluidConfig(lam=0.3, lam_busy=0.8, step_s=STEP_S))

    def lam() -> float:
        return pool.control.explain(request("x", 100), pool.now).candidates[0].lam

    assert lam() == pytest.approx(0.3)
    pool.follow(pool.arrive("long", 4000))  # on all four ranks
    assert lam() == pytest.approx(0.3 + 0.8)
    pool.start("long", "p/0x4")
    pool.finish("long")
    assert lam() == pytest.approx(0.3)


def test_the_price_of_gpu_time_grows_faster_than_the_busy_ranks() -> None:
    policy = FluidPolicy(PolicyConfig(policy="fluid", fluid=FluidConfig(lam=0.3, lam_busy=0.8)))
    policy.look(0.5)
    assert policy.lam == pytest.approx(0.3 + 0.8 / 4)
    policy.look(1.0)
    policy.observe(0, 4, 0.0)
    policy.observe(40, 4, 100.0)
    assert policy.lam == 1.2  # at most, whatever the backlog


def test_only_one_hand_moves_the_pools() -> None:
    with pytest.raises(ConfigError, match="moves the pools itself"):
        PolicyConfig(policy="fluid", controller=ControllerConfig(mode="on"))


@pytest.mark.parametrize("name", ["step_s", "rest_s", "lam", "lam_busy", "ageing"])
def test_times_are_not_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"fluid.{name}"):
        FluidConfig(**{name: -1.0})


def test_it_starts_where_the_pool_is() -> None:
    """A block that serves is used as it is, without a word to the pool."""
    pool = Pool()
    pool.follow(pool.arrive("a", 4000))
    pool.start("a", "p/0x4")
    pool.finish("a")
    assert Block(0, 4) in pool.control.composition(PoolId("p"))  # type: ignore[operator]
    assert pool.dispatched("b", 4000).worker == "p/0x4"


def test_a_pool_that_comes_back_is_known_by_its_new_slots() -> None:
    pool = Pool()
    pool.launch("4x1", pool="q", prefill_only=True)
    for name in ("p", "q"):
        pool.feed(PoolLost(PoolId(name), "gone"))
    pool.launch("4x1", pool="q", prefill_only=True)
    pool.launch("4x1", pool="p", prefill_only=True)
    blocks = chain(1, 10)
    pool.store(0, blocks, pool="p")
    told = pool.control.explain(request("x", 1050, blocks=blocks), pool.now)
    cached = {terms.worker for terms in told.candidates if terms.cached_tokens}
    assert cached == {"p/0x1", "p/0x2", "p/0x4"}


def test_no_way_leads_through_a_degree_without_a_price() -> None:
    gap = {degree: at for degree, at in IDEAL.degrees.items() if degree != 2}
    pool = Pool(msgspec.structs.replace(IDEAL, degrees=gap))
    assert pool.dispatched("long", 4000).worker in {f"p/{rank}x1" for rank in range(4)}


def test_one_that_failed_in_a_wide_block_may_be_tried_in_another() -> None:
    pool = Pool()
    pool.follow(pool.arrive("long", 4000))
    effects = pool.fail("long")
    assert effects
    assert not any(isinstance(effect, Reject) for effect in effects)
    again = only(Dispatch, pool.follow(effects))
    assert again.worker != "p/0x4"
    assert again.attempt == 2


def test_orders_of_operators_that_make_no_sense_do_not_stop_it() -> None:
    pool = Pool()
    for number in range(6):
        nonsense = ReconfigureRequested(PlanId(f"{number}"), PoolId("p"), (Block(0, 1),))
        assert isinstance(pool.feed(nonsense)[0], PlanEnded)
    assert isinstance(pool.arrive("long", 4000)[0], Regroup)


def test_the_price_of_a_move_follows_what_moves_take() -> None:
    pool = Pool()
    (order,) = pool.arrive("long", 4000)
    while isinstance(order, Regroup):
        pool.wait(0.5)
        stages = Stages(drain=100.0, vote=0.0, switch=400.0, publish=0.0)
        effects = pool.commit(order, stages)
        order = next(e for e in effects if isinstance(e, Regroup | Dispatch))
    told = pool.control.explain(request("x", 50), pool.now)
    narrow = next(terms for terms in told.candidates if terms.worker == "p/2x1")
    running_s = 4000 / 4000
    assert narrow.queue_s == pytest.approx(running_s + 2 * 0.4)


def test_it_is_refused_with_a_prefix_manager_that_acts() -> None:
    with pytest.raises(ConfigError, match="prefixes can still be pulled"):
        PolicyConfig(policy="fluid", prefix=PrefixConfig(mode="on"))
