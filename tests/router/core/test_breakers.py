"""Workers that fail are left alone for a while, those that are full for as long as they ask."""

from collections.abc import Iterator

import pytest
from vertumnus_router.core.config import BackoffConfig, BreakerConfig, PolicyConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import BreakerChanged, Dispatch, Reject
from vertumnus_router.core.events import (
    Failure,
    Leg,
    PoolLost,
    RequestCancelled,
    RequestFailed,
    Tick,
)
from vertumnus_router.core.snapshot import WorkerSnapshot
from vertumnus_router.core.types import BreakerState, PoolId, RequestId
from vertumnus_router.lattice import Block

from tests.router.core.scene import IDEAL, Scene, joined, reported

BAD, GOOD = "p/0x1", "p/1x1"
QUICK = BreakerConfig(failure_threshold=3, success_threshold=2, open_s=60.0, window_s=120.0)
NO_JITTER = BackoffConfig(initial_s=1.0, longest_s=30.0, multiplier=2.0, jitter=0.0)


class Fleet(Scene):
    """Two equal workers of which one fails, unless said otherwise."""

    def __init__(self, composition: str = "2x1", breaker: BreakerConfig = QUICK) -> None:
        super().__init__(composition, breaker=breaker, backoff=NO_JITTER, attempts=1)
        self.names: Iterator[str] = (f"r{number}" for number in range(10_000))

    def send(self) -> tuple[str, str]:
        """A request arrives; its name and its worker."""
        name = next(self.names)
        return name, str(self.dispatched(name).worker)

    def send_to(self, worker: str) -> str:
        """Requests arrive until one is at ``worker``, the others are finished."""
        for _ in range(200):
            name, at = self.send()
            if at == worker:
                return name
            self.finish(name)
        raise AssertionError(f"nothing goes to {worker}")

    def occupy(self, requests: int) -> list[str]:
        """So many requests stay at each worker; those at ``BAD``."""
        sent = [self.send() for _ in range(2 * requests)]
        return [name for name, worker in sent if worker == BAD]

    def fail_at(self, worker: str, times: int, failure: Failure = Failure.DISCONNECTED) -> None:
        for _ in range(times):
            self.fail(self.send_to(worker), failure)

    def avoids(self, worker: str, requests: int = 40) -> bool:
        """Whether none of the next requests goes there; all are finished."""
        found = []
        for _ in range(requests):
            name, at = self.send()
            found.append(at)
            self.finish(name)
        return worker not in found

    def tick(self, wait_s: float = 0.0) -> list[object]:
        self.wait(wait_s)
        return list(self.feed(Tick()))

    def worker(self, name: str) -> WorkerSnapshot:
        return next(w for w in self.control.workers(self.now) if w.id == name)


def test_a_worker_that_fails_time_after_time_gets_nothing_for_a_while() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 2)
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED
    changed = fleet.fail(fleet.send_to(BAD))[0]
    assert isinstance(changed, BreakerChanged)
    assert (changed.worker, changed.state) == (BAD, BreakerState.OPEN)
    assert changed.reason == "3 failures in a row: it broke"
    assert fleet.avoids(BAD)
    assert fleet.worker(BAD).state.value == "serving"
    assert fleet.worker(BAD).breaker is BreakerState.OPEN
    resting = "its circuit breaker is open: 3 failures in a row: it broke"
    assert fleet.worker(BAD).resting == resting
    assert dict(fleet.dispatched("x").decision.excluded) == {BAD: resting}
    assert (fleet.control.breakers_opened, fleet.control.breakers_overridden) == (1, 0)
    fleet.tick(59.0)
    assert fleet.avoids(BAD)


def test_a_success_in_between_starts_the_count_again() -> None:
    fleet = Fleet()
    for _ in range(2):
        fleet.fail_at(BAD, 2)
        fleet.finish(fleet.send_to(BAD))
    fleet.fail_at(BAD, 1)
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


def test_a_worker_that_fails_every_second_time_is_left_alone_in_the_end() -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.fail_at(BAD, 1)
        fleet.finish(fleet.send_to(BAD))
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED
    (changed,) = fleet.fail(fleet.send_to(BAD))[:1]
    assert isinstance(changed, BreakerChanged)
    assert changed.state is BreakerState.OPEN
    assert changed.reason == "6 of the last 11 attempts failed: it broke"
    assert fleet.avoids(BAD)


@pytest.mark.parametrize(("good", "reason"), [(0, "3 failures in a row"), (1, "6 of the last 11")])
def test_an_answer_that_breaks_off_is_one_attempt_that_failed(good: int, reason: str) -> None:
    fleet = Fleet()
    changed: list[BreakerChanged] = []
    for _ in range(6):
        name = fleet.send_to(BAD)
        fleet.first_token(name, BAD)
        found = fleet.feed(
            RequestFailed(RequestId(name), Failure.DISCONNECTED, "it broke", streamed=True)
        )
        changed += [effect for effect in found if isinstance(effect, BreakerChanged)]
        if changed:
            break
        for _ in range(good):
            fleet.finish(fleet.send_to(BAD))
    assert [one.state for one in changed] == [BreakerState.OPEN]
    assert changed[0].reason.startswith(reason)


@pytest.mark.parametrize("good", [2, 3, 5])
def test_a_worker_that_fails_now_and_then_is_not(good: int) -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.fail_at(BAD, 1)
        for _ in range(good):
            fleet.finish(fleet.send_to(BAD))
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


def test_failures_of_long_ago_do_not_add_up() -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.fail_at(BAD, 1)
        fleet.finish(fleet.send_to(BAD))
        fleet.wait(25.0)  # five of them within the window
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


def test_failures_that_are_far_apart_are_not_in_a_row() -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.fail_at(BAD, 1)
        fleet.wait(61.0)
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


@pytest.mark.parametrize(
    "failure", [Failure.CLIENT_ERROR, Failure.OVERLOADED, Failure.WORKER_LOST], ids=str
)
def test_what_is_no_fault_of_the_worker_opens_nothing(failure: Failure) -> None:
    fleet = Fleet()
    for _ in range(10):
        fleet.fail_at(BAD, 1, failure)
        fleet.tick(31.0)
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED
    assert fleet.control.breakers_opened == 0


@pytest.mark.parametrize(
    "failure",
    [Failure.UNREACHABLE, Failure.DISCONNECTED, Failure.SERVER_ERROR, Failure.STALLED],
    ids=str,
)
def test_every_kind_of_fault_counts(failure: Failure) -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3, failure)
    assert fleet.worker(BAD).breaker is BreakerState.OPEN


def test_the_fault_of_a_decode_server_is_not_the_workers() -> None:
    fleet = Fleet()
    for _ in range(5):
        name = RequestId(fleet.send_to(BAD))
        fleet.feed(RequestFailed(name, Failure.SERVER_ERROR, "it broke", leg=Leg.DECODE))
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


def test_half_open_one_request_at_a_time_until_enough_went_well() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    assert fleet.tick(60.0) == [
        BreakerChanged(
            fleet.worker(BAD).id, BreakerState.HALF_OPEN, "3 failures in a row: it broke"
        )
    ]
    probe = fleet.send_to(BAD)
    assert fleet.avoids(BAD), "one is under way"
    assert fleet.first_token(probe, BAD) == []
    second = fleet.send_to(BAD)
    changed = fleet.first_token(second, BAD)
    assert [type(effect) for effect in changed] == [BreakerChanged]
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED
    assert fleet.worker(BAD).resting is None
    for name in (probe, second):
        fleet.finish(name)
    assert fleet.control.violations() == []


def test_a_probe_that_fails_opens_it_again_for_as_long() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    fleet.tick(60.0)
    fleet.fail_at(BAD, 1)
    assert fleet.worker(BAD).breaker is BreakerState.OPEN
    assert "a probe failed" in str(fleet.worker(BAD).resting)
    fleet.tick(59.0)
    assert fleet.avoids(BAD)
    fleet.tick(1.0)
    assert not fleet.avoids(BAD)


@pytest.mark.parametrize("end", ["cancelled", "full", "its own fault"])
def test_a_probe_that_proves_nothing_makes_way_for_the_next(end: str) -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    fleet.tick(60.0)
    probe = fleet.send_to(BAD)
    assert fleet.avoids(BAD)
    if end == "cancelled":
        fleet.feed(RequestCancelled(RequestId(probe)))
    else:
        fleet.fail(probe, Failure.OVERLOADED if end == "full" else Failure.CLIENT_ERROR)
        fleet.tick(1.0)
    assert fleet.control.violations() == []
    assert fleet.worker(BAD).breaker is BreakerState.HALF_OPEN
    assert not fleet.avoids(BAD)


def test_what_was_sent_before_it_opened_neither_closes_nor_prolongs_it() -> None:
    fleet = Fleet()
    early, other = fleet.occupy(2)
    fleet.fail_at(BAD, 3)
    fleet.first_token(early, BAD)
    assert fleet.worker(BAD).breaker is BreakerState.OPEN
    fleet.wait(30.0)
    fleet.fail(other)
    fleet.tick(30.0)
    assert fleet.worker(BAD).breaker is BreakerState.HALF_OPEN


def test_where_nobody_else_is_left_the_breaker_does_not_count_and_that_is_seen() -> None:
    fleet = Fleet("1x1")
    fleet.fail_at(BAD, 3)
    assert fleet.worker(BAD).breaker is BreakerState.OPEN
    assert fleet.send()[1] == BAD
    assert fleet.control.breakers_overridden == 1
    both = Fleet()
    both.fail_at(BAD, 3)
    both.fail_at(GOOD, 3)
    assert {both.send()[1] for _ in range(20)} == {BAD, GOOD}
    assert both.control.breakers_overridden == 20


def test_another_life_of_the_worker_starts_anew() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    fleet.feed(reported(0, Block(0, 1), life="life-2"))
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED
    assert not fleet.avoids(BAD)


def test_a_life_that_is_over_is_forgotten_in_the_end() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    fleet.feed(reported(0, Block(0, 1), life="life-2"))
    fleet.tick(60.0)
    changed = fleet.tick(QUICK.window_s + 1.0)
    assert [type(one) for one in changed] == [BreakerChanged]
    assert fleet.control._breakers.quiet
    assert not fleet.avoids(BAD)


def test_a_pool_that_left_is_forgotten() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    fleet.feed(PoolLost(PoolId("p"), "gone"))
    fleet.feed(joined("p", 2))
    for rank in range(2):
        fleet.feed(reported(rank, Block(rank, 1)))
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


def test_without_breakers_nothing_opens() -> None:
    fleet = Fleet(breaker=BreakerConfig(enabled=False, failure_threshold=1))
    fleet.fail_at(BAD, 20)
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED


# -- backpressure -------------------------------------------------------------------------------


def press(fleet: Fleet, worker: str, retry_after_s: float | None = None) -> None:
    name = RequestId(fleet.send_to(worker))
    event = RequestFailed(name, Failure.OVERLOADED, "it is full", retry_after_s=retry_after_s)
    fleet.feed(event)


def test_a_full_worker_is_left_alone_for_as_long_as_it_says() -> None:
    fleet = Fleet()
    press(fleet, BAD, retry_after_s=7.0)
    assert fleet.worker(BAD).resting == "it answered that it has no room"
    assert fleet.worker(BAD).breaker is BreakerState.CLOSED
    fleet.tick(6.9)
    assert fleet.avoids(BAD)
    fleet.tick(0.1)
    assert fleet.worker(BAD).resting is None
    assert not fleet.avoids(BAD)


def test_what_it_says_is_bounded() -> None:
    fleet = Fleet()
    press(fleet, BAD, retry_after_s=86_400.0)
    fleet.tick(30.0)
    assert not fleet.avoids(BAD)


def test_if_it_does_not_say_it_is_left_alone_for_longer_each_time() -> None:
    fleet = Fleet()
    for seconds in (1.0, 2.0, 4.0):
        press(fleet, BAD)
        fleet.tick(seconds - 0.1)
        assert fleet.avoids(BAD)
        fleet.tick(0.1)
    fleet.finish(fleet.send_to(BAD))
    press(fleet, BAD)
    fleet.tick(1.0)
    assert not fleet.avoids(BAD), "a success in between starts again"


def test_a_success_ends_a_row_of_pauses_but_not_the_memory_of_failures() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 2)
    press(fleet, BAD)
    fleet.tick(1.0)
    fleet.finish(fleet.send_to(BAD))
    press(fleet, BAD)
    fleet.tick(1.0)
    assert not fleet.avoids(BAD)


def test_a_success_of_an_earlier_request_does_not_end_the_pause() -> None:
    fleet = Fleet()
    (early,) = fleet.occupy(1)
    press(fleet, BAD, retry_after_s=7.0)
    fleet.finish(early)
    assert fleet.avoids(BAD)


def test_where_all_are_full_requests_wait_at_the_router() -> None:
    fleet = Fleet("1x1")
    press(fleet, BAD, retry_after_s=3.0)
    assert fleet.arrive("waits") == []
    assert fleet.tick(2.9) == []
    dispatch = fleet.tick(0.1)[0]
    assert isinstance(dispatch, Dispatch)
    assert dispatch.request_id == "waits"


def test_a_full_worker_is_waited_for_rather_than_one_that_is_broken_tried() -> None:
    fleet = Fleet()
    fleet.fail_at(BAD, 3)
    press(fleet, GOOD, retry_after_s=3.0)
    assert fleet.arrive("waits") == []


def test_routers_of_different_seeds_do_not_come_back_together() -> None:
    ends = set()
    for seed in range(5):
        backoff = BackoffConfig(initial_s=10.0, jitter=0.5)
        scene = Scene("1x1", backoff=backoff, seed=seed, attempts=1)
        scene.dispatched("a")
        scene.fail("a", Failure.OVERLOADED)
        assert scene.arrive("b") == []
        for tenth in range(200):
            if scene.feed(Tick()):
                ends.add(tenth)
                break
            scene.wait(0.1)
    assert len(ends) > 2
    assert min(ends) >= 100
    assert max(ends) <= 150


# -- the retry budget ---------------------------------------------------------------------------


def storm(failure: Failure, requests: int, budget: float = 0.2) -> tuple[int, list[Reject]]:
    """All of so many concurrent requests fail at once: how many are tried again, and the rest."""
    breaker = BreakerConfig(enabled=False)
    scene = Scene("2x1", breaker=breaker, retry_budget=budget, backoff=NO_JITTER)
    scene.launch("2x1", pool="q")
    for number in range(requests):
        scene.dispatched(f"r{number}", 10)
    again, rejected = 0, []
    for number in range(requests):
        for effect in scene.fail(f"r{number}", failure):
            again += isinstance(effect, Dispatch)
            if isinstance(effect, Reject):
                rejected.append(effect)
    assert scene.control.retries_refused == len(rejected)
    assert scene.control.violations() == []
    return again, rejected


def test_when_everything_fails_only_a_share_is_tried_again() -> None:
    again, rejected = storm(Failure.SERVER_ERROR, 200)
    assert again + len(rejected) == 200
    # A fifth of those that are live, which become fewer with every one that is turned away.
    assert 10 <= again <= 40
    assert rejected[0].status == 502
    assert "not tried again: too many requests are" in rejected[0].message


def test_a_few_are_always_tried_again() -> None:
    assert storm(Failure.DISCONNECTED, 10, budget=0.0) == (10, [])


@pytest.mark.parametrize("failure", [Failure.UNREACHABLE, Failure.WORKER_LOST], ids=str)
def test_what_adds_no_load_is_free(failure: Failure) -> None:
    assert storm(failure, 100) == (100, [])


def test_the_first_token_of_a_further_attempt_makes_room_for_another() -> None:
    scene = Scene("2x1", retry_budget=0.0)
    for number in range(30):
        name = f"r{number}"
        scene.dispatched(name, 10)
        dispatch = next(e for e in scene.fail(name) if isinstance(e, Dispatch))
        scene.first_token(name, dispatch.worker)  # and goes on, with a long answer
    assert scene.control.retries_refused == 0
    assert scene.control.violations() == []


def test_settings_are_checked() -> None:
    for wrong in (
        lambda: BreakerConfig(failure_threshold=0),
        lambda: BreakerConfig(success_threshold=0),
        lambda: BreakerConfig(open_s=float("nan")),
        lambda: BackoffConfig(multiplier=0.5),
        lambda: BackoffConfig(jitter=1.5),
        lambda: PolicyConfig(retry_budget=-1.0),
    ):
        with pytest.raises(ValueError, match="must"):
            wrong()
    assert ControlPlane(PolicyConfig(), IDEAL).breakers_opened == 0
