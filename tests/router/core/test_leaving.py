"""A pool or a decode server that is told to leave takes nothing new and keeps what it has."""

from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.effects import Abort, Dispatch, Regroup, Reject
from vertumnus_router.core.events import (
    DecodeJoined,
    DecodeLeaving,
    PoolLeaving,
    PoolLost,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.types import DecodeId, PoolId, RequestId, WorkerState

from tests.router.core.scene import Scene, only

P, Q = PoolId("p"), PoolId("q")
CAUSE = "it was told to leave"


def two_pools(**config: object) -> Scene:
    it = Scene("1x1", **config)
    it.launch("1x1", "q")
    return it


def test_what_a_leaving_pool_has_goes_on_and_nothing_new_comes() -> None:
    it = two_pools()
    first = it.dispatched("first")
    other = Q if first.pool == P else P
    assert it.feed(PoolLeaving(first.pool, CAUSE)) == []
    assert it.control.requests_at(first.pool) == 1
    for name in ("a", "b", "c"):
        assert it.dispatched(name).pool == other
    states = {w.pool: (w.state, w.reason) for w in it.control.workers(it.now)}
    assert states[first.pool] == (WorkerState.DRAINING, CAUSE)
    assert states[other] == (WorkerState.SERVING, None)
    it.finish("first")
    assert it.control.requests_at(first.pool) == 0
    assert it.feed(PoolLost(first.pool, CAUSE)) == []
    assert it.control.violations() == []


def test_a_pool_that_stays_after_all_serves_again() -> None:
    it = Scene("1x1")
    it.feed(PoolLeaving(P, CAUSE))
    assert not it.control.is_ready()
    assert it.arrive("waits") == []
    dispatch = only(Dispatch, it.feed(PoolLeaving(P, None)))
    assert dispatch.request_id == "waits"
    assert it.control.is_ready()


def test_nobody_waits_for_a_pool_that_leaves() -> None:
    it = Scene("1x1", queue_timeout_s=5.0)
    it.feed(PoolLeaving(P, CAUSE))
    it.arrive("waits")
    it.wait(6.0)
    assert only(Reject, it.feed(Tick())).status == 503


def test_fluid_composition_leaves_a_leaving_pool_alone() -> None:
    it = Scene(None, policy="fluid")
    it.launch("2x1", prefill_only=True)
    it.launch("2x1", "q", prefill_only=True)
    it.feed(DecodeJoined(DecodeId("d"), "life", 100))
    it.feed(PoolLeaving(P, CAUSE))
    for name in "abcd":
        for effect in it.arrive(name, 10):
            assert getattr(effect, "pool", Q) == Q
    assert it.control.requests_at(Q)


def test_the_controller_does_not_move_a_leaving_pool() -> None:
    window = ControllerConfig(mode="on", window_s=1.0, persistence=1, cooldown=1)
    it = Scene("2x1", controller=window)
    it.launch("2x1", "q")
    it.feed(PoolLeaving(P, CAUSE))
    moved = set()
    for step in range(40):
        it.wait(0.25)
        # Little work, so that there is something to merge; nothing answers the command.
        effects = it.arrive(str(step), 10) + it.feed(Tick())
        moved |= {e.pool for e in effects if isinstance(e, Regroup)}
    assert moved == {Q}


def test_a_leaving_decode_server_gets_no_new_rooms() -> None:
    it = Scene(None)
    it.launch("1x1", prefill_only=True)
    old, new = DecodeId("old"), DecodeId("new")
    it.feed(DecodeJoined(old, "life", 8))
    assert it.dispatched("first").pair.decode == old
    assert not it.control.lacks_decode
    it.feed(DecodeLeaving(old, CAUSE))
    assert it.control.lacks_decode, "the only one there is takes nothing"
    assert it.arrive("second") == []
    effects = it.feed(DecodeJoined(new, "life", 8))
    assert not it.control.lacks_decode
    assert only(Dispatch, effects).pair.decode == new
    assert it.control.rooms_at(old) == 1
    it.feed(RequestFinished(RequestId("first")))
    assert it.control.rooms_at(old) == 0
    it.feed(DecodeLeaving(old, None))
    assert it.dispatched("third").pair.decode == old


def test_a_pool_that_is_lost_while_it_leaves_is_lost() -> None:
    it = Scene("1x1")
    it.dispatched("first")
    it.feed(PoolLeaving(P, CAUSE))
    assert only(Abort, it.feed(PoolLost(P, "it died"))).request_id == "first"
    it.launch("1x1")
    assert it.control.is_ready(), "its next life knows nothing of that"
