"""Requests of pools that prefill only and the rooms that they take at decode servers."""

from typing import Any

import pytest
from vertumnus_router.core.decodes import room
from vertumnus_router.core.effects import Abort, Dispatch, Effect, Reject
from vertumnus_router.core.events import (
    DecodeJoined,
    DecodeLost,
    Failure,
    HandedOver,
    Leg,
    PoolLost,
    PrefillFinished,
    RankLost,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.model import CorrectionConfig
from vertumnus_router.core.types import DecodeId, PoolId, Rank, RequestId

from tests.router.core.scene import Scene, only, request

A = RequestId("a")


class Paired(Scene):
    """A pool that prefills only and decode servers ``d0``, ``d1``, …, by their limits."""

    def __init__(self, *limits: int, composition: str = "2x1", **config: Any) -> None:
        super().__init__(None, **config)
        self.launch(composition, prefill_only=True)
        for index, limit in enumerate(limits):
            self.join(f"d{index}", limit)

    def join(self, decode: str, limit: int = 8, life: str = "1") -> list[Effect]:
        return self.feed(DecodeJoined(DecodeId(decode), life, limit))

    def lose(self, decode: str) -> list[Effect]:
        return self.feed(DecodeLost(DecodeId(decode), "it died"))

    @property
    def rooms(self) -> dict[str, int]:
        return {terms.decode: terms.rooms for terms in self.control.decodes()}

    def break_leg(
        self,
        dispatch: Dispatch,
        leg: Leg,
        failure: Failure = Failure.SERVER_ERROR,
        streamed: bool = False,
    ) -> list[Effect]:
        return self.feed(
            RequestFailed(
                dispatch.request_id,
                failure,
                "it broke",
                streamed,
                dispatch.worker,
                dispatch.attempt,
                leg,
            )
        )

    def hand_over(self, dispatch: Dispatch) -> list[Effect]:
        return self.feed(HandedOver(dispatch.request_id, dispatch.worker, dispatch.attempt))

    def nothing_is_left(self) -> None:
        assert self.control.violations() == []
        assert (self.control.pending_count, self.control.queued_count) == (0, 0)
        assert not any(self.rooms.values())
        assert all(w.queue_s == 0.0 for w in self.control.workers(self.now))


def decode_of(dispatch: Dispatch) -> str:
    assert dispatch.pair is not None
    return dispatch.pair.decode


# -- rooms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_rooms_differ_fit_and_lead_to_the_home(size: int) -> None:
    found = {
        room(RequestId(f"r{n}"), attempt, home, size): home
        for n in range(50)
        for attempt in (1, 2, 3)
        for home in range(size)
    }
    assert len(found) == 150 * size
    assert all(0 < one < 2**62 and one % size == home for one, home in found.items())


def test_a_dispatch_names_its_decode_server_and_room() -> None:
    scene = Paired(8, composition="2x1,1x2")
    for name in "abcd":
        dispatch = scene.dispatched(name)
        assert dispatch.pair is not None
        assert dispatch.pair.decode == "d0"
        assert dispatch.pair.room == room(dispatch.request_id, 1, dispatch.home.index, 4)
        assert dispatch.decision.decode == "d0"
    assert scene.rooms == {"d0": 4}


def test_pools_that_decode_themselves_are_left_alone() -> None:
    scene = Scene("2x1")
    scene.feed(DecodeJoined(DecodeId("d0"), "1", 1))
    assert [scene.dispatched(name).pair for name in "abc"] == [None] * 3


def test_the_least_loaded_server_is_chosen_by_its_share() -> None:
    scene = Paired(2, 4)
    chosen = [decode_of(scene.dispatched(name)) for name in "abcdef"]
    assert chosen == ["d0", "d1", "d1", "d0", "d1", "d1"]
    assert scene.rooms == {"d0": 2, "d1": 4}


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_without_a_free_room_a_request_waits_and_is_not_stranded(policy: str) -> None:
    scene = Paired(1, policy=policy, queue_timeout_s=1.0)
    scene.dispatched("a")
    assert scene.arrive("b") == []
    scene.wait(100.0)
    assert scene.feed(Tick()) == []
    (effect,) = scene.finish("a")
    assert isinstance(effect, Dispatch) and effect.request_id == "b"
    scene.finish("b")
    scene.nothing_is_left()


def test_a_batch_takes_as_many_rooms_as_prompts_and_is_not_overtaken() -> None:
    scene = Paired(4)
    scene.dispatched("a", prompts=2)
    assert scene.rooms == {"d0": 2}
    assert scene.arrive("b", prompts=3) == []
    assert scene.arrive("c") == []
    first, second = scene.finish("a")
    assert isinstance(first, Dispatch) and isinstance(second, Dispatch)
    assert (first.request_id, second.request_id) == ("b", "c")
    assert scene.rooms == {"d0": 4}


def test_a_batch_that_no_server_could_take_gets_one_for_itself() -> None:
    scene = Paired(2)
    scene.dispatched("a")
    assert scene.arrive("b", prompts=5) == []
    assert only(Dispatch, scene.finish("a")).request_id == "b"
    assert scene.arrive("c") == []
    assert only(Dispatch, scene.finish("b")).request_id == "c"


def test_explain_names_the_server_and_every_load() -> None:
    scene = Paired(1, 1)
    scene.dispatched("a")
    decision = scene.control.explain(request("asked"), scene.now)
    assert decision.decode == "d1"
    assert [(t.decode, t.rooms, t.limit) for t in decision.decodes] == [("d0", 1, 1), ("d1", 0, 1)]
    assert scene.rooms == {"d0": 1, "d1": 0}


# -- every way out -------------------------------------------------------------------------------


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("way", ["finished", "cancelled", "refused", "streamed", "decode", "pool"])
def test_every_way_out_gives_the_room_back(way: str, handed_over: bool) -> None:
    scene = Paired(8)
    dispatch = scene.dispatched("a")
    if handed_over:
        scene.hand_over(dispatch)
    assert scene.rooms == {"d0": 1}
    match way:
        case "finished":
            scene.feed(RequestFinished(A))
        case "cancelled":
            assert only(Abort, scene.feed(RequestCancelled(A))).attempt == 1
        case "refused":
            assert only(Reject, scene.break_leg(dispatch, Leg.DECODE, Failure.CLIENT_ERROR))
        case "streamed":
            assert only(Reject, scene.break_leg(dispatch, Leg.DECODE, streamed=True))
        case "decode":
            assert only(Abort, scene.lose("d0")).leg is Leg.DECODE
            assert scene.rooms == {}
            only(
                Reject,
                scene.break_leg(dispatch, Leg.DECODE, Failure.WORKER_LOST, streamed=True),
            )
        case "pool":
            effects = scene.feed(PoolLost(PoolId("p"), "front dead"))
            if handed_over:
                assert effects == [], "the pool has nothing more to do with it"
                assert scene.rooms == {"d0": 1}
                scene.feed(RequestFinished(A))
            else:
                assert only(Abort, effects).leg is Leg.PREFILL
                assert scene.rooms == {"d0": 0}
                scene.break_leg(dispatch, Leg.PREFILL, Failure.WORKER_LOST, streamed=True)
    scene.nothing_is_left()


def test_a_failed_prefill_leg_is_retried_at_another_worker() -> None:
    scene = Paired(8)
    first = scene.dispatched("a")
    second = only(Dispatch, scene.break_leg(first, Leg.PREFILL))
    assert second.worker != first.worker
    assert second.pair is not None and first.pair is not None
    assert second.pair.room != first.pair.room
    assert scene.rooms == {"d0": 1}


def test_a_failed_decode_leg_is_retried_at_another_server_and_not_held_against_the_worker() -> None:
    scene = Paired(8, 100, composition="1x1")
    first = scene.dispatched("a")
    second = only(Dispatch, scene.break_leg(first, Leg.DECODE))
    assert (decode_of(first), decode_of(second)) == ("d0", "d1")
    assert second.worker == first.worker
    third = only(Dispatch, scene.break_leg(second, Leg.DECODE))
    reject = only(Reject, scene.break_leg(third, Leg.DECODE))
    assert (reject.status, reject.code) == (502, "decode_error")
    scene.nothing_is_left()


def test_the_server_that_failed_is_taken_again_for_want_of_another() -> None:
    scene = Paired(8)
    first = scene.dispatched("a")
    assert decode_of(only(Dispatch, scene.break_leg(first, Leg.DECODE))) == "d0"


def test_what_is_said_of_an_earlier_attempt_at_the_same_worker_does_not_count() -> None:
    scene = Paired(8, composition="1x1")
    first = scene.dispatched("a")
    only(Dispatch, scene.break_leg(first, Leg.DECODE))
    assert scene.break_leg(first, Leg.PREFILL) == []
    assert scene.hand_over(first) == []
    assert scene.feed(PrefillFinished(A, first.worker, attempt=first.attempt)) == []
    assert scene.queue_s(first.worker) == 1.0
    assert scene.rooms == {"d0": 1}


def test_a_lost_server_ends_its_attempts_only() -> None:
    scene = Paired(1, 1)
    here, there = scene.dispatched("a"), scene.dispatched("b")
    assert (decode_of(here), decode_of(there)) == ("d0", "d1")
    abort = only(Abort, scene.lose("d0"))
    assert (abort.request_id, abort.worker, abort.attempt) == ("a", here.worker, 1)
    assert scene.break_leg(here, Leg.DECODE, Failure.WORKER_LOST) == []
    assert decode_of(only(Dispatch, scene.finish("b"))) == "d1"
    scene.finish("a")
    scene.nothing_is_left()


def test_a_server_that_was_started_again_has_none_of_its_old_rooms() -> None:
    scene = Paired(4)
    dispatch = scene.dispatched("a")
    assert scene.join("d0", 4, life="1") == [], "only a confirmation"
    assert scene.rooms == {"d0": 1}
    assert only(Abort, scene.join("d0", 4, life="2")).leg is Leg.DECODE
    assert scene.rooms == {"d0": 0}
    only(Dispatch, scene.break_leg(dispatch, Leg.DECODE, Failure.WORKER_LOST))


@pytest.mark.parametrize("failure", [Failure.UNREACHABLE, Failure.DISCONNECTED])
def test_nobody_is_sent_to_a_server_that_did_not_answer_until_it_is_heard_of(
    failure: Failure,
) -> None:
    scene = Paired(8)
    first = scene.dispatched("a")
    assert scene.break_leg(first, Leg.DECODE, failure) == []
    assert scene.arrive("b") == []
    assert not scene.control.lacks_decode
    again = scene.join("d0")
    assert [e.request_id for e in again if isinstance(e, Dispatch)] == ["a", "b"]


# -- handing over --------------------------------------------------------------------------------


def test_after_the_hand_over_no_worker_can_lose_the_request() -> None:
    scene = Paired(8, composition="1x1")
    dispatch = scene.dispatched("a")
    scene.hand_over(dispatch)
    assert scene.queue_s(dispatch.worker) == 0.0
    assert scene.control.workers(scene.now)[0].requests == ()
    assert scene.feed(RankLost(Rank(PoolId("p"), 0), "it died", "life-1")) == []
    assert scene.rooms == {"d0": 1}
    scene.finish("a")
    scene.nothing_is_left()


def test_the_report_of_a_prefill_may_come_after_the_hand_over() -> None:
    scene = Paired(8, correction=CorrectionConfig(gain=1.0))
    dispatch = scene.dispatched("a", 1000)
    scene.start("a", dispatch.worker)
    scene.hand_over(dispatch)
    # 0.5 s by profile
    assert scene.first_token("a", dispatch.worker, cached_tokens=500, compute_s=1.0) == []
    assert scene.control.corrections()[1].factor == pytest.approx(2.0)


def test_a_hand_over_frees_the_worker_for_the_next() -> None:
    scene = Paired(8, composition="1x1", policy="late")
    first = scene.dispatched("a", tokens=4000)
    scene.dispatched("b", tokens=4000)
    assert scene.arrive("c", tokens=4000) == []
    assert only(Dispatch, scene.hand_over(first)).request_id == "c"


# -- no server at all ----------------------------------------------------------------------------


def test_without_a_server_requests_wait_as_they_do_without_a_worker() -> None:
    scene = Paired(queue_timeout_s=5.0)
    assert scene.control.lacks_decode
    assert scene.arrive("a") == []
    scene.wait(5.0)
    reject = only(Reject, scene.feed(Tick()))
    assert (reject.status, reject.code) == (503, "no_decode")
    assert scene.arrive("b") == []
    assert only(Dispatch, scene.join("d0")).request_id == "b"
    assert not scene.control.lacks_decode
    scene.finish("b")
    scene.nothing_is_left()


def test_explain_says_that_there_is_no_server() -> None:
    scene = Paired()
    decision = scene.control.explain(request("asked"), scene.now)
    assert decision.candidates == () and decision.decode is None
    assert {reason for _, reason in decision.excluded} == {
        "there is no decode server to pair it with"
    }
