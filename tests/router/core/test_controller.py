"""The rules one by one, on windows that can be computed by hand."""

from typing import Any

import pytest
from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.controller import Controller
from vertumnus_router.core.types import PoolId
from vertumnus_router.core.verdict import Action, PoolView, Reason, Verdict
from vertumnus_router.lattice import Block

from tests.router.core.composed import LADDER, Composed, options, service_s

# 2x2 has 2·16 = 32 s of capacity: above 24 s is overload, below 11.2 s underload.
OVER = (1000,) * 25
IN_BAND = (1000,) * 16
UNDER = (1000,) * 4


def said(verdict: Verdict) -> tuple[Action, Reason]:
    return verdict.action, verdict.reason


# -- one window ------------------------------------------------------------------------------------


def test_demand_and_capacity_by_hand() -> None:
    cluster = Composed("2x1,1x2")
    cluster.arrive(1000, 3000)
    cluster.arrive(2000, cached=500)
    verdict = cluster.window()
    assert verdict.window == 1
    assert verdict.requests == 3
    assert verdict.reference_degree == 1
    assert verdict.demand_s == pytest.approx(6.0)
    assert dict(verdict.kappa_s) == pytest.approx({1: 10.0, 2: 16.0, 4: 24.0})
    assert verdict.capacity_s == pytest.approx(2 * 10 + 16)
    assert verdict.utilisation == pytest.approx(6 / 36)


def test_demand_does_not_change_with_the_composition() -> None:
    demands = {Composed(c).window(1000, 5000).demand_s for c in ("4x1", "2x2", "1x4", "2x1,1x2")}
    assert demands == {6.0}


def test_kappa_follows_the_mix() -> None:
    """What gains nothing from a larger degree leaves it no more capacity than a rank has."""

    def service(degree: int, uncached: int, cached: int) -> float:
        return 1.0 if uncached < 1000 else uncached / 1000 / degree

    cluster = Composed("2x2", service=service)
    assert dict(cluster.window(1).kappa_s) == {1: 10.0, 2: 10.0, 4: 10.0}
    assert dict(cluster.window(4000).kappa_s) == {1: 10.0, 2: 20.0, 4: 40.0}
    # 1 + 4 s at degree 1, 1 + 2 s at degree 2, 1 + 1 s at degree 4
    mixed = dict(cluster.window(1, 4000).kappa_s)
    assert mixed == pytest.approx({1: 10.0, 2: 10 * 5 / 3, 4: 10 * 5 / 2})


def test_a_measured_limit_goes_before_rho() -> None:
    verdict = Composed("2x2", limits={2: 0.75}).window(1000)
    assert dict(verdict.kappa_s) == pytest.approx({1: 10.0, 2: 0.75 * 20 * 1.6, 4: 24.0})


def test_a_window_that_ended_late_is_scaled_to_its_nominal_length() -> None:
    verdict = Composed().window(*IN_BAND, after_s=40.0)
    assert verdict.demand_s == pytest.approx(8.0)
    assert verdict.capacity_s == pytest.approx(32.0)


def test_no_verdict_and_no_look_before_the_window_is_over() -> None:
    cluster = Composed()
    look: Any = None  # calling it would raise
    assert cluster.controller.tick(cluster.now + 19.9, look) is None
    assert cluster.controller.decisions == ()


# -- capacity --------------------------------------------------------------------------------------


def test_overload_splits_after_two_windows() -> None:
    cluster = Composed("2x2")
    assert said(cluster.window(*OVER)) == (Action.KEEP, Reason.NOT_YET)
    verdict = cluster.window(*OVER)
    assert said(verdict) == (Action.SPLIT, Reason.OVERLOAD)
    assert verdict.windows_above == 2
    assert verdict.detail == ("demand is 78% of capacity, above 75% for 2 window(s), 2 are needed")
    assert verdict.chosen is not None
    assert verdict.chosen.move.leaving == (Block(0, 2),)
    assert verdict.chosen.move.arriving == (Block(0, 1), Block(1, 1))
    assert verdict.command == verdict.chosen
    assert cluster.composition == "2x1,1x2"


def test_underload_merges_after_two_windows() -> None:
    cluster = Composed("4x1")  # 40 s of capacity
    assert said(cluster.window(*UNDER)) == (Action.KEEP, Reason.NOT_YET)
    verdict = cluster.window(*UNDER)
    assert said(verdict) == (Action.MERGE, Reason.UNDERLOAD)
    assert verdict.windows_below == 2
    # 10 + 10 + 16 s remain; two windows of 4 requests of 1 s: 4 ± √(4·1·1.5)
    [first, second] = verdict.candidates
    assert (first.option.move.leaving[0].first, second.option.move.leaving[0].first) == (0, 2)
    assert first.capacity_s == pytest.approx(36.0)
    assert first.utilisation == pytest.approx(4 / 36)
    assert first.peak == pytest.approx((4 + 3 * 6**0.5) / 36)
    assert cluster.composition == "1x2,2x1"


@pytest.mark.parametrize("between", [IN_BAND, UNDER, ()], ids=["in band", "low", "idle"])
def test_overload_that_pauses_starts_over(between: tuple[int, ...]) -> None:
    cluster = Composed("2x2")
    cluster.window(*OVER)
    cluster.window(*between)
    assert said(cluster.window(*OVER)) == (Action.KEEP, Reason.NOT_YET)
    assert said(cluster.window(*OVER)) == (Action.SPLIT, Reason.OVERLOAD)


def test_underload_that_pauses_starts_over() -> None:
    cluster = Composed("4x1")
    cluster.window(*UNDER)
    cluster.window(*IN_BAND)
    assert said(cluster.window(*UNDER)) == (Action.KEEP, Reason.NOT_YET)


def test_an_idle_window_keeps_the_composition_and_is_no_evidence() -> None:
    cluster = Composed("4x1")
    assert said(cluster.windows(9)) == (Action.KEEP, Reason.IDLE)
    cluster.window(*UNDER)
    idle = cluster.window()
    assert said(idle) == (Action.KEEP, Reason.IDLE)
    assert (idle.demand_s, idle.utilisation, idle.windows_below) == (0.0, 0.0, 1)
    assert said(cluster.window(*UNDER)) == (Action.MERGE, Reason.UNDERLOAD)


def test_the_thresholds_themselves_are_in_the_band() -> None:
    cluster = Composed("2x2", lower=0.25)
    assert said(cluster.windows(3, *(1000,) * 24)) == (Action.KEEP, Reason.IN_BAND)
    assert said(cluster.windows(3, *(1000,) * 8)) == (Action.KEEP, Reason.IN_BAND)


def test_a_merge_that_leaves_too_little_is_refused() -> None:
    # 11 of 32 s is below the band, and up to 11 + 3·√(11·1·1.5) of 24 s would be 94 %.
    verdict = Composed("2x2").windows(2, *(1000,) * 11)
    assert said(verdict) == (Action.KEEP, Reason.NO_MOVE)
    assert verdict.wanted is Action.MERGE
    assert verdict.chosen is None
    [candidate] = verdict.candidates
    assert candidate.peak == pytest.approx((11 + 3 * 16.5**0.5) / 24)
    assert candidate.excluded == "demand may reach 97% of what remains, not 70%"
    assert candidate.excluded in verdict.detail


def test_the_same_mean_in_many_small_requests_merges() -> None:
    verdict = Composed("2x2").windows(2, *(10,) * 1100)
    assert said(verdict) == (Action.MERGE, Reason.UNDERLOAD)


def test_longer_evidence_needs_less_room() -> None:
    cluster = Composed("2x2")
    load = (480,) * 20  # 9.6 s, 16.8 s is room: 3·√(9.6·0.48·(1 + 1/n)) must not exceed 7.2
    assert said(cluster.windows(2, *load)) == (Action.KEEP, Reason.NO_MOVE)
    assert said(cluster.window(*load)) == (Action.KEEP, Reason.NO_MOVE)
    assert said(cluster.window(*load)) == (Action.MERGE, Reason.UNDERLOAD)


def test_a_split_must_add_capacity() -> None:
    def linear(degree: int, uncached: int, cached: int) -> float:
        return uncached / 1000 / degree

    verdict = Composed("2x2", service=linear).windows(2, *(1000,) * 35)
    assert said(verdict) == (Action.KEEP, Reason.NO_MOVE)
    assert verdict.candidates[0].excluded == "it adds no capacity for these requests"


def test_overload_at_the_smallest_degree_has_no_move() -> None:
    verdict = Composed("4x1").windows(2, *(1000,) * 35)
    assert said(verdict) == (Action.KEEP, Reason.NO_MOVE)
    assert verdict.candidates == ()
    assert verdict.detail.endswith("no pool can split any further")


def test_a_degree_without_a_price_is_no_target() -> None:
    cluster = Composed("2x2")
    for _ in range(2):
        for _ in UNDER:
            cluster.controller.arrived((1, 2), 1000, 1000, 0, cluster.now)
        verdict = cluster.window()
    assert said(verdict) == (Action.KEEP, Reason.NO_MOVE)
    assert verdict.candidates[0].excluded == "its degrees have no price"
    assert verdict.candidates[0].capacity_s is None


def test_a_failed_block_is_no_capacity() -> None:
    cluster = Composed("2x2")
    assert cluster.window(*IN_BAND).utilisation == pytest.approx(0.5)
    cluster.failed = frozenset({Block(2, 2)})
    verdict = cluster.window(*IN_BAND)
    assert verdict.utilisation == pytest.approx(1.0)
    assert said(cluster.window(*IN_BAND)) == (Action.SPLIT, Reason.OVERLOAD)


def test_without_a_serving_block_there_is_nothing_to_decide() -> None:
    cluster = Composed("2x2")
    cluster.window(*OVER)
    cluster.failed = frozenset(cluster.blocks)
    verdict = cluster.window(*OVER)
    assert said(verdict) == (Action.KEEP, Reason.NO_WORKER)
    assert verdict.utilisation is None
    cluster.failed = frozenset()
    assert said(cluster.window(*OVER)) == (Action.KEEP, Reason.NOT_YET)


# -- long requests ---------------------------------------------------------------------------------

# More than 20 tokens are long here. Many small requests, so that chance hardly moves the demand.
LONG = {"long_tokens": 20}


def mix(long: int, of: int = 1000, tokens: int = 12_500) -> tuple[int, ...]:
    """``of`` requests, ``long`` of them long, of nearly ``tokens`` tokens together."""
    return (25,) * long + ((tokens - 25 * long) // (of - long),) * (of - long)


def test_more_long_requests_merge() -> None:
    cluster = Composed("2x2", **LONG)
    assert said(cluster.windows(2, *mix(100))) == (Action.KEEP, Reason.IN_BAND)
    assert said(cluster.window(*mix(150))) == (Action.KEEP, Reason.IN_BAND)
    verdict = cluster.window(*mix(150))
    assert said(verdict) == (Action.MERGE, Reason.LONG_RISE)
    assert verdict.long_before == pytest.approx(0.10)
    assert verdict.long_now == pytest.approx(0.15)
    assert "15.0% of requests are long, 10.0% were" in verdict.detail
    assert cluster.composition == "1x4"


def test_fewer_long_requests_split() -> None:
    cluster = Composed("2x2", **LONG)
    cluster.windows(2, *mix(100, tokens=20_000))
    cluster.window(*mix(60, tokens=20_000))
    verdict = cluster.window(*mix(60, tokens=20_000))
    assert said(verdict) == (Action.SPLIT, Reason.LONG_FALL)
    assert cluster.composition == "2x1,1x2"


def test_long_requests_are_counted_by_their_whole_prompt() -> None:
    cluster = Composed("2x2", **LONG)
    cluster.windows(2, *mix(100))
    for _ in range(2):
        cluster.arrive(*(10,) * 200, cached=11)
        verdict = cluster.window(*mix(0, of=800, tokens=10_500))
    assert said(verdict) == (Action.MERGE, Reason.LONG_RISE)


@pytest.mark.parametrize("later", [100, 128, 75])
def test_a_change_below_a_third_is_none(later: int) -> None:
    cluster = Composed("2x2", **LONG, sigmas=0.0)
    cluster.windows(2, *mix(100, tokens=16_000))
    assert said(cluster.windows(5, *mix(later, tokens=16_000))) == (Action.KEEP, Reason.IN_BAND)


def test_what_chance_explains_is_no_change() -> None:
    cluster = Composed("2x2", long_tokens=800)
    cluster.windows(2, 900, *(800,) * 19)  # 1 of 20
    verdict = cluster.windows(5, 900, 900, *(800,) * 18)  # 2 of 20
    assert said(verdict) == (Action.KEEP, Reason.IN_BAND)


def test_a_tiny_fraction_may_double() -> None:
    # 0.1 % to 0.3 %, far beyond chance with many requests, and still nothing to act on
    cluster = Composed("2x2", **LONG, sigmas=0.0)
    cluster.windows(2, *mix(1))
    assert said(cluster.windows(3, *mix(3))) == (Action.KEEP, Reason.IN_BAND)


def test_the_change_must_persist() -> None:
    cluster = Composed("2x2", **LONG)
    cluster.windows(2, *mix(100))
    for _ in range(4):
        # 30 % and then 10 % are 20 % together
        assert said(cluster.window(*mix(300))) == (Action.KEEP, Reason.IN_BAND)
        assert said(cluster.window(*mix(100))) == (Action.KEEP, Reason.IN_BAND)


def test_after_a_move_the_fraction_is_the_new_normal() -> None:
    cluster = Composed("4x1", **LONG)
    cluster.windows(2, *mix(100, tokens=16_000))
    assert cluster.windows(2, *mix(200, tokens=16_000)).reason is Reason.LONG_RISE
    verdict = cluster.windows(8, *mix(200, tokens=16_000))
    assert said(verdict) == (Action.KEEP, Reason.IN_BAND)
    assert verdict.long_before == pytest.approx(0.2)
    assert cluster.windows(2, *mix(300, tokens=16_000)).reason is Reason.LONG_RISE


def test_a_signal_waits_until_the_capacity_allows_the_merge() -> None:
    cluster = Composed("2x2", **LONG)
    cluster.windows(2, *mix(100, tokens=20_000))
    verdict = cluster.windows(3, *mix(200, tokens=20_000))  # 20 of 24 s would remain
    assert said(verdict) == (Action.KEEP, Reason.NO_MOVE)
    assert verdict.wanted is Action.MERGE
    assert cluster.windows(2, *mix(200)).reason is Reason.LONG_RISE


def test_capacity_wins_over_long_requests() -> None:
    cluster = Composed("2x2", **LONG)
    cluster.windows(2, *mix(100, tokens=16_000))
    assert cluster.windows(2, *mix(500, tokens=26_000)).reason is Reason.OVERLOAD
    cluster = Composed("4x1", **LONG)
    cluster.windows(2, *mix(300, tokens=16_000))
    assert cluster.windows(2, *mix(100, tokens=8_000)).reason is Reason.UNDERLOAD


def test_a_split_that_the_next_windows_would_undo_is_refused() -> None:
    # 12.5 s are 39 % of 32 and would be 35 % of 36: on the edge of a merge
    cluster = Composed("2x2", **LONG)
    cluster.windows(2, *mix(200))
    verdict = cluster.windows(2, *mix(100))
    assert said(verdict) == (Action.KEEP, Reason.NO_MOVE)
    assert verdict.candidates[0].excluded == "demand would be 34% of capacity, below 40%"


# -- which move ------------------------------------------------------------------------------------


def leader_of_the_split(cluster: Composed) -> int:
    verdict = cluster.windows(2, *(1000,) * (len(cluster.blocks) * 15))
    assert verdict.chosen is not None
    return verdict.chosen.move.leaving[0].first


def test_the_least_drain_goes_first() -> None:
    cluster = Composed("3x2")
    cluster.terms = {"drain_s": {0: 0.3, 2: 0.1, 4: 0.2}, "reconcile_tokens": {2: 900}}
    assert leader_of_the_split(cluster) == 2


def test_then_the_least_reconciliation() -> None:
    cluster = Composed("3x2")
    cluster.terms = {"drain_s": {0: 0.3}, "reconcile_tokens": {2: 200, 4: 100}}
    assert leader_of_the_split(cluster) == 4


def test_then_the_lowest_rank() -> None:
    cluster = Composed("3x2")
    cluster.terms = {"drain_s": {0: 0.3}}
    assert leader_of_the_split(cluster) == 2


def test_then_the_name_of_the_pool() -> None:
    controller = Controller(ControllerConfig(mode="on"), service_s, {})
    blocks = (Block(0, 2),)
    views = [PoolView(PoolId(p), blocks, blocks, None, options(p, blocks)) for p in ("q", "p")]
    controller.tick(0.0, lambda: views)
    for window in (1, 2):
        for _ in range(90):
            controller.arrived(LADDER, 1000, 1000, 0, window * 20.0)
        verdict = controller.tick(window * 20.0, lambda: views)
    assert verdict is not None and verdict.chosen is not None
    assert verdict.chosen.pool == "p"
    assert verdict.capacity_s == pytest.approx(2 * 0.7 * 20 * 1.6)


def test_an_ineligible_move_does_not_hide_an_eligible_one() -> None:
    """Merging two ranks leaves more than merging two pairs, and is taken though it waits."""
    cluster = Composed("2x2,2x1")  # 52 s; without a pair of pairs 44, without a pair of ranks 48
    cluster.terms = {"drain_s": {4: 1.0}}
    verdict = cluster.windows(2, *(900,) * 19)  # up to 17.1 + 3·√(17.1·0.9·1.5) = 31.5 s
    assert [c.option.move.leaving[0].first for c in verdict.candidates] == [0, 4]
    assert [c.excluded is None for c in verdict.candidates] == [False, True]
    assert cluster.composition == "3x2"


# -- after a change --------------------------------------------------------------------------------


def test_the_window_after_a_move_does_not_count() -> None:
    cluster = Composed("2x4")  # down to 8x1 under any load
    load = (1000,) * 200
    reasons = [cluster.window(*load).reason for _ in range(7)]
    move = [Reason.NOT_YET, Reason.OVERLOAD, Reason.COOL_DOWN]
    assert reasons == [*move, *move, Reason.NOT_YET]


def test_a_longer_cool_down() -> None:
    cluster = Composed("1x4", cooldown=3)
    cluster.windows(2, *OVER)
    assert {cluster.window(*OVER).reason for _ in range(3)} == {Reason.COOL_DOWN}
    assert cluster.window(*(1000,) * 60).reason is Reason.NOT_YET


def test_a_change_by_somebody_else_is_not_undone_at_once() -> None:
    cluster = Composed("2x2")
    cluster.windows(1, *OVER)
    cluster.become("4x1")
    verdict = cluster.window(*UNDER)
    assert said(verdict) == (Action.KEEP, Reason.CHANGED)
    assert verdict.windows_above == 0
    assert cluster.window(*UNDER).reason is Reason.COOL_DOWN
    assert cluster.window(*UNDER).reason is Reason.NOT_YET
    assert cluster.window(*UNDER).reason is Reason.UNDERLOAD


def test_a_pool_that_moves_is_left_alone() -> None:
    cluster = Composed("2x2")
    cluster.window(*OVER)
    cluster.unsettled = "the pool is moving"
    verdict = cluster.window(*OVER)
    assert said(verdict) == (Action.KEEP, Reason.UNSETTLED)
    assert verdict.detail == "pool p: the pool is moving"
    cluster.unsettled = None
    assert cluster.window(*OVER).reason is Reason.COOL_DOWN  # the move ended in it
    assert cluster.window(*OVER).reason is Reason.NOT_YET
    assert cluster.window(*OVER).reason is Reason.OVERLOAD


def test_its_own_move_may_take_several_windows() -> None:
    cluster = Composed("2x2")
    cluster.obeys = False
    assert cluster.windows(2, *OVER).reason is Reason.OVERLOAD
    cluster.unsettled = "the pool is moving"
    assert cluster.window(*OVER).reason is Reason.UNSETTLED
    cluster.unsettled = None
    cluster.become("2x1,1x2")
    assert cluster.window(*OVER).reason is Reason.COOL_DOWN
    assert cluster.window(*IN_BAND).reason is Reason.IN_BAND


def test_a_move_that_did_not_happen_is_tried_again() -> None:
    cluster = Composed("2x2")
    cluster.obeys = False
    reasons = [cluster.window(*OVER).reason for _ in range(5)]
    move = [Reason.NOT_YET, Reason.OVERLOAD]
    assert reasons == [*move, Reason.COOL_DOWN, *move]


def test_a_block_that_fails_is_no_change_of_the_composition() -> None:
    cluster = Composed("2x2")
    cluster.window(*OVER)
    cluster.failed = frozenset({Block(2, 2)})
    assert cluster.window(*OVER).reason is Reason.OVERLOAD


def test_another_ladder_starts_over() -> None:
    cluster = Composed("2x2")
    cluster.window(*OVER)
    cluster.arrive(*OVER)
    for _ in range(20):
        cluster.controller.arrived((2, 4), 2000, 2000, 0, cluster.now)
    verdict = cluster.window()
    assert (verdict.requests, verdict.reference_degree) == (20, 2)
    assert verdict.demand_s == pytest.approx(20 * 2 / 1.6)
    assert dict(verdict.kappa_s) == pytest.approx({2: 10.0, 4: 15.0})
    assert said(verdict) == (Action.KEEP, Reason.NOT_YET)
    assert verdict.windows_above == 1


def test_a_move_that_chance_undid_takes_longer_the_next_time() -> None:
    cluster = Composed("2x1,1x2", sigmas=2.0)
    low, high = (6_000,), (6_000,) * 5  # chance alone may do this to a mean of three requests
    loads = [low, low, high, high, high, high, low, low, low, low]
    verdicts = [cluster.window(*load) for load in loads]
    moves = [(n, v.action, v.windows_below) for n, v in enumerate(verdicts) if v.chosen]
    assert moves == [(1, Action.MERGE, 2), (4, Action.SPLIT, 0), (9, Action.MERGE, 4)]
    assert [v.patience for v in verdicts] == [2] * 5 + [4] * 5


# -- modes and records -----------------------------------------------------------------------------


def test_observing_decides_and_commands_nothing() -> None:
    cluster = Composed("2x2", mode="observe")
    verdicts = [cluster.window(*OVER) for _ in range(5)]
    assert cluster.composition == "2x2"
    assert [verdict.command for verdict in verdicts] == [None] * 5
    assert [verdict.reason for verdict in verdicts] == [
        Reason.NOT_YET,
        Reason.OVERLOAD,
        Reason.COOL_DOWN,
        Reason.NOT_YET,
        Reason.OVERLOAD,
    ]
    assert verdicts[1].chosen is not None
    assert {verdict.mode for verdict in verdicts} == {"observe"}


def test_the_last_verdicts_are_kept_and_all_are_counted() -> None:
    cluster = Composed("2x2", remember=3)
    verdicts = [cluster.window(*IN_BAND) for _ in range(5)]
    assert cluster.controller.decisions == tuple(verdicts[-3:])
    assert [verdict.window for verdict in verdicts] == [1, 2, 3, 4, 5]
    assert cluster.controller.counts == {(Action.KEEP, Reason.IN_BAND): 5}
