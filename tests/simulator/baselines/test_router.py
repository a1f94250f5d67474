"""What all baselines share: requests, workers that come and go, reservations that end."""

import random
from typing import Any

import pytest
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import Abort, Dispatch, Reject
from vertumnus_router.core.events import (
    DecodeJoined,
    DecodeLost,
    Failure,
    Leg,
    PoolLost,
    RankLost,
    RequestFailed,
)
from vertumnus_router.core.types import DecodeId, PoolId, Rank, RequestId
from vertumnus_router.lattice import Block, parse_composition
from vertumnus_sim.baselines import BASELINES

from tests.router.core.scene import Scene, chain, joined, only, reported
from tests.simulator.baselines.baseline_scene import BaselineScene

ALL = pytest.mark.parametrize("name", BASELINES)


def settled(scene: BaselineScene) -> None:
    """Nothing is live, so nothing may be kept for anything."""
    control = scene.control
    assert control.violations() == []
    assert (control.pending_count, control.queued_count, control.reserved_count) == (0, 0, 0)
    active = getattr(control.rule, "_active", ())
    assert len(active) == 0


@ALL
def test_requests_wait_for_the_first_worker(name: str) -> None:
    scene = BaselineScene(name, None)
    assert scene.arrive("a") == []
    scene.feed(joined(size=2))
    assert scene.arrive("b") == []
    assert scene.control.queued_count == 2
    effects = scene.feed(reported(0, Block(0, 1)))
    assert [effect.request_id for effect in effects] == ["a", "b"]
    assert {effect.worker for effect in effects} == {"p/0x1"}


@ALL
def test_a_dispatch_says_where_and_why(name: str) -> None:
    scene = (
        BaselineScene(name, "1x2,2x1", threshold_tokens=100)
        if name == "static_length"
        else (BaselineScene(name, "1x2,2x1"))
    )
    scene.store(1, chain(1, 10))
    for i in range(4):
        dispatch = scene.dispatched(str(i), 2000, blocks=chain(1, 20))
        chosen = dispatch.decision.chosen
        assert (dispatch.attempt, dispatch.decision.policy) == (1, name)
        assert chosen.worker == dispatch.worker
        first, degree = map(int, str(dispatch.worker).removeprefix("p/").split("x"))
        assert dispatch.home.index in Block(first, degree)
        assert chosen.cached_tokens == (1000 if degree == 2 else 0)
        assert chosen.reconcile_tokens == (1000 if degree == 2 else 0)
        assert chosen.service_s == pytest.approx(0.5 if degree == 2 else 2.0)
        assert chosen.total == pytest.approx(chosen.queue_s + chosen.beta * chosen.service_s)


@ALL
def test_homes_spread_over_the_ranks_of_a_worker(name: str) -> None:
    scene = BaselineScene(name, "1x4")
    assert sorted(scene.dispatched(str(i)).home.index for i in range(4)) == [0, 1, 2, 3]


@ALL
def test_what_fits_nowhere_is_refused(name: str) -> None:
    scene = BaselineScene(name, "2x1")
    assert only(Reject, scene.arrive("a", 100_000)).code == "context_length_exceeded"
    settled(scene)


@ALL
def test_a_lost_request_goes_elsewhere(name: str) -> None:
    scene = BaselineScene(name, "2x1")
    worker = scene.worker("a")
    rank = int(worker[2])
    abort = only(Abort, scene.lose(rank))
    assert (abort.request_id, abort.worker) == ("a", worker)
    assert scene.control.violations() == []
    assert len(getattr(scene.control.rule, "_active", ())) == 0  # nor does the rule count it
    again = only(Dispatch, scene.fail("a", Failure.WORKER_LOST))
    assert (again.worker, again.attempt) == (f"p/{1 - rank}x1", 2)
    scene.serve("a", str(again.worker))
    settled(scene)


@ALL
def test_a_lost_request_ends_where_it_has_streamed_or_nobody_is_left(name: str) -> None:
    scene = BaselineScene(name, "2x1")
    worker = scene.worker("a")
    scene.lose(int(worker[2]))
    assert only(Reject, scene.fail("a", Failure.WORKER_LOST, streamed=True)).status == 503
    other = scene.worker("b")
    scene.lose(int(other[2]))
    assert only(Reject, scene.fail("b", Failure.WORKER_LOST)).code == "worker_lost"
    settled(scene)


@ALL
def test_a_rank_that_died_holds_nothing(name: str) -> None:
    scene = BaselineScene(name, "1x1")
    scene.store(0, chain(1, 10))
    assert scene.dispatched("a", 2000, blocks=chain(1, 20)).decision.chosen.cached_tokens == 1000
    scene.lose(0)
    scene.feed(reported(0, Block(0, 1), life="life-2"))
    assert scene.dispatched("b", 2000, blocks=chain(1, 20)).decision.chosen.cached_tokens == 0


@ALL
def test_a_pool_that_leaves_takes_its_attempts(name: str) -> None:
    scene = BaselineScene(name, "2x1")
    scene.worker("a")
    assert only(Abort, scene.feed(PoolLost(PoolId("p"), "gone"))).request_id == "a"
    assert only(Reject, scene.fail("a", Failure.WORKER_LOST)).request_id == "a"
    settled(scene)


@ALL
def test_a_failed_attempt_is_not_repeated_where_it_failed(name: str) -> None:
    scene = BaselineScene(name, "4x1")
    seen = {scene.worker("a")}
    for _ in range(2):
        seen.add(str(only(Dispatch, scene.fail("a", Failure.SERVER_ERROR)).worker))
    assert len(seen) == 3
    assert only(Reject, scene.fail("a", Failure.SERVER_ERROR)).code == "worker_error"
    settled(scene)


@ALL
def test_a_cancelled_request_is_stopped(name: str) -> None:
    scene = BaselineScene(name, "2x1")
    scene.worker("a")
    assert only(Abort, scene.cancel("a")).request_id == "a"
    settled(scene)


@ALL
def test_time_does_not_go_back(name: str) -> None:
    scene = BaselineScene(name)
    scene.wait(-1.0)
    with pytest.raises(ValueError, match="time went back"):
        scene.arrive("a")


@ALL
def test_a_prefill_pool_takes_rooms_and_hands_over(name: str) -> None:
    scene = BaselineScene(name, None)
    scene.launch("2x1", prefill_only=True)
    assert scene.arrive("a") == []  # nobody to decode it
    first = only(Dispatch, scene.feed(DecodeJoined(DecodeId("d"), "l", 1)))
    assert first.pair is not None and first.pair.decode == "d"
    assert first.decision.decode == "d"
    assert first.pair.room % 2 == first.home.index
    assert scene.arrive("b") == []  # its one room is taken
    scene.first_token("a", str(first.worker))
    assert scene.hand_over("a", str(first.worker)) == []
    assert scene.lose(first.home.index) == []  # it has left that worker
    second = only(Dispatch, scene.finish("a"))
    assert second.request_id == "b"
    abort = only(Abort, scene.feed(DecodeLost(DecodeId("d"), "gone")))
    assert abort.request_id == "b"
    scene.feed(DecodeJoined(DecodeId("e"), "l", 1))
    lost = RequestFailed(RequestId("b"), Failure.WORKER_LOST, "gone", leg=Leg.DECODE)
    again = only(Dispatch, scene.feed(lost))
    assert again.pair is not None and again.pair.decode == "e"
    scene.serve("b", str(again.worker))
    settled(scene)


@ALL
def test_a_pool_that_decodes_itself_needs_no_room(name: str) -> None:
    scene = BaselineScene(name, None)
    scene.launch("2x1", pool="prefill", prefill_only=True)
    scene.launch("2x1", pool="whole")
    for i in range(6):
        dispatch = scene.dispatched(str(i))
        assert (dispatch.pool, dispatch.pair) == ("whole", None)
    scene.feed(DecodeJoined(DecodeId("d"), "l", 100))
    pools = {(d.pool, d.pair is not None) for d in (scene.dispatched(f"b{i}") for i in range(9))}
    assert ("prefill", True) in pools
    assert pools <= {("prefill", True), ("whole", False)}
    assert scene.control.violations() == []


def run(control: Any, seed: int, steps: int = 300) -> list[Any]:
    """Random requests to a pool of mixed degrees, with deaths; every effect, in order. All
    requests have ended at its end."""
    rng = random.Random(seed)
    scene = Scene.__new__(Scene)
    scene.control, scene.now = control, 0.0
    effects: list[Any] = list(scene.launch("1x4,1x2,2x1"))
    live: dict[str, str] = {}
    blocks = parse_composition("1x4,1x2,2x1", 8, (1, 2, 4))

    def follow(new: list[Any]) -> None:
        """Do what the driver does with effects."""
        effects.extend(new)
        for effect in new:
            if isinstance(effect, Dispatch):
                live[str(effect.request_id)] = str(effect.worker)
            elif isinstance(effect, Reject):
                live.pop(str(effect.request_id), None)
            elif isinstance(effect, Abort) and str(effect.request_id) in live:
                lost = Failure.WORKER_LOST
                follow(scene.feed(RequestFailed(effect.request_id, lost, "", rng.random() < 0.2)))

    for step in range(steps):
        scene.wait(rng.random() * 0.05)
        if rng.random() < 0.5:
            name, prompt = f"r{step}", rng.randrange(6)
            length = rng.randrange(2, 60)
            shared = chain(prompt, min(length, 20)) + chain(100 + step, max(0, length - 20))
            follow(scene.arrive(name, length * 100 + 30, blocks=shared))
        elif live and rng.random() < 0.9:
            name = rng.choice(sorted(live))
            kind = rng.randrange(4)
            if kind == 0:
                follow(scene.start(name, live[name]))
            elif kind == 1:
                follow(scene.first_token(name, live[name], cached_tokens=0, compute_s=0.1))
                rank = int(live[name].removeprefix("p/").split("x")[0])
                scene.store(rank, chain(rng.randrange(6), 20))
            else:
                worker = live.pop(name)
                if kind == 2:
                    follow(scene.first_token(name, worker))
                follow(scene.finish(name))
        elif rng.random() < 0.3:
            rank = rng.randrange(8)
            life = scene.control._membership.last_report(Rank(PoolId("p"), rank)).incarnation
            follow(scene.feed(RankLost(Rank(PoolId("p"), rank), "died", life)))
            block = next(block for block in blocks if rank in block)
            for member in block.ranks:
                new = f"life-{step}" if member == rank else None
                report = scene.control._membership.last_report(Rank(PoolId("p"), member))
                life = new or report.incarnation
                follow(scene.feed(reported(member, block, life=life)))
        if not isinstance(control, ControlPlane):
            assert control.violations() == []
    for name in sorted(live):
        follow(scene.finish(name))
    return effects


@ALL
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_kept_of_requests_that_ended(name: str, seed: int) -> None:
    scene = BaselineScene(name, None)
    effects = run(scene.control, seed)
    assert sum(isinstance(effect, Dispatch) for effect in effects) > 100
    assert any(isinstance(effect, Abort) for effect in effects)
    settled(scene)


@ALL
def test_a_seed_decides_everything(name: str) -> None:
    same = [run(BaselineScene(name, None, seed=5).control, seed=3) for _ in range(2)]
    assert same[0] == same[1]


def test_another_seed_draws_otherwise() -> None:
    taken = [
        [
            e.worker
            for e in run(BaselineScene("power_of_two", None, seed=s).control, seed=3)
            if isinstance(e, Dispatch)
        ]
        for s in (0, 1)
    ]
    assert taken[0] != taken[1]


def test_an_unknown_request_is_no_news() -> None:
    scene = BaselineScene("least_loaded")
    assert scene.finish("nobody") == []
    assert scene.cancel("nobody") == []
    assert scene.feed(RequestFailed(RequestId("nobody"), Failure.OVERLOADED, "")) == []
