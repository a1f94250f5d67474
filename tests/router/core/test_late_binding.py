"""The queue stays at the router; a worker gets a batch it can start and one request more."""

import pytest
from vertumnus_router.core.config import LateConfig
from vertumnus_router.core.effects import Dispatch, Effect
from vertumnus_router.core.events import Failure, RequestCancelled
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.types import BlockHash, RequestId
from vertumnus_router.lattice import Block

from tests.router.core.scene import (
    IDEAL,
    Scene,
    chain,
    joined,
    only,
    reported,
    request,
    with_overhead,
)


def late(composition: str | None = "1x1", profile: Profile = IDEAL, **config: object) -> Scene:
    return Scene(composition, profile, policy="late", **config)


def names(effects: list[Effect]) -> list[str]:
    return [effect.request_id for effect in effects if isinstance(effect, Dispatch)]


def queued(scene: Scene) -> int:
    return scene.control.queued_count


def test_a_worker_gets_what_it_can_start_and_one_look_ahead() -> None:
    scene = late()  # chunks of 2000 tokens
    assert names(scene.arrive("a", 5000)) == ["a"]
    assert names(scene.arrive("b", 5000)) == ["b"]  # the look-ahead
    assert names(scene.arrive("c", 5000)) == []
    assert queued(scene) == 1
    scene.start("a", "p/0x1")
    assert names(scene.first_token("a", "p/0x1")) == ["c"]
    assert queued(scene) == 0


def test_who_waits_counts_on_what_began_to_be_computed_meanwhile() -> None:
    scene = late()
    for name in "ab":
        scene.arrive(name, 5000)
    scene.arrive("c", 6000, blocks=chain(1, 50))
    scene.arrive("d", 6000, blocks=chain(1, 50), priority=1)
    assert only(Dispatch, scene.finish("a")).decision.chosen.cached_tokens == 0
    last = only(Dispatch, scene.finish("b"))
    assert (last.request_id, last.decision.chosen.cached_tokens) == ("c", 5000)


def test_short_requests_fill_one_batch() -> None:
    scene = late()
    sent = [names(scene.arrive(f"r{i}", 500)) for i in range(7)]
    # Four make up 2000 tokens, the fifth is the look-ahead.
    assert sent == [["r0"], ["r1"], ["r2"], ["r3"], ["r4"], [], []]


def test_early_binding_would_send_them_all_at_once() -> None:
    scene = Scene("1x1", policy="paper")
    assert [len(scene.arrive(f"r{i}", 5000)) for i in range(5)] == [1] * 5
    assert queued(scene) == 0


def test_a_cancelled_request_leaves_the_queue_without_any_effect() -> None:
    scene = late()
    for name in "abc":
        scene.arrive(name, 5000)
    assert scene.feed(RequestCancelled(RequestId("c"))) == []
    assert (queued(scene), scene.control.pending_count) == (0, 2)


@pytest.mark.parametrize("how", ["finished", "failed", "cancelled"])
def test_every_end_of_a_prefill_lets_the_next_one_go(how: str) -> None:
    scene = late()
    for name in "abc":
        scene.arrive(name, 5000)
    if how == "finished":
        effects = scene.finish("a")
    elif how == "failed":
        effects = scene.fail("a", Failure.CLIENT_ERROR)
    else:
        effects = scene.feed(RequestCancelled(RequestId("a")))
    assert names(effects) == ["c"]


def test_the_cheapest_goes_first() -> None:
    scene = late()
    for name, tokens in (("a", 5000), ("b", 5000), ("long", 8000), ("short", 3000)):
        scene.arrive(name, tokens)
    assert names(scene.first_token("a", "p/0x1")) == ["short"]
    assert names(scene.first_token("b", "p/0x1")) == ["long"]


def test_waiting_makes_up_for_length() -> None:
    # g − 0.2·wait: 8 − 0.2·30 = 2 against 3.
    scene = late()
    for name, tokens in (("a", 5000), ("b", 5000), ("long", 8000)):
        scene.arrive(name, tokens)
    scene.wait(30.0)
    scene.arrive("short", 3000)
    assert names(scene.first_token("a", "p/0x1")) == ["long"]


def test_the_order_counts_the_best_prefix_hit() -> None:
    scene = late("2x1")
    for name in "abcd":
        scene.arrive(name, 5000)
    scene.store(1, chain(7, 90))
    scene.arrive("cold", 4000)
    scene.arrive("warm", 9900, blocks=chain(7, 99))
    assert names(scene.first_token("b", "p/1x1"))[0] == "warm"


def test_priority_goes_before_length() -> None:
    scene = late()
    for name in "ab":
        scene.arrive(name, 5000)
    scene.arrive("short", 3000)
    scene.arrive("urgent", 9000, priority=1)
    assert names(scene.first_token("a", "p/0x1")) == ["urgent"]


def test_a_request_waits_for_a_busy_worker_that_holds_its_prefix() -> None:
    scene = late("2x1", lam=0.0)
    scene.store(0, chain(1, 90))
    for name in ("a", "b"):
        assert scene.dispatched(name, 9100, blocks=(*chain(1, 90), *chain(2, 1))).worker == "p/0x1"
    # R = 100 there: too little to fill the batch, so make the lane full by length.
    for i in range(20):
        scene.arrive(f"fill{i}", 9100, blocks=(*chain(1, 90), *chain(3 + i, 1)))
    assert queued(scene) == 1
    assert all(
        worker.id == "p/0x1" or not worker.requests for worker in scene.control.workers(scene.now)
    )
    # 2.1 s of waiting beat 9 s of computing; the other worker stays free for others.
    assert scene.dispatched("other", 1000).worker == "p/1x1"


def test_those_behind_see_where_the_others_will_wait() -> None:
    scene = late("2x1", lam=0.0)
    scene.store(0, chain(1, 40))

    def own(name: int) -> tuple[BlockHash, ...]:
        return (*chain(1, 40), *chain(name, 20))  # R = 2000 at p/0x1, 6000 elsewhere

    assert scene.dispatched("a", 6000, blocks=own(2)).worker == "p/0x1"
    assert scene.dispatched("b", 6000, blocks=own(3)).worker == "p/0x1"
    scene.start("a", "p/0x1")
    scene.wait(0.5)
    # c takes 3.5 + 2 s there and 6 s at the free worker.
    assert scene.arrive("c", 6000, blocks=own(4)) == []
    # d would stand behind c: 5.5 + 2 against 6.
    assert only(Dispatch, scene.arrive("d", 6000, blocks=own(5))).worker == "p/1x1"


def test_one_pass_hands_out_a_batch_and_one_more() -> None:
    scene = late(None)
    scene.feed(joined("p", 1))
    for i in range(7):
        assert scene.arrive(f"r{i}", 500) == []
    assert names(scene.feed(reported(0, Block(0, 1)))) == ["r0", "r1", "r2", "r3", "r4"]


def test_a_prefix_that_is_being_computed_counts_as_cached() -> None:
    prompt = chain(1, 50)
    scene = late("2x1", lam=0.0)
    first = scene.dispatched("a", 5000, blocks=prompt).worker
    scene.start("a", first)
    scene.wait(0.1)
    second = scene.dispatched("b", 5100, blocks=(*prompt, *chain(2, 1)))
    assert second.worker == first  # 4.9 s of waiting and 0.1 s beat 5.1 s
    assert second.decision.chosen.cached_tokens == 5000


def test_what_others_compute_at_this_moment_is_not_computed_again_to_save_no_time() -> None:
    """At the free worker the later ones would have their first tokens sooner, for 1.5 s of it."""
    document = chain(1, 15)
    scene = late("2x1", lam=0.1)
    first = scene.dispatched("a", 1550, blocks=document).worker
    for n in range(9):
        scene.arrive(f"b{n}", 1550, blocks=document)
    workers = {worker.id: worker.requests for worker in scene.control.workers(scene.now)}
    assert all(requests == () for name, requests in workers.items() if name != first)


def test_early_binding_counts_what_is_stored_only() -> None:
    prompt = chain(1, 50)
    scene = Scene("1x1", policy="paper")
    scene.dispatched("a", 5000, blocks=prompt)
    assert scene.dispatched("b", 5100, blocks=prompt).decision.chosen.cached_tokens == 0


def test_what_was_being_computed_is_forgotten_with_the_attempt() -> None:
    prompt = chain(1, 50)
    scene = late("1x1")
    scene.dispatched("a", 5000, blocks=prompt)
    scene.dispatched("b", 100)
    scene.feed(RequestCancelled(RequestId("a")))
    assert scene.dispatched("c", 5100, blocks=prompt).decision.chosen.cached_tokens == 0


def test_a_prefix_that_came_to_be_cached_moves_a_request_up() -> None:
    scene = late("1x1")
    for name in "ab":
        scene.arrive(name, 5000)
    scene.arrive("short", 3000)
    scene.arrive("long", 9000, blocks=chain(1, 90))
    scene.store(0, chain(1, 80))
    effects = scene.first_token("a", "p/0x1")
    assert names(effects) == ["long"]
    dispatch = only(Dispatch, effects)
    assert dispatch.decision.chosen.cached_tokens == 8000


def test_price_by_hand() -> None:
    # J = wait + s + λ·(C·s − Ê_1), λ = 0.3 without backlog: 2.5 + 0.3·1 against 4.
    scene = late("1x2,2x1", with_overhead(0.5))
    terms = {c.degree: c for c in scene.dispatched("a", 4000).decision.candidates}
    assert terms[2].beta == 1.0
    assert terms[2].total == pytest.approx(2.5 + 0.3 * 1.0)
    assert terms[1].total == pytest.approx(4.0)


def test_lambda_rises_with_the_backlog_up_to_its_cap_and_falls_again() -> None:
    scene = late("1x1", lam=0.3, late=LateConfig(backlog_tau_s=1.0))

    def lam() -> float:
        return scene.control.explain(request("x"), scene.now).candidates[0].lam

    for name in "ab":
        scene.arrive(name, 5000)
    assert lam() == pytest.approx(0.3)
    scene.arrive("c", 5000)  # one waits for one rank
    scene.wait(0.1)
    scene.arrive("d", 5000)
    # EMA of the time that passed: 1 − e^(−0.1) of one queued request.
    assert lam() == pytest.approx(0.3 + 4 * (1 - 2.718281828**-0.1), rel=1e-6)
    scene.wait(60.0)
    scene.start("a", "p/0x1")
    assert lam() == pytest.approx(1.2)
    for name in "abcd":
        scene.finish(name)
    scene.wait(60.0)
    scene.arrive("e", 100)
    assert lam() == pytest.approx(0.3, abs=1e-3)


def test_backlog_shifts_work_to_the_degree_that_wastes_least() -> None:
    # s = 2 at degree 1; at degree 2 s = 1.45 and extra = 0.9: 1.45 + 0.3·0.9 < 2 < 1.45 + 1.2·0.9.
    idle = late("1x2,2x1", with_overhead(0.45))
    assert idle.dispatched("a", 2000).decision.chosen.degree == 2
    loaded = late("1x2,2x1", with_overhead(0.45), late=LateConfig(lam_gain=100.0, lam_cap=1.2))
    for i in range(9):
        loaded.arrive(f"r{i}", 40_000)
    loaded.wait(10.0)
    loaded.arrive("late", 40_000)
    for i in range(9):
        loaded.finish(f"r{i}")
    loaded.finish("late")
    assert loaded.dispatched("a", 2000).decision.chosen.degree == 1


def test_only_the_head_of_the_queue_is_planned() -> None:
    scene = late("2x1", lam=0.0, late=LateConfig(window=1))
    scene.store(0, chain(1, 90))
    hot = (*chain(1, 90), *chain(2, 9))
    assert scene.dispatched("a", 12_000, blocks=hot).worker == "p/0x1"
    assert scene.dispatched("b", 12_000, blocks=hot).worker == "p/0x1"
    scene.arrive("c", 9500, blocks=hot)  # waits for p/0x1: 6 s + 0.5 s against 9.5 s
    assert queued(scene) == 1
    scene.arrive("d", 8000)  # would start at p/1x1, but c stands before it and the window is 1
    assert queued(scene) == 2
    wide = late("2x1", lam=0.0)
    wide.store(0, chain(1, 90))
    for name in "ab":
        wide.arrive(name, 12_000, blocks=hot)
    wide.arrive("c", 9500, blocks=hot)
    assert names(wide.arrive("d", 8000)) == ["d"]
