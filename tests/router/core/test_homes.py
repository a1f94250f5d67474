"""Every request has a home rank, and is served by whatever block contains it."""

import pytest
from vertumnus_router.core.effects import Abort, Dispatch, Effect, Reject
from vertumnus_router.core.events import Failure, RankLost, RequestCancelled, RequestFailed
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.types import PoolId, Rank, RequestId, WorkerId
from vertumnus_router.lattice import Block, parse_composition

from tests.router.core.scene import Scene, only, reported, with_overhead

P = PoolId("p")


def regroup(scene: Scene, composition: str, epoch: int = 2, size: int = 2) -> list[Effect]:
    """Every rank reports the new composition."""
    effects = []
    for block in parse_composition(composition, size, (1, 2, 4)):
        for rank in block.ranks:
            effects += scene.feed(reported(rank, block, epoch=epoch))
    return effects


def requests_at(scene: Scene) -> dict[str, list[str]]:
    return {w.id: list(w.requests) for w in scene.control.workers(scene.now)}


def test_requests_are_spread_over_the_ranks_of_their_worker() -> None:
    scene = Scene("1x4")
    homes = [scene.dispatched(name).home.index for name in "abcde"]
    assert homes == [0, 1, 2, 3, 0]
    scene.finish("c")
    assert scene.dispatched("f").home == Rank(P, 2)


def test_a_request_past_its_prefill_still_counts_at_its_home() -> None:
    scene = Scene("1x2")
    worker = scene.dispatched("a").worker
    scene.first_token("a", worker)
    assert scene.dispatched("b").home.index == 1


def test_a_split_leaves_each_request_with_its_home() -> None:
    scene = Scene("1x2")
    for name in "abc":
        scene.dispatched(name, 1000)
    assert scene.queue_s("p/0x2") == 1.5
    assert regroup(scene, "2x1") == []
    assert requests_at(scene) == {"p/0x1": ["a", "c"], "p/1x1": ["b"]}
    assert (scene.queue_s("p/0x1"), scene.queue_s("p/1x1")) == (2.0, 1.0)
    assert scene.control.requests_moved == 3
    assert scene.control.violations() == []


def test_a_merge_takes_all_requests_once_all_ranks_agree() -> None:
    scene = Scene("2x1")
    for name in "ab":
        scene.dispatched(name, 1000)
    assert scene.feed(reported(0, Block(0, 2), epoch=2)) == []
    assert requests_at(scene) == {"p/0x2": []}
    assert scene.control.violations() == []
    assert scene.control.pending_count == 2
    assert scene.feed(reported(1, Block(0, 2), epoch=2)) == []
    assert requests_at(scene) == {"p/0x2": ["a", "b"]}
    assert scene.queue_s("p/0x2") == 1.0
    for name in "ab":
        scene.finish(name)
    assert scene.queue_s("p/0x2") == 0.0
    assert (scene.control.violations(), scene.control.pending_count) == ([], 0)


def test_a_running_prefill_takes_what_is_left_of_it_along() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a", 1000).worker
    scene.start("a", worker)
    scene.wait(0.4)
    regroup(scene, "1x2")
    assert scene.queue_s("p/0x2") == pytest.approx(0.3)
    scene.wait(0.2)
    assert scene.queue_s("p/0x2") == pytest.approx(0.1)  # it runs on


def test_the_rest_is_estimated_as_the_model_stands_at_the_move() -> None:
    scene = Scene("2x1,1x2", with_overhead(0.2), beta=1.0, lam=0.0)
    assert scene.dispatched("a", 1000).worker == "p/2x2"
    assert scene.queue_s("p/2x2") == pytest.approx(0.7)
    regroup(scene, "4x1", size=4)
    assert scene.queue_s("p/2x1") == pytest.approx(1.0)


def test_a_block_that_stays_as_it_is_keeps_its_requests_untouched() -> None:
    scene = Scene("1x2,2x1")
    dispatch = scene.dispatched("a", 9000)
    assert dispatch.worker == "p/0x2"
    regroup(scene, "2x2", size=4)
    assert requests_at(scene) == {"p/0x2": ["a"], "p/2x2": []}
    assert scene.queue_s("p/0x2") == 4.5
    assert scene.control.requests_moved == 0


def test_events_name_the_attempt_by_where_it_began() -> None:
    scene = Scene("1x2")
    worker = scene.dispatched("a", 1000).worker
    regroup(scene, "2x1")
    assert scene.start("a", "p/0x1") == []  # not the name of the attempt
    scene.wait(0.5)
    assert scene.queue_s("p/0x1") == 1.0
    scene.start("a", worker)
    scene.wait(0.5)
    assert scene.queue_s("p/0x1") == 0.5
    scene.first_token("a", worker)
    assert scene.queue_s("p/0x1") == 0.0
    assert scene.feed(RequestCancelled(RequestId("a"))) == [Abort(RequestId("a"), P, worker, 1)]
    assert scene.control.violations() == []


@pytest.mark.parametrize("begun", ["before", "after", "between"])
def test_the_time_of_a_prefill_that_moved_teaches_nothing(begun: str) -> None:
    scene = Scene("1x2", correction=CorrectionConfig(gain=1.0))
    worker = scene.dispatched("a", 1000).worker
    if begun != "after":
        scene.start("a", worker)
    if begun == "between":  # the first byte, then the move, then the report
        scene.first_token("a", worker)
    regroup(scene, "2x1")
    scene.start("a", worker)
    scene.first_token("a", worker, cached_tokens=0, compute_s=9.0)
    assert scene.control.corrections() == {}


def test_a_failed_attempt_goes_neither_where_it_began_nor_where_it_failed() -> None:
    scene = Scene("1x2,2x1", attempts=9)
    scene.dispatched("a", 9000)
    regroup(scene, "4x1", size=4)
    second = only(Dispatch, scene.fail("a", Failure.SERVER_ERROR))
    assert second.worker != "p/0x1"
    assert ("p/0x1", "tried before") in second.decision.excluded
    regroup(scene, "1x4", epoch=3, size=4)
    assert requests_at(scene) == {"p/0x4": ["a"]}
    assert isinstance(only(Reject, scene.fail("a", Failure.SERVER_ERROR)), Reject)


def test_a_failure_is_that_of_the_current_attempt_wherever_it_runs() -> None:
    scene = Scene("1x2,2x1")
    worker = scene.dispatched("a", 9000).worker
    regroup(scene, "4x1", size=4)
    stale = RequestFailed(RequestId("a"), Failure.SERVER_ERROR, "other", worker=WorkerId("p/0x1"))
    assert scene.feed(stale) == []
    true = RequestFailed(RequestId("a"), Failure.SERVER_ERROR, "it broke", worker=worker)
    assert only(Dispatch, scene.feed(true)).attempt == 2


def test_a_home_that_dies_after_the_move_ends_the_attempt_under_its_name() -> None:
    scene = Scene("1x2,2x1")
    worker = scene.dispatched("a", 9000).worker
    regroup(scene, "4x1", size=4)
    abort = Abort(RequestId("a"), P, worker, 1)
    assert scene.feed(RankLost(Rank(P, 1), "it died")) == []  # no longer its sibling
    assert scene.feed(RankLost(Rank(P, 0), "it died")) == [abort]
    assert scene.control.violations() == []
    assert only(Dispatch, scene.fail("a", Failure.WORKER_LOST)).attempt == 2


def test_a_home_that_dies_on_its_way_ends_the_attempt() -> None:
    scene = Scene("2x1")
    worker = scene.dispatched("a").worker
    other = scene.dispatched("b").worker
    scene.feed(reported(0, Block(0, 2), epoch=2))
    aborts = scene.feed(RankLost(Rank(P, 1), "it died", "life-1"))
    assert {(e.request_id, e.worker) for e in aborts if isinstance(e, Abort)} == {
        ("a", worker),
        ("b", other),
    }
    assert scene.control.violations() == []
    for name in "ab":
        scene.finish(name)
    assert scene.control.pending_count == 0


def test_new_requests_wait_until_the_ranks_agree() -> None:
    scene = Scene("2x1")
    scene.feed(reported(0, Block(0, 2), epoch=2))
    assert scene.arrive("a") == []
    dispatch = only(Dispatch, scene.feed(reported(1, Block(0, 2), epoch=2)))
    assert (dispatch.worker, dispatch.home) == ("p/0x2", Rank(P, 0))
