"""The paper's placement over persistent workers, every price computed by hand."""

import pytest
from vertumnus_router.core.effects import Dispatch
from vertumnus_router.core.events import BlocksStored
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.types import PoolId, Rank

from tests.router.core.scene import IDEAL, Scene, chain, only, with_overhead


def test_a_dispatch_names_home_worker_and_terms() -> None:
    scene = Scene("1x2,2x1")
    dispatch = scene.dispatched("a", 1000)
    assert dispatch.worker == "p/0x2"
    assert dispatch.home == Rank(PoolId("p"), 0)
    assert (dispatch.attempt, dispatch.decision.policy) == (1, "paper")
    chosen = dispatch.decision.chosen
    assert (chosen.degree, chosen.beta, chosen.lam) == (2, 3.0, 0.3)
    assert (chosen.queue_s, chosen.service_s, chosen.cached_tokens) == (0.0, 0.5, 0)
    assert dispatch.decision.candidates[0] == chosen
    assert len(dispatch.decision.candidates) == 3


def test_j_by_hand() -> None:
    # Degree 1: s = 4. Degree 2: s = 4/2 + 0.5 = 2.5, C·s − C_min·Ê_Cmin = 2·2.5 − 4 = 1.
    scene = Scene("1x2,1x1,1x1", with_overhead(0.5))
    terms = {str(c.worker): c for c in scene.dispatched("a", 4000).decision.candidates}
    assert terms["p/0x2"].extra_gpu_s == pytest.approx(1.0)
    assert terms["p/0x2"].total == pytest.approx(0 + 3 * 2.5 + 0.3 * 1.0)
    assert terms["p/2x1"].total == pytest.approx(3 * 4.0)
    # The second one finds the pair busy for 2.5 s: 2.5 + 7.5 + 0.3 = 10.3 < 12.
    second = {str(c.worker): c for c in scene.dispatched("b", 4000).decision.candidates}
    assert second["p/0x2"].queue_s == pytest.approx(2.5)
    assert second["p/0x2"].total == pytest.approx(10.3)
    # The third one would wait 5 s there: 12.8 > 12.
    third = scene.dispatched("c", 4000)
    assert third.decision.chosen.degree == 1


def test_terms_add_up_to_the_total() -> None:
    scene = Scene("1x2,2x1", with_overhead(0.3))
    scene.store(2, chain(1, 7))
    for name in ("a", "b", "c", "d"):
        for c in scene.dispatched(name, 1000, blocks=chain(1, 10)).decision.candidates:
            total = c.queue_s + c.beta * c.service_s + c.lam * c.extra_gpu_s
            assert c.total == pytest.approx(total)


def test_short_prompts_go_to_the_small_degree_long_ones_to_the_large() -> None:
    assert Scene("1x2,2x1", with_overhead(0.5)).dispatched("a", 200).decision.chosen.degree == 1
    assert Scene("1x2,2x1", with_overhead(0.5)).dispatched("a", 9000).decision.chosen.degree == 2


def test_lambda_keeps_a_request_from_spending_many_ranks_on_little_time() -> None:
    # Degree 2: s = 1.0, extra 0.8. Without λ 3.0 < 3.6; with λ = 1: 3.0 + 0.8 > 3.6.
    profile = with_overhead(0.4)
    assert Scene("1x2,2x1", profile, lam=0.0).dispatched("a", 1200).decision.chosen.degree == 2
    assert Scene("1x2,2x1", profile, lam=1.0).dispatched("a", 1200).decision.chosen.degree == 1


def test_beta_weighs_service_against_queueing() -> None:
    # The pair has 2 s queued. Degree 1: 4β. Degree 2: 2 + 2β.
    for beta, degree in ((0.5, 1), (3.0, 2)):
        scene = Scene("1x2,2x1", lam=0.0, beta=beta)
        scene.store(0, chain(1, 60))
        scene.store(1, chain(1, 60))
        scene.dispatched("first", 10_000, blocks=chain(1, 100))  # R = 4000 at the pair: 2 s
        assert scene.queue_s("p/0x2") == pytest.approx(2.0)
        assert scene.dispatched("a", 4000).decision.chosen.degree == degree


def test_a_cached_prefix_attracts() -> None:
    scene = Scene("4x1")
    scene.store(2, chain(1, 8))
    dispatch = scene.dispatched("a", 1000, blocks=chain(1, 10))
    assert dispatch.worker == "p/2x1"
    assert dispatch.decision.chosen.cached_tokens == 800
    assert dispatch.decision.chosen.service_s == pytest.approx(0.2)


def test_a_long_queue_makes_j_leave_the_worker_that_holds_the_prefix() -> None:
    scene = Scene("2x1")
    scene.store(0, chain(1, 8))
    # At the holder R = 250: J = 0.25·n + 0.75 behind n others. Elsewhere J = 3.15.
    workers = [scene.dispatched(f"r{i}", 1050, blocks=chain(1, 10)).worker for i in range(11)]
    assert workers == ["p/0x1"] * 10 + ["p/1x1"]
    scene.finish("r10")
    scene.start("r0", "p/0x1")
    scene.wait(0.2)  # the running one ages: J = 2.3 + 0.75, and the holder wins again
    assert scene.dispatched("again", 1050, blocks=chain(1, 10)).worker == "p/0x1"


@pytest.mark.parametrize(("tokens", "cached", "lacking"), [(2000, 1000, 600), (1000, 900, 500)])
def test_a_pair_can_use_what_either_rank_holds(tokens: int, cached: int, lacking: int) -> None:
    scene = Scene("1x2")
    scene.store(0, chain(1, 10))
    scene.store(1, chain(1, 4))
    chosen = scene.dispatched("a", tokens, blocks=chain(1, 10)).decision.chosen
    assert (chosen.cached_tokens, chosen.reconcile_tokens) == (cached, lacking)


def test_two_ranks_that_hold_half_each_of_a_prefix_hold_half_of_it() -> None:
    scene = Scene("1x2")
    scene.store(0, chain(1, 5))
    scene.feed(BlocksStored(Rank(PoolId("p"), 1), chain(1, 5)[-1], chain(1, 10)[5:]))
    chosen = scene.dispatched("a", 2000, blocks=chain(1, 10)).decision.chosen
    assert (chosen.cached_tokens, chosen.reconcile_tokens) == (500, 500)


def test_the_last_token_is_always_computed() -> None:
    scene = Scene("1x1")
    scene.store(0, chain(1, 10))
    chosen = scene.dispatched("a", 1000, blocks=chain(1, 10)).decision.chosen
    assert chosen.cached_tokens == 900  # whole blocks below the last token
    assert chosen.service_s == pytest.approx(0.1)
    assert scene.dispatched("b", 1001, blocks=chain(1, 10)).decision.chosen.cached_tokens == 1000


def test_a_prompt_without_blocks_is_placed_by_load_alone() -> None:
    scene = Scene("2x1")
    scene.store(0, chain(1, 8))
    assert scene.dispatched("a", 1000).decision.chosen.cached_tokens == 0


def test_the_queue_estimate_ages_with_the_running_prefill() -> None:
    scene = Scene("1x1")
    scene.dispatched("a", 2000)
    scene.dispatched("b", 1000)
    assert scene.queue_s("p/0x1") == pytest.approx(3.0)
    scene.wait(5.0)
    assert scene.queue_s("p/0x1") == pytest.approx(3.0)  # nothing has begun
    scene.start("a", "p/0x1")
    scene.wait(1.5)
    assert scene.queue_s("p/0x1") == pytest.approx(1.5)
    scene.wait(10.0)
    assert scene.queue_s("p/0x1") == pytest.approx(1.0)
    scene.first_token("a", "p/0x1")
    assert scene.queue_s("p/0x1") == pytest.approx(1.0)
    scene.first_token("b", "p/0x1")
    assert scene.queue_s("p/0x1") == 0.0


def test_an_aged_queue_attracts_where_a_plain_sum_would_not() -> None:
    scene = Scene("2x1", tie_s=0.0)
    first = scene.dispatched("a", 4000).worker
    scene.start("a", first)
    second = scene.dispatched("b", 3000).worker
    assert second != first
    scene.wait(2.0)
    scene.start("b", second)  # its report is late; a has 2 s to go, b 3 s
    assert scene.dispatched("c", 1000).worker == first


def test_one_long_prompt_weighs_more_than_some_short_ones() -> None:
    scene = Scene("2x1")
    long = scene.dispatched("long", 9000).worker
    for name in ("a", "b", "c"):
        assert scene.dispatched(name, 1000).worker != long


def test_reservations_count_at_once() -> None:
    scene = Scene("4x1")
    workers = {scene.dispatched(f"r{i}", 1000).worker for i in range(4)}
    assert len(workers) == 4


def test_near_equal_candidates_are_drawn_by_request_not_by_order() -> None:
    def placed(seed: int) -> list[str]:
        return [Scene("4x1", tie_s=0.001, seed=seed).dispatched(f"r{i}").worker for i in range(40)]

    assert set(placed(0)) == {f"p/{i}x1" for i in range(4)}
    assert placed(0) == placed(0)
    assert placed(0) != placed(1)


def test_a_tie_is_only_a_tie_within_the_tolerance() -> None:
    scene = Scene("4x1", tie_s=0.5)
    scene.store(1, chain(1, 2))  # 3·0.2 s better than the others
    for i in range(20):
        name = f"r{i}"
        assert scene.dispatched(name, 1000, blocks=chain(1, 10)).worker == "p/1x1"
        scene.finish(name)


def test_workers_of_two_pools_compete() -> None:
    scene = Scene("1x1")
    scene.launch("1x2", pool="q")
    dispatch = scene.dispatched("a", 1000)
    assert (dispatch.pool, dispatch.worker, dispatch.home) == (
        "q",
        "q/0x2",
        Rank(PoolId("q"), 0),
    )


def test_the_leader_is_the_lowest_rank_of_the_block() -> None:
    scene = Scene("2x1,1x2")
    assert only(Dispatch, scene.arrive("a", 9000)).home == Rank(PoolId("p"), 2)


def test_c_min_is_the_smallest_degree_of_the_ladder() -> None:
    scene = Scene(None, with_overhead(0.5))
    scene.launch("1x4,1x2", degrees=(2, 4))
    # C_min = 2: at degree 4 extra = 4·(4/4) − 2·(4/2 + 0.5) = −1; at degree 2 it is 0.
    terms = {c.degree: c for c in scene.dispatched("a", 4000).decision.candidates}
    assert terms[2].extra_gpu_s == 0.0
    assert terms[4].extra_gpu_s == pytest.approx(-1.0)


def test_reported_times_change_the_price() -> None:
    scene = Scene("1x2,2x1", IDEAL, correction=CorrectionConfig(gain=1.0), lam=0.0)
    assert scene.dispatched("a", 1000).worker == "p/0x2"
    scene.start("a", "p/0x2")
    scene.first_token("a", "p/0x2", cached_tokens=0, compute_s=2.0)  # four times the profile
    assert scene.control.corrections()[2].factor == pytest.approx(4.0)
    dispatch = scene.dispatched("b", 1000)
    assert dispatch.decision.chosen.degree == 1
    pair = next(c for c in dispatch.decision.candidates if c.degree == 2)
    assert pair.service_s == pytest.approx(2.0)
