"""One simulated pool: moves, deaths, copies and hand-overs, at times computed by hand."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import pytest
from vertumnus_router.core.effects import Cause, Copy, Decision, Dispatch, Life, Reclaim, Regroup
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    CopyEnded,
    Event,
    MoveOutcome,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    RankReported,
    ReclaimEnded,
    RegroupEnded,
    RequestFailed,
    TransferOutcome,
)
from vertumnus_router.core.types import (
    BlockHash,
    PlanId,
    PoolId,
    Rank,
    Request,
    RequestId,
    TransferId,
    WorkerId,
)
from vertumnus_router.lattice import Block, parse_composition
from vertumnus_sim.jobs import Job
from vertumnus_sim.network import Network
from vertumnus_sim.pool import Pool
from vertumnus_sim.scenario import Delays, Hardware
from vertumnus_sim.timeline import Timeline

from tests.simulator.scene import BLOCK_TOKENS, DEGREES, HARDWARE, PROFILE, cluster

QUIET = replace(HARDWARE, noise=0.0)
DELAYS = Delays(vote_s=0.25, switch_s=0.5)
Told = TypeVar("Told", bound=Event)


def step_s(degree: int, *shapes: tuple[int, int]) -> float:
    d_s = {1: 0.01, 2: 0.02, 4: 0.03}[degree]
    a_s = {1: 1e-5, 2: 2e-5, 4: 2e-5}[degree]
    total = d_s
    for uncached, before in shapes:
        pairs = uncached * before + uncached * (uncached + 1) / 2
        total += a_s * uncached + 1e-6 * before + (9e-5 * uncached + 1e-9 * pairs) / degree
    return total


def blocks_of(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(map(BlockHash, range(first, first + count)))


class Stand:
    """Pools on a timeline of their own, with nobody to answer what they tell."""

    def __init__(
        self, composition: str = "4x1", hardware: Hardware = QUIET, pools: int = 1
    ) -> None:
        self.timeline = Timeline()
        self.told: list[tuple[float, Event]] = []
        self.first_tokens: dict[str, tuple[float, int]] = {}
        self.busy_s = 0.0
        where = cluster(composition, gpus=4 * pools, hardware=hardware, delays=DELAYS)
        network = Network(self.timeline)
        self.pools = [
            Pool(
                number,
                where,
                BLOCK_TOKENS,
                PROFILE,
                0,
                self.timeline,
                network,
                lambda event: self.told.append((self.timeline.now, event)),
                self,
            )
            for number in range(pools)
        ]
        self.pool = self.pools[0]

    def stepped(self, degree: int, seconds: float) -> None:
        self.busy_s += degree * seconds

    def first_token(self, job: Job, degree: int) -> None:
        self.first_tokens[job.request.id] = self.timeline.now, degree

    def submit(self, name: str, home: int, tokens: int, first: int = 0, pool: int = 0) -> None:
        at = self.pools[pool]
        request = Request(RequestId(name), tokens, 1, blocks_of(first, tokens // BLOCK_TOKENS))
        decision = Decision(request.id, "none", ())
        rank, worker = Rank(at.id, home), WorkerId("w")
        at.submit(Dispatch(request.id, at.id, rank, worker, decision, 1), request)

    def regroup(self, before: str, after: str, epoch: int = 0) -> None:
        blocks = [parse_composition(text, 4, DEGREES) for text in (before, after)]
        self.pool.regroup(Regroup(PlanId("plan"), self.pool.id, epoch, *blocks))

    def copy(self, source: Rank, destination: Rank, blocks: tuple[BlockHash, ...]) -> None:
        here, there = (self.pools[int(r.pool[-1])] for r in (destination, source))
        order = Copy(
            TransferId("t"), Life(source, "1"), Life(destination, "1"), blocks, Cause.OPERATOR
        )
        here.copy(order, there)

    def events(self, kind: type[Told]) -> list[tuple[float, Told]]:
        return [(at_s, event) for at_s, event in self.told if isinstance(event, kind)]

    def only(self, kind: type[Told]) -> tuple[float, Told]:
        (found,) = self.events(kind)
        return found

    def finished(self) -> dict[str, float]:
        return {event.request_id: at_s for at_s, event in self.events(PrefillFinished)}

    def pinned(self, dead: Iterable[int] = ()) -> int:
        caches = [
            cache for pool in self.pools for rank, cache in pool.caches.items() if rank not in dead
        ]
        return sum(cache.pinned + cache.reserved for cache in caches)


def test_ranks_that_compute_at_once_slow_each_other_down() -> None:
    stand = Stand("4x1", replace(QUIET, contention=0.6, remote_bytes_per_s=1e18))
    stand.submit("a", 0, 500)
    stand.submit("b", 1, 500, first=100)
    stand.timeline.run()
    alone_s = step_s(1, (500, 0))
    assert stand.first_tokens["a"][0] == pytest.approx(alone_s)
    # One of the three others computes when it begins.
    assert stand.first_tokens["b"][0] == pytest.approx(1.2 * alone_s)


def test_the_hand_over_follows_the_steps_at_the_bandwidth_of_the_home() -> None:
    """What was computed before the last step has been on its way since the prefill began."""
    computed_s = sum(step_s(1, shape) for shape in ((1_000, 0), (1_000, 1_000), (500, 2_000)))
    for remote_bytes_per_s, left_bytes in (
        (1e7, 500_000.0),  # fast enough: the last chunk alone is left
        (2e6, 2_500_000 - 2e6 * computed_s),
    ):
        stand = Stand(hardware=replace(QUIET, remote_bytes_per_s=remote_bytes_per_s))
        stand.submit("a", 0, 2_500)
        stand.timeline.run()
        assert stand.finished() == {"a": pytest.approx(computed_s, rel=1e-12)}
        expected_s = computed_s + left_bytes / remote_bytes_per_s
        assert stand.first_tokens["a"] == (pytest.approx(expected_s, rel=1e-12), 1)
        assert stand.busy_s == pytest.approx(computed_s) and not stand.pinned()


def test_two_hand_overs_of_one_home_share_its_link() -> None:
    stand = Stand(hardware=replace(QUIET, remote_bytes_per_s=1e6))
    stand.submit("a", 0, 300)
    stand.submit("b", 0, 300, first=50)
    stand.timeline.run()
    first_s = step_s(1, (300, 0))
    # 0.3 s of bytes each; the second begins when the first has sent for one more step.
    second_s = first_s + first_s
    assert stand.first_tokens["a"][0] == pytest.approx(second_s + 2 * (0.3 - first_s))
    assert stand.first_tokens["b"][0] == pytest.approx(first_s + 0.3 + 0.3)


def test_a_split_goes_on_in_the_middle_of_a_prefill() -> None:
    stand = Stand("1x4")
    stand.submit("a", 3, 3_000)
    stand.timeline.at(0.01, stand.regroup, "1x4", "2x2")
    stand.timeline.run()
    first_s = step_s(4, (1_000, 0))
    at_s, moved = stand.only(RegroupEnded)
    assert (moved.outcome, moved.epoch) == (MoveOutcome.COMMITTED, 1)
    assert at_s == pytest.approx(first_s + 0.75)
    assert moved.stages is not None
    assert moved.stages.drain == pytest.approx(1000 * (first_s - 0.01))
    assert (moved.stages.vote, moved.stages.switch) == (250, 500)
    rest_s = step_s(2, (1_000, 1_000)) + step_s(2, (1_000, 2_000))
    finished_s, finished = stand.only(PrefillFinished)
    assert finished_s == pytest.approx(first_s + 0.75 + rest_s)
    assert finished.cached_tokens == 0 and finished.compute_s == pytest.approx(first_s + rest_s)
    assert len(stand.events(PrefillStarted)) == 1
    assert stand.first_tokens["a"][1] == 2 and not stand.pinned()
    # The ranks that the request is not at home at keep what they had, as a cache.
    assert [len(cache) for cache in stand.pool.caches.values()] == [10, 10, 30, 30]
    reports = {e.rank.index: e for _, e in stand.events(RankReported)}
    assert {rank: (e.epoch, e.block) for rank, e in reports.items()} == {
        rank: (1, Block(rank // 2 * 2, 2)) for rank in range(4)
    }


def test_a_merge_resumes_what_had_begun_and_copies_what_one_rank_lacks() -> None:
    stand = Stand("4x1")
    stand.submit("a", 0, 2_000)
    stand.submit("b", 0, 500, first=50)
    stand.submit("c", 1, 1_500, first=100)
    stand.timeline.at(0.01, stand.regroup, "4x1", "1x2,2x1")
    stand.timeline.run()
    first_s = step_s(1, (1_000, 0))
    stands_s = first_s + 0.75  # both ranks computed 1000 tokens
    # a goes on first; rank 1 copies its KV.
    copied_s = QUIET.copy_latency_s + 1_000 * 1_000 / QUIET.local_bytes_per_s
    second_s = stands_s + step_s(2, (1_000, 1_000)) + copied_s
    # c next, though it came last: it had begun. b fills the step.
    third_s = second_s + step_s(2, (500, 1_000), (500, 0)) + copied_s
    expected = {"a": second_s, "c": third_s, "b": third_s}
    assert stand.finished() == {name: pytest.approx(at) for name, at in expected.items()}
    assert list(stand.finished()) == ["a", "c", "b"]
    assert not stand.pinned()


def test_blocks_that_stay_compute_through_a_move() -> None:
    stand = Stand("4x1")
    for rank in range(4):
        stand.submit(str(rank), rank, 3_000, first=100 * rank)
    stand.timeline.at(0.01, stand.regroup, "4x1", "2x1,1x2")
    stand.timeline.run()
    whole_s = sum(step_s(1, (1_000, before)) for before in (0, 1_000, 2_000))
    finished = stand.finished()
    assert finished["0"] == finished["1"] == pytest.approx(whole_s)
    moved_s = step_s(1, (1_000, 0)) + 0.75 + QUIET.copy_latency_s + 1e6 / QUIET.local_bytes_per_s
    rest_s = step_s(2, (1_000, 1_000)) + step_s(2, (1_000, 2_000))
    assert finished["2"] == pytest.approx(moved_s + rest_s)


@pytest.mark.parametrize(
    ("epoch", "again", "dead"), [(1, False, None), (0, True, None), (0, False, 1)]
)
def test_a_move_of_another_time_is_refused(epoch: int, again: bool, dead: int | None) -> None:
    """Of a wrong epoch, while another one is under way, and of a block that is dead."""
    stand = Stand("4x1")
    if again:
        stand.regroup("4x1", "2x1,1x2")
    if dead is not None:
        stand.pool.kill(dead)
    stand.regroup("4x1", "1x2,2x1", epoch)
    _, ended = stand.events(RegroupEnded)[0]
    assert (ended.outcome, ended.epoch) == (MoveOutcome.REFUSED, None)
    stand.timeline.run()
    committed = [e for _, e in stand.events(RegroupEnded) if e.outcome is MoveOutcome.COMMITTED]
    assert len(committed) == again
    assert stand.pool._workers[0].block == Block(0, 1)
    assert not any(worker.draining for worker in stand.pool._workers.values())


@pytest.mark.parametrize("at_s", [0.02, 0.5])
def test_a_rank_that_dies_in_a_move_ends_it_and_the_other_goes_on(at_s: float) -> None:
    """While the other one drains, and when both stand."""
    stand = Stand("4x1")
    stand.submit("a", 0, 2_000)
    stand.submit("b", 1, 500, first=50)
    stand.timeline.at(0.01, stand.regroup, "4x1", "1x2,2x1")
    stand.timeline.at(at_s, stand.pool.kill, 1)
    stand.timeline.run()
    ended_s, ended = stand.only(RegroupEnded)
    assert (ended_s, ended.outcome) == (at_s, MoveOutcome.ABANDONED)
    _, lost = stand.only(RankLost)
    assert (lost.rank.index, lost.incarnation) == (1, "1")
    whole_s = step_s(1, (1_000, 0)) + step_s(1, (1_000, 1_000))
    waited_s = max(0.0, at_s - step_s(1, (1_000, 0)))  # for the vote
    assert stand.finished()["a"] == pytest.approx(whole_s + waited_s)
    failed = [event.request_id for _, event in stand.events(RequestFailed)]
    # At 0.5 s b has been computed, and handed over.
    assert failed == (["b"] if at_s < 0.1 else []) and ("b" in stand.first_tokens) == (at_s > 0.1)
    assert not stand.pinned(dead=[1])


def test_a_block_dies_as_one_and_takes_no_more() -> None:
    stand = Stand("2x2")
    stand.submit("a", 0, 2_000)
    stand.timeline.at(0.01, stand.pool.kill, 1)
    stand.timeline.at(0.02, stand.submit, "b", 0, 500)
    stand.timeline.at(0.02, stand.submit, "c", 2, 500)
    stand.timeline.run()
    assert [event.rank.index for _, event in stand.events(RankLost)] == [0, 1]
    assert [event.request_id for _, event in stand.events(RequestFailed)] == ["a", "b"]
    assert list(stand.first_tokens) == ["c"]
    told = len(stand.told)
    stand.pool.report()
    assert {e.rank.index for _, e in stand.told[told:] if isinstance(e, RankReported)} == {2, 3}


@pytest.mark.parametrize("remote", [False, True])
def test_a_copy_brings_what_is_lacking_at_the_bandwidth_of_its_way(remote: bool) -> None:
    stand = Stand("8x1", pools=2)
    stand.submit("a", 0, 800)
    to = Rank(PoolId("node-1"), 0) if remote else Rank(stand.pool.id, 1)
    stand.submit("b", to.index, 350, pool=int(remote))
    stand.timeline.at(5.0, stand.copy, Rank(stand.pool.id, 0), to, blocks_of(0, 8))
    stand.timeline.run()
    at_s, ended = stand.only(CopyEnded)
    bytes_per_s = QUIET.remote_bytes_per_s if remote else QUIET.local_bytes_per_s
    transfer_s = 500_000 / bytes_per_s
    assert at_s == pytest.approx(5.0 + 0.002 + transfer_s)
    assert (ended.outcome, ended.blocks, ended.bytes) == (TransferOutcome.DONE, 5, 500_000)
    assert ended.seconds == pytest.approx(0.002 + transfer_s)
    assert ended.transfer_s == pytest.approx(transfer_s)
    _, stored = stand.events(BlocksStored)[-1]
    assert stored == BlocksStored(to, BlockHash(2), blocks_of(3, 5))
    assert stand.pools[remote].caches[to.index].held(blocks_of(0, 8)) == 8
    assert not stand.pinned()


@pytest.mark.parametrize("keep_one", [True, False])
def test_a_copy_is_surplus_where_one_is_kept(keep_one: bool) -> None:
    stand = Stand("4x1", replace(QUIET, kv_blocks=20, keep_one=keep_one))
    stand.submit("a", 0, 800)
    stand.submit("b", 1, 1_000, first=50)
    one, other = Rank(stand.pool.id, 0), Rank(stand.pool.id, 1)
    stand.timeline.at(5.0, stand.copy, one, other, blocks_of(0, 8))
    stand.timeline.at(6.0, stand.submit, "c", 1, 400, 100)  # two have to go
    stand.timeline.run()
    _, gone = stand.only(BlocksRemoved)
    assert gone.blocks == ((7, 6) if keep_one else (59, 58))


def test_what_cannot_be_copied_is_refused() -> None:
    stand = Stand("4x1", replace(QUIET, kv_blocks=20))
    one, other = Rank(stand.pool.id, 0), Rank(stand.pool.id, 1)
    stand.submit("a", 0, 800)
    stand.submit("b", 1, 1_500, first=50)
    stand.timeline.at(0.01, stand.copy, one, other, blocks_of(0, 8))  # not computed yet
    stand.timeline.at(0.1, stand.copy, one, other, blocks_of(0, 8))  # 15 of 20 blocks are pinned
    stand.timeline.at(5.0, stand.pool.kill, 0)
    stand.timeline.at(5.0, stand.copy, one, other, blocks_of(0, 8))
    stand.timeline.run()
    ended = [event for _, event in stand.events(CopyEnded)]
    assert {event.outcome for event in ended} == {TransferOutcome.REFUSED}
    reasons = ["the source holds less by now", "no memory for it", "a rank died"]
    assert [event.reason for event in ended] == reasons


@pytest.mark.parametrize("dead", [0, 1])
def test_a_copy_whose_rank_dies_fails_and_gives_all_back(dead: int) -> None:
    stand = Stand("4x1")
    one, other = Rank(stand.pool.id, 0), Rank(stand.pool.id, 1)
    stand.submit("a", 0, 800)
    stand.submit("b", 1, 300)
    stand.timeline.at(5.0, stand.copy, one, other, blocks_of(0, 8))
    stand.timeline.at(5.003, stand.pool.kill, dead)
    stand.timeline.run()
    _, ended = stand.only(CopyEnded)
    assert (ended.outcome, ended.blocks) == (TransferOutcome.FAILED, 0)
    assert not stand.pinned() and len(stand.pool.caches[1]) == 3


@pytest.mark.parametrize("dead", [None, 0, 1])
def test_prompts_go_on_when_a_copy_frees_the_memory(dead: int | None) -> None:
    """At its source and its destination, also where the other one is dead by then."""
    stand = Stand("4x1", replace(QUIET, kv_blocks=20, local_bytes_per_s=1e6))
    one, other = Rank(stand.pool.id, 0), Rank(stand.pool.id, 1)
    stand.submit("a", 0, 1_000)
    stand.timeline.at(5.0, stand.copy, one, other, blocks_of(0, 10))
    for rank in (0, 1):
        stand.timeline.at(5.1, stand.submit, str(rank), rank, 1_500, 50 + 50 * rank)
    if dead is not None:
        stand.timeline.at(5.5, stand.pool.kill, dead)
    stand.timeline.run()
    copied_s = 5.0 + 0.002 + 1.0
    computed_s = step_s(1, (1_000, 0)) + step_s(1, (500, 1_000))
    living = {str(rank) for rank in (0, 1) if rank != dead}
    finished = stand.finished()
    assert {name: finished[name] for name in living} == {
        name: pytest.approx(copied_s + computed_s) for name in living
    }


def test_a_reclaim_deletes_all_that_it_names_or_nothing() -> None:
    stand = Stand("4x1")
    holder = Life(Rank(stand.pool.id, 0), "1")
    stand.submit("a", 0, 800)
    reclaim = Reclaim(TransferId("t"), holder, blocks_of(0, 8), 3, Cause.RECLAIM)
    stand.timeline.at(0.01, stand.pool.reclaim, reclaim)
    stand.timeline.at(5.0, stand.pool.reclaim, reclaim)
    stand.timeline.run()
    refused, done = (event for _, event in stand.events(ReclaimEnded))
    assert (refused.outcome, refused.blocks) == (TransferOutcome.REFUSED, 0)
    assert (done.outcome, done.blocks) == (TransferOutcome.DONE, 5)
    assert stand.pool.caches[0].held(blocks_of(0, 8)) == len(stand.pool.caches[0]) == 3
