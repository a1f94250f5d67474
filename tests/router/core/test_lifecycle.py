"""What becomes of a request: every way to its one end, and what it leaves behind (nothing)."""

from typing import Any

import pytest
from vertumnus_router.core.effects import Abort, Dispatch, Reject
from vertumnus_router.core.events import (
    Failure,
    PoolLost,
    RankLost,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    Tick,
)
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.types import PoolId, Rank, RequestId, WorkerId
from vertumnus_router.lattice import Block

from tests.router.core.scene import Scene, chain, joined, only, reported, request

A = RequestId("a")


def assert_nothing_left(scene: Scene) -> None:
    assert scene.control.violations() == []
    assert (scene.control.pending_count, scene.control.queued_count) == (0, 0)
    for worker in scene.control.workers(scene.now):
        assert (worker.queue_s, worker.requests) == (0.0, ())


def lose(scene: Scene, rank: int, life: str | None = "life-1") -> list[object]:
    return list(scene.feed(RankLost(Rank(PoolId("p"), rank), "it died", life)))


# -- the straight way ---------------------------------------------------------------------------


def test_finished_requests_leave_nothing_behind() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a").worker
    assert scene.start("a", worker) == []
    assert scene.control.pending_count == 1
    assert scene.first_token("a", worker) == []
    assert scene.queue_s(worker) == 0.0
    assert [w.requests for w in scene.control.workers(scene.now) if w.id == worker] == [(A,)]
    assert scene.finish("a") == []
    assert_nothing_left(scene)


def test_an_end_without_any_report_releases_too() -> None:
    scene = Scene("2x1")
    scene.dispatched("a")
    scene.finish("a")
    assert_nothing_left(scene)


def test_reports_for_unknown_requests_and_other_workers_do_nothing() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a").worker
    other = next(w.id for w in scene.control.workers(scene.now) if w.id != worker)
    for name, at in (("a", other), ("nobody", worker)):
        assert scene.start(name, at) == []
        assert scene.first_token(name, at) == []
    assert scene.finish("nobody") == []
    assert scene.fail("nobody") == []
    assert scene.feed(RequestCancelled(RequestId("nobody"))) == []
    scene.wait(0.5)
    assert scene.queue_s(worker) == 1.0  # neither started nor finished


def test_a_second_life_of_a_live_id_is_a_bug_of_the_caller() -> None:
    scene = Scene("1x1")
    scene.dispatched("a")
    with pytest.raises(ValueError, match="request id a is in flight already"):
        scene.arrive("a")


def test_time_cannot_go_back() -> None:
    scene = Scene("1x1")
    scene.wait(-1.0)
    with pytest.raises(ValueError, match=r"went back from 1000\.0 to 999\.0"):
        scene.feed(Tick())


# -- what is turned down ------------------------------------------------------------------------


def test_too_long_for_the_context_in_openais_words() -> None:
    scene = Scene(None)
    scene.launch("1x1", context_tokens=8192)
    reject = only(Reject, scene.arrive("a", 8000, output_tokens=193))
    assert (reject.status, reject.code) == (400, "context_length_exceeded")
    assert reject.message == (
        "This model's maximum context length is 8192 tokens. However, you requested 8193 tokens "
        "(8000 in the messages, 193 in the completion). Please reduce the length of the messages "
        "or completion."
    )
    assert_nothing_left(scene)
    assert isinstance(scene.arrive("b", 8000, output_tokens=192)[0], Dispatch)


def test_too_long_for_the_memory_of_a_rank() -> None:
    scene = Scene(None)
    scene.launch("1x1", kv_capacity_tokens=5000)
    reject = only(Reject, scene.arrive("a", 5000, output_tokens=1))
    assert (reject.status, reject.code) == (400, "kv_capacity_exceeded")
    assert "room for 5000 tokens" in reject.message


def test_the_limit_named_is_that_of_a_pool_with_enough_context() -> None:
    scene = Scene(None)
    scene.launch("1x1", pool="p", context_tokens=1000, kv_capacity_tokens=9000)
    scene.launch("1x1", pool="q", context_tokens=8000, kv_capacity_tokens=3000)
    assert "room for 3000 tokens" in only(Reject, scene.arrive("a", 5000)).message


def test_a_length_that_is_only_an_estimate_is_left_to_the_engine() -> None:
    scene = Scene(None)
    scene.launch("1x1", context_tokens=100)
    assert isinstance(scene.arrive("a", 5000, exact=False)[0], Dispatch)


def test_a_long_request_goes_to_the_pool_that_fits_it() -> None:
    scene = Scene(None)
    scene.launch("2x1", pool="small", context_tokens=1000)
    scene.launch("1x1", pool="large", context_tokens=50_000)
    dispatch = scene.dispatched("a", 20_000)
    assert dispatch.pool == "large"
    assert dict(dispatch.decision.excluded) == {
        "small/0x1": "20010 tokens, the context has 1000",
        "small/1x1": "20010 tokens, the context has 1000",
    }


def test_without_any_pool_the_answer_is_immediate() -> None:
    reject = only(Reject, Scene(None).arrive("a"))
    assert (reject.status, reject.code) == (503, "no_pool")


def test_with_no_worker_serving_requests_wait_for_one() -> None:
    scene = Scene(None)
    scene.feed(joined("p", 1))
    assert scene.arrive("a") == []
    assert (scene.control.queued_count, scene.control.is_ready()) == (1, False)
    scene.wait(5.0)
    dispatch = only(Dispatch, scene.feed(reported(0, Block(0, 1))))
    assert (dispatch.request_id, dispatch.worker) == ("a", "p/0x1")
    assert scene.control.is_ready()


def test_waiting_for_a_worker_ends_after_the_timeout() -> None:
    scene = Scene(None, queue_timeout_s=30.0)
    scene.feed(joined("p", 1))
    scene.arrive("a")
    scene.wait(29.0)
    assert scene.feed(Tick()) == []
    scene.wait(1.0)
    reject = only(Reject, scene.feed(Tick()))
    assert (reject.status, reject.code) == (503, "no_worker")
    assert_nothing_left(scene)


def test_a_request_that_a_busy_worker_will_take_does_not_time_out() -> None:
    scene = Scene("1x1", policy="late", queue_timeout_s=30.0)
    for name in "abc":
        scene.arrive(name, 5000)
    scene.wait(500.0)
    assert scene.feed(Tick()) == []
    assert scene.control.queued_count == 1


def test_the_timeout_counts_from_when_the_last_worker_went() -> None:
    scene = Scene("1x1", policy="late", queue_timeout_s=30.0)
    for name in "abc":
        scene.arrive(name, 5000)
    scene.wait(100.0)
    aborted = lose(scene, 0)
    assert [type(effect) for effect in aborted] == [Abort, Abort]
    scene.wait(29.0)
    assert scene.feed(Tick()) == []
    scene.wait(1.0)
    assert only(Reject, scene.feed(Tick())).request_id == "c"


def test_a_worker_that_came_stops_the_timeout_of_those_that_it_will_take() -> None:
    scene = Scene(None, policy="late", queue_timeout_s=30.0)
    scene.feed(joined("p", 1))
    for name in "abc":
        scene.arrive(name, 5000)
    scene.wait(20.0)
    assert len(scene.feed(reported(0, Block(0, 1)))) == 2
    scene.wait(20.0)
    assert scene.feed(Tick()) == []
    assert scene.control.queued_count == 1


def test_the_timeout_begins_anew_when_an_attempt_failed() -> None:
    """However long ago it was that the request waited for its first worker."""
    scene = Scene(None, queue_timeout_s=30.0)
    scene.feed(joined("p", 2))
    scene.arrive("a", 60_000)
    only(Dispatch, scene.feed(reported(0, Block(0, 1))))
    scene.wait(40.0)
    only(Abort, lose(scene, 0))
    assert scene.fail("a", Failure.WORKER_LOST) == []
    scene.wait(29.0)
    assert scene.feed(Tick()) == []
    assert only(Dispatch, scene.feed(reported(1, Block(1, 1)))).attempt == 2


def test_what_came_to_be_cached_while_the_request_waited_counts() -> None:
    scene = Scene(None)
    scene.feed(joined("p", 1))
    scene.arrive("a", 1000, blocks=chain(1, 10))
    scene.store(0, chain(1, 5))
    dispatch = only(Dispatch, scene.feed(reported(0, Block(0, 1))))
    assert dispatch.decision.chosen.cached_tokens == 500


def test_a_full_queue_turns_the_next_one_away() -> None:
    scene = Scene(None, queue_limit=2)
    scene.feed(joined("p", 1))
    assert scene.arrive("a") == [] and scene.arrive("b") == []
    reject = only(Reject, scene.arrive("c"))
    assert (reject.request_id, reject.status, reject.code) == ("c", 429, "queue_full")
    assert scene.control.queued_count == 2
    scene.feed(RequestCancelled(A))
    assert scene.arrive("d") == []


# -- attempts that fail -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [Failure.DISCONNECTED, Failure.OVERLOADED, Failure.SERVER_ERROR, Failure.WORKER_LOST],
)
def test_a_failed_attempt_is_placed_elsewhere(failure: Failure) -> None:
    scene = Scene("3x1")
    first = scene.dispatched("a")
    second = only(Dispatch, scene.fail("a", failure))
    assert second.worker != first.worker
    assert second.attempt == 2
    assert (first.worker, "tried before") in second.decision.excluded
    assert scene.queue_s(first.worker) == 0.0
    assert scene.queue_s(second.worker) == 1.0
    scene.finish("a")
    assert_nothing_left(scene)


def test_attempts_are_bounded() -> None:
    scene = Scene("4x1", attempts=3)
    workers = [scene.dispatched("a").worker]
    workers += [only(Dispatch, scene.fail("a")).worker for _ in range(2)]
    assert len(set(workers)) == 3
    reject = only(Reject, scene.fail("a"))
    assert (reject.status, reject.code) == (503, "worker_disconnected")
    assert reject.message == "it broke (attempt 3)"
    assert_nothing_left(scene)


def test_one_dead_front_does_not_use_up_the_attempts() -> None:
    scene = Scene(None, attempts=3)
    scene.launch("4x1", pool="a")
    scene.launch("4x1", pool="b")
    scene.store(1, chain(1, 9), pool="a")
    first = scene.dispatched("a", 1000, blocks=chain(1, 10))
    assert first.worker == "a/1x1"
    second = only(Dispatch, scene.fail("a", Failure.UNREACHABLE))
    assert second.pool == "b"
    unreachable = "the front of its pool could not be reached"
    assert dict(second.decision.excluded) == {
        "a/0x1": unreachable,
        "a/1x1": "tried before",
        "a/2x1": unreachable,
        "a/3x1": unreachable,
    }
    reject = only(Reject, scene.fail("a", Failure.UNREACHABLE))
    assert (reject.status, reject.code) == (503, "worker_unreachable")
    assert_nothing_left(scene)


def test_with_every_worker_tried_the_request_ends() -> None:
    scene = Scene("2x1", attempts=9)
    scene.dispatched("a")
    assert isinstance(scene.fail("a")[0], Dispatch)
    assert only(Reject, scene.fail("a")).status == 503
    assert_nothing_left(scene)


def test_nothing_is_retried_after_the_first_byte() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a").worker
    scene.first_token("a", worker)
    assert only(Reject, scene.fail("a", Failure.WORKER_LOST, streamed=True)).code == "worker_lost"
    assert_nothing_left(scene)


def test_the_clients_own_error_is_never_retried() -> None:
    scene = Scene("2x1")
    scene.dispatched("a")
    reject = only(Reject, scene.fail("a", Failure.CLIENT_ERROR))
    assert (reject.status, reject.code) == (400, "invalid_request")
    assert_nothing_left(scene)


def test_a_failure_of_an_earlier_attempt_is_ignored() -> None:
    scene = Scene("3x1")
    first = scene.dispatched("a").worker
    second = only(Dispatch, scene.fail("a")).worker
    stale = RequestFailed(A, Failure.UNREACHABLE, "again", worker=first)
    assert scene.feed(stale) == []
    assert scene.queue_s(second) == 1.0


def test_an_end_told_after_the_attempt_failed_does_not_end_the_next() -> None:
    scene = Scene("1x1")
    scene.dispatched("a")
    lose(scene, 0)
    assert scene.fail("a", Failure.WORKER_LOST) == []
    assert scene.finish("a") == []
    assert scene.control.queued_count == 1


def test_a_retry_with_no_worker_left_alive_waits_for_one() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a").worker
    for rank in range(2):
        lose(scene, rank)
    assert scene.fail("a", Failure.WORKER_LOST) == []
    assert scene.control.queued_count == 1
    other = 1 - int(worker[2])
    effects = scene.feed(reported(other, Block(other, 1), life="life-2"))
    assert only(Dispatch, effects).attempt == 2


# -- workers that go ----------------------------------------------------------------------------


def test_a_lost_worker_aborts_its_requests_and_the_answer_moves_them() -> None:
    scene = Scene("2x1")
    scene.dispatched("a", 1000)
    scene.dispatched("b", 1000)
    lost = next(w for w in scene.control.workers(scene.now) if "a" in w.requests)
    abort = lose(scene, lost.ranks[0].index)
    assert abort == [Abort(A, PoolId("p"), lost.id, 1)]
    assert scene.control.violations() == []
    assert scene.queue_s(lost.id) == 0.0  # released at once
    assert scene.control.pending_count == 2
    moved = only(Dispatch, scene.fail("a", Failure.WORKER_LOST))
    assert moved.worker != lost.id
    for name in "ab":
        scene.finish(name)
    assert_nothing_left(scene)


def test_a_pair_goes_with_either_of_its_ranks() -> None:
    scene = Scene("1x2,2x1")
    assert scene.dispatched("a", 9000).worker == "p/0x2"
    assert lose(scene, 1) == [Abort(A, PoolId("p"), WorkerId("p/0x2"), 1)]
    assert scene.serving() == ["p/2x1", "p/3x1"]


def test_an_answer_that_was_complete_counts_although_the_worker_is_gone() -> None:
    scene = Scene("1x1")
    scene.dispatched("a")
    lose(scene, 0)
    assert scene.finish("a") == []
    assert_nothing_left(scene)


def test_reports_of_a_lost_worker_change_nothing() -> None:
    scene = Scene("1x1")
    worker = scene.dispatched("a").worker
    lose(scene, 0)
    scene.start("a", worker)
    scene.first_token("a", worker)
    assert scene.control.violations() == []
    assert scene.control.pending_count == 1


def test_a_restarted_worker_starts_without_the_old_ones_work() -> None:
    scene = Scene("1x1")
    scene.dispatched("a", 5000)
    effects = scene.feed(reported(0, Block(0, 1), life="life-2"))
    assert effects == [Abort(A, PoolId("p"), WorkerId("p/0x1"), 1)]
    assert scene.queue_s("p/0x1") == 0.0
    # The same worker id was tried, and no other worker serves.
    assert only(Reject, scene.fail("a", Failure.WORKER_LOST)).code == "worker_lost"
    assert scene.dispatched("b").worker == "p/0x1"


def test_a_lost_pool_aborts_everything_there() -> None:
    scene = Scene("2x1")
    scene.launch("1x1", pool="q")
    for name in "abc":
        scene.dispatched(name)
    effects = scene.feed(PoolLost(PoolId("p"), "front dead"))
    assert sorted(e.request_id for e in effects if isinstance(e, Abort)) == sorted(
        set("abc") - set(scene.control.workers(scene.now)[0].requests)
    )
    for effect in effects:
        assert only(Dispatch, scene.fail(effect.request_id, Failure.WORKER_LOST)).pool == "q"


# -- clients that go ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["dispatched", "prefill", "decode"])
def test_a_client_that_leaves_aborts_its_attempt(phase: str) -> None:
    scene = Scene("1x1")
    worker = scene.dispatched("a").worker
    if phase != "dispatched":
        scene.start("a", worker)
    if phase == "decode":
        scene.first_token("a", worker)
    assert scene.feed(RequestCancelled(A)) == [Abort(A, PoolId("p"), worker, 1)]
    assert_nothing_left(scene)
    assert scene.fail("a", Failure.UNREACHABLE) == []  # the aborted attempt's own end
    assert scene.feed(RequestCancelled(A)) == []


def test_a_client_that_leaves_while_its_worker_is_gone() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a").worker
    lose(scene, int(worker[2]))
    assert scene.feed(RequestCancelled(A)) == []  # aborted already
    assert scene.fail("a", Failure.WORKER_LOST) == []
    assert_nothing_left(scene)


# -- what reports teach -------------------------------------------------------------------------

LEARNING: dict[str, Any] = {"correction": CorrectionConfig(gain=1.0)}


def test_a_prefill_that_had_the_worker_to_itself_corrects_the_model() -> None:
    scene = Scene("1x1", **LEARNING)
    worker = scene.dispatched("a", 1000).worker
    scene.start("a", worker)
    scene.first_token("a", worker, cached_tokens=500, compute_s=1.0)  # 0.5 s by profile
    assert scene.control.corrections()[1].factor == pytest.approx(2.0)


def test_the_report_may_come_after_the_first_byte_but_counts_once() -> None:
    scene = Scene("1x1", **LEARNING)
    worker = scene.dispatched("a", 1000).worker
    scene.start("a", worker)
    scene.first_token("a", worker)
    assert scene.control.corrections() == {}
    scene.first_token("a", worker, cached_tokens=0, compute_s=3.0)
    scene.first_token("a", worker, cached_tokens=0, compute_s=9.0)
    assert scene.control.corrections()[1].factor == pytest.approx(3.0)
    assert scene.control.corrections()[1].samples == 1


def test_times_of_shared_steps_teach_nothing() -> None:
    scene = Scene("1x1", **LEARNING)
    for name in "ab":
        scene.dispatched(name)
    for name in "ab":
        scene.start(name, "p/0x1")
    for name in "ab":
        scene.first_token(name, "p/0x1", cached_tokens=0, compute_s=2.0)
    assert scene.control.corrections() == {}


def test_an_estimated_length_teaches_nothing() -> None:
    scene = Scene("1x1", **LEARNING)
    scene.dispatched("a", exact=False)
    scene.start("a", "p/0x1")
    scene.first_token("a", "p/0x1", cached_tokens=0, compute_s=2.0)
    assert scene.control.corrections() == {}


# -- asking changes nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_explain_tells_what_placement_then_does(policy: str) -> None:
    scene = Scene("1x2,2x1", policy=policy, tie_s=0.001)
    for i in range(9):
        asked = scene.control.explain(request(f"r{i}", 500 + 300 * i), scene.now)
        effects = scene.feed(RequestArrived(request(f"r{i}", 500 + 300 * i)))
        if effects:
            assert only(Dispatch, effects).decision == asked
        else:
            assert policy == "late"


def test_explain_in_the_shadow_of_the_queue() -> None:
    scene = Scene("1x1", policy="late")
    for name in "abc":
        scene.arrive(name, 5000)
    # c waits behind a and b; a shorter request would overtake it, a longer one would not.
    assert scene.control.explain(request("x", 1000), scene.now).chosen.queue_s == 10.0
    assert scene.control.explain(request("x", 9000), scene.now).chosen.queue_s == 15.0


def test_explain_when_nothing_is_eligible_says_why() -> None:
    scene = Scene("1x1")
    scene.feed(joined("q", 2))
    scene.feed(reported(0, Block(0, 2), pool="q"))
    lose(scene, 0)
    decision = scene.control.explain(request("x"), scene.now)
    assert decision.candidates == ()
    assert dict(decision.excluded) == {
        "p/0x1": "lost: rank 0: it died",
        "q/0x2": "forming: rank 1 has not reported yet",
    }


def test_workers_show_what_operators_need() -> None:
    scene = Scene("1x2,1x1")
    scene.store(0, chain(1, 10))
    scene.store(1, chain(1, 4))
    scene.dispatched("a", 3000)
    pair, single = scene.control.workers(scene.now)
    assert (pair.id, pair.pool, pair.degree, pair.epoch) == ("p/0x2", "p", 2, 1)
    assert pair.ranks == (Rank(PoolId("p"), 0), Rank(PoolId("p"), 1))
    assert (pair.state.value, pair.reason, pair.requests) == ("serving", None, (A,))
    assert pair.queue_s == pytest.approx(1.5)
    assert (pair.rank_blocks, pair.cached_blocks, pair.partial_blocks) == ((10, 4), 10, 6)
    assert (single.requests, single.queue_s, single.cached_blocks) == ((), 0.0, 0)


def test_index_events_of_unknown_ranks_are_ignored() -> None:
    scene = Scene("1x1")
    scene.store(7, chain(1, 10))
    scene.store(0, chain(1, 10), pool="nobody")
    assert scene.control.index_nodes == 0


def test_blocks_told_before_the_first_heartbeat_count() -> None:
    scene = Scene(None)
    scene.feed(joined("p", 1))
    scene.store(0, chain(1, 10))
    scene.feed(reported(0, Block(0, 1)))
    assert scene.control.workers(scene.now)[0].cached_blocks == 10


def test_a_new_life_clears_the_index_of_the_old_one() -> None:
    scene = Scene("2x1")
    for rank in range(2):
        scene.store(rank, chain(1, 10))
    scene.feed(reported(0, Block(0, 1), life="life-2"))
    assert [w.cached_blocks for w in scene.control.workers(scene.now)] == [0, 10]
    scene.feed(PoolLost(PoolId("p"), "front dead"))
    assert scene.control.index_nodes == 0
