from dataclasses import replace

import pytest
from vertumnus_router.core.events import RankLost
from vertumnus_router.core.membership import Lost, Membership
from vertumnus_router.core.types import PoolId, Rank, WorkerState
from vertumnus_router.core.workers import Candidate
from vertumnus_router.lattice import Block

from tests.router.core.scene import Scene, joined, reported

LEFT, RIGHT, WHOLE = Block(0, 2), Block(2, 2), Block(0, 4)
ONES = [Block(i, 1) for i in range(4)]


def members(expected_manifest: str | None = None) -> Membership:
    def fault(degree: int) -> str | None:
        return None if degree <= 4 else f"no price for degree {degree}"

    return Membership(fault, expected_manifest)


def pool_of_pairs(epoch: int = 1) -> Membership:
    membership = members()
    membership.join(joined())
    for block in (LEFT, RIGHT):
        for rank in block.ranks:
            membership.report(reported(rank, block, epoch=epoch))
    return membership


def serving(membership: Membership) -> list[str]:
    return [candidate.id for candidate in membership.serving]


def states(membership: Membership) -> dict[str, tuple[WorkerState, str | None]]:
    return {w.id: (w.state, w.reason) for w in membership.workers}


def homes(membership: Membership, candidates: tuple[Candidate, ...]) -> list[str]:
    """By rank: where an attempt is now that was at one of ``candidates`` and has its home there."""
    found = []
    for candidate in candidates:
        for index in candidate.block.ranks:
            fate = membership.fate(Rank(candidate.pool.pool, index), candidate)
            match fate:
                case None:
                    found.append("on its way")
                case Lost(cause):
                    found.append(f"lost: {cause}")
                case worker:
                    found.append(worker.id)
    return found


def lost(rank: int, life: str | None = None) -> RankLost:
    return RankLost(Rank(PoolId("p"), rank), "it died", life)


def test_a_worker_exists_once_all_its_ranks_agree() -> None:
    membership = members()
    membership.join(joined())
    membership.report(reported(0, LEFT))
    assert serving(membership) == []
    assert states(membership)["p/0x2"] == (WorkerState.FORMING, "rank 1 has not reported yet")
    membership.report(reported(1, LEFT))
    assert serving(membership) == ["p/0x2"]


def test_ranks_of_different_epochs_do_not_make_a_worker() -> None:
    membership = members()
    membership.join(joined())
    membership.report(reported(0, LEFT, epoch=2))
    membership.report(reported(1, LEFT, epoch=1))
    assert states(membership)["p/0x2"] == (WorkerState.FORMING, "its ranks report epochs 1, 2")
    membership.report(reported(1, LEFT, epoch=2))
    assert serving(membership) == ["p/0x2"]


def test_reports_from_unknown_pools_and_ranks_are_ignored() -> None:
    membership = members()
    assert membership.report(reported(0, ONES[0])).pool is None
    membership.join(joined())
    membership.report(reported(9, Block(9, 1)))
    assert membership.workers == ()
    assert membership.slot(Rank(PoolId("p"), 9)) is None
    assert membership.slot(Rank(PoolId("q"), 0)) is None


def test_slots_are_dense_and_reused() -> None:
    membership = members()
    membership.join(joined("p", 2))
    membership.join(joined("q", 2))
    slots = [membership.slot(Rank(PoolId(p), i)) for p in "pq" for i in range(2)]
    assert slots == [0, 1, 2, 3]
    assert membership.leave(PoolId("p"), "gone").void == (0, 1)
    membership.join(joined("r", 3))
    assert [membership.slot(Rank(PoolId("r"), i)) for i in range(3)] == [0, 1, 4]


def test_a_dead_rank_takes_its_worker_along_and_no_other() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    change = membership.lose(lost(1, "life-1"))
    assert (change.pool, change.void) == ("p", (1,))
    loss = "lost: rank 1: it died"
    assert homes(membership, before) == [loss, loss, "p/2x2", "p/2x2"]
    assert serving(membership) == ["p/2x2"]
    assert states(membership)["p/0x2"] == (WorkerState.LOST, "rank 1: it died")


def test_a_late_report_of_a_dead_life_resurrects_nothing() -> None:
    membership = pool_of_pairs()
    membership.lose(lost(1, "life-1"))
    membership.report(reported(1, LEFT, life="life-1", epoch=99))
    assert serving(membership) == ["p/2x2"]
    membership.report(reported(1, LEFT, life="life-2"))
    assert serving(membership) == ["p/0x2", "p/2x2"]


def test_a_death_that_is_told_before_the_first_report() -> None:
    membership = members()
    membership.join(joined())
    membership.lose(lost(0, "life-1"))
    membership.report(reported(0, ONES[0], life="life-1"))
    assert membership.workers == ()


def test_the_death_of_an_earlier_life_is_no_news() -> None:
    membership = pool_of_pairs()
    membership.report(reported(1, LEFT, life="life-2"))
    change = membership.lose(lost(1, "life-1"))
    assert (change.pool, change.void) == (None, ())
    assert serving(membership) == ["p/0x2", "p/2x2"]


def test_silence_ends_with_the_next_report_and_keeps_the_index() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    change = membership.lose(lost(0))
    assert homes(membership, before)[:2] == ["lost: rank 0: it died"] * 2
    assert change.void == ()
    assert membership.report(reported(0, LEFT)).void == ()
    assert serving(membership) == ["p/0x2", "p/2x2"]


def test_a_new_life_ends_the_old_one_and_voids_its_index() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    change = membership.report(reported(0, LEFT, life="life-2"))
    assert homes(membership, before)[:2] == ["lost: rank 0 was restarted"] * 2
    assert change.void == (0,)
    assert serving(membership) == ["p/0x2", "p/2x2"]  # born again at once
    again = membership.report(reported(0, LEFT, life="life-1"))
    assert (again.pool, again.void) == (None, ())


def test_old_epochs_are_ignored() -> None:
    membership = pool_of_pairs(epoch=5)
    assert membership.report(reported(0, ONES[0], epoch=4)).pool is None
    assert serving(membership) == ["p/0x2", "p/2x2"]


def test_a_new_life_may_start_at_an_older_epoch() -> None:
    membership = members()
    membership.join(joined("p", 1))
    membership.report(reported(0, ONES[0], life="life-1", epoch=7))
    membership.report(reported(0, ONES[0], life="life-2", epoch=1))
    assert serving(membership) == ["p/0x1"]
    assert membership.workers[0].epoch == 1


def test_a_merge_ends_the_small_workers_and_waits_for_all_ranks() -> None:
    membership = members()
    membership.join(joined())
    for block in ONES:
        membership.report(reported(block.first, block))
    before = membership.serving
    membership.report(reported(0, LEFT, epoch=2))
    # Rank 1 is about to follow: its old worker must not take requests any more.
    assert homes(membership, before) == ["on its way", "on its way", "p/2x1", "p/3x1"]
    assert serving(membership) == ["p/2x1", "p/3x1"]
    membership.report(reported(1, LEFT, epoch=2))
    assert homes(membership, before) == ["p/0x2", "p/0x2", "p/2x1", "p/3x1"]
    assert serving(membership) == ["p/0x2", "p/2x1", "p/3x1"]


def test_a_split_serves_rank_by_rank() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    membership.report(reported(0, ONES[0], epoch=2))
    assert homes(membership, before) == ["p/0x1", "on its way", "p/2x2", "p/2x2"]
    assert serving(membership) == ["p/0x1", "p/2x2"]
    membership.report(reported(1, ONES[1], epoch=2))
    assert homes(membership, before) == ["p/0x1", "p/1x1", "p/2x2", "p/2x2"]
    assert serving(membership) == ["p/0x1", "p/1x1", "p/2x2"]


def test_a_rank_that_has_split_off_survives_its_old_sibling_and_not_the_reverse() -> None:
    membership = pool_of_pairs()
    before = membership.serving[:1]
    membership.report(reported(0, ONES[0], epoch=2))
    membership.lose(lost(1, "life-1"))
    assert homes(membership, before) == ["p/0x1", "lost: rank 1: it died"]


def test_a_death_on_the_way_into_a_larger_block_ends_what_was_to_go_there() -> None:
    membership = members()
    membership.join(joined())
    for block in ONES:
        membership.report(reported(block.first, block))
    before = membership.serving
    membership.report(reported(0, LEFT, epoch=2))
    membership.lose(lost(1, "life-1"))
    loss = "lost: rank 1: it died"
    assert homes(membership, before) == [loss, loss, "p/2x1", "p/3x1"]


def test_a_rank_that_restarts_on_the_way_has_lost_its_requests() -> None:
    membership = pool_of_pairs()
    before = membership.serving[:1]
    membership.report(reported(1, ONES[1], epoch=2))
    assert homes(membership, before) == ["on its way", "p/1x1"]
    membership.report(reported(1, ONES[1], life="life-2", epoch=2))
    assert homes(membership, before) == ["lost: rank 1 was restarted"] * 2


def test_a_block_that_is_refused_takes_no_requests_along() -> None:
    membership = members(expected_manifest="m")
    membership.join(joined())
    for block in ONES:
        membership.report(reported(block.first, block))
    before = membership.serving[:2]
    for rank in LEFT.ranks:
        membership.report(reported(rank, LEFT, epoch=2, manifest="other"))
    refusal = "lost: rank 0 runs patches 'other', this router expects 'm'"
    assert [home.partition(":")[0] for home in homes(membership, before)] == ["lost", "lost"]
    assert homes(membership, before)[0].startswith(refusal)


def test_a_worker_outlives_a_new_epoch_that_leaves_it_as_it_is() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    membership.report(reported(2, RIGHT, epoch=2))
    assert homes(membership, before) == ["p/0x2", "p/0x2", "p/2x2", "p/2x2"]
    assert {w.id: w.epoch for w in membership.workers} == {"p/0x2": 1, "p/2x2": 1}
    membership.report(reported(3, RIGHT, epoch=2))
    assert homes(membership, before) == ["p/0x2", "p/0x2", "p/2x2", "p/2x2"]
    assert serving(membership) == ["p/0x2", "p/2x2"]
    assert {w.id: w.epoch for w in membership.workers} == {"p/0x2": 1, "p/2x2": 2}


def test_a_new_life_in_another_epoch_waits_for_its_siblings() -> None:
    membership = pool_of_pairs()
    before = membership.serving[:1]
    membership.report(reported(0, LEFT, life="life-2", epoch=2))
    assert homes(membership, before) == ["lost: rank 0 was restarted"] * 2
    assert serving(membership) == ["p/2x2"]
    membership.report(reported(1, LEFT, epoch=2))
    assert serving(membership) == ["p/0x2", "p/2x2"]


def test_a_dead_rank_has_no_say() -> None:
    membership = pool_of_pairs(epoch=5)
    membership.lose(lost(1, "life-1"))
    membership.report(reported(0, ONES[0], life="life-2", epoch=5))
    assert serving(membership) == ["p/0x1", "p/2x2"]
    membership = members()
    membership.join(joined(manifest="m"))
    membership.report(reported(0, ONES[0], manifest="other"))
    membership.report(reported(1, ONES[1], manifest="m"))
    assert serving(membership) == ["p/1x1"]
    membership.lose(lost(1, "life-1"))
    assert serving(membership) == ["p/0x1"]


def test_contradicting_claims_of_one_epoch_serve_nobody() -> None:
    membership = members()
    membership.join(joined())
    membership.report(reported(0, LEFT))
    membership.report(reported(1, ONES[1]))
    assert serving(membership) == []
    assert states(membership) == {
        "p/0x2": (WorkerState.FORMING, "rank 1 still reports block 1x1"),
        "p/1x1": (WorkerState.FORMING, "rank 0 claims block 0x2 in the same epoch"),
    }


def test_another_manifest_than_expected_is_refused() -> None:
    membership = members(expected_manifest="good")
    membership.join(joined(manifest="bad"))
    membership.report(reported(0, ONES[0], manifest="good"))
    membership.report(reported(1, ONES[1], manifest="bad"))
    assert serving(membership) == ["p/0x1"]
    state, reason = states(membership)["p/1x1"]
    assert state is WorkerState.REFUSED
    assert reason is not None and "'bad', this router expects 'good'" in reason


def test_without_expectation_any_manifest_will_do() -> None:
    membership = members()
    membership.join(joined(manifest="the front's own"))
    for block in ONES:
        membership.report(reported(block.first, block, manifest="other"))
    assert len(serving(membership)) == 4


def test_ranks_of_one_pool_must_agree_on_the_manifest() -> None:
    membership = members()
    membership.join(joined(manifest="m"))
    membership.report(reported(0, LEFT, manifest="m"))
    membership.report(reported(1, LEFT, manifest="n"))
    membership.report(reported(2, ONES[2], manifest="m"))
    assert serving(membership) == ["p/2x1"]
    state, reason = states(membership)["p/0x2"]
    assert state is WorkerState.REFUSED
    assert reason is not None and "rank 1 runs patches 'n', its pool describes 'm'" in reason
    membership.report(reported(1, LEFT, life="life-2", manifest="m"))
    assert serving(membership) == ["p/0x2", "p/2x1"]


@pytest.mark.parametrize(
    ("size", "rank", "block", "reason"),
    [
        (4, 0, Block(0, 8), "block 0x8 reaches beyond the pool of 4"),
        (8, 0, Block(0, 8), "degree 8 is none of the pool's degrees"),
        (4, 3, Block(0, 2), "rank 3 claims this block and is not part of it"),
    ],
)
def test_a_block_that_cannot_be_is_refused(size: int, rank: int, block: Block, reason: str) -> None:
    membership = members()
    membership.join(joined(size=size))
    membership.report(reported(rank, block))
    state, said = next(iter(states(membership).values()))
    assert state is WorkerState.REFUSED
    assert said is not None and reason in said


def test_a_degree_without_a_price_is_refused() -> None:
    membership = members()
    membership.join(joined(size=8, degrees=(1, 8)))
    for rank in range(8):
        membership.report(reported(rank, Block(0, 8)))
    assert states(membership)["p/0x8"] == (WorkerState.REFUSED, "no price for degree 8")
    assert membership.least_degree == 1


def test_least_degree_is_the_ladders_not_the_compositions() -> None:
    membership = members()
    assert membership.least_degree is None
    membership.join(joined(degrees=(2, 4)))
    assert membership.least_degree == 2
    for rank in range(4):
        membership.report(reported(rank, WHOLE))
    assert serving(membership) == ["p/0x4"]
    assert membership.least_degree == 2
    assert membership.serving_ranks == 4


def test_joining_again_with_the_same_description_changes_nothing() -> None:
    membership = pool_of_pairs()
    change = membership.join(joined())
    assert (change.pool, change.void) == (None, ())
    assert serving(membership) == ["p/0x2", "p/2x2"]


def test_another_description_replaces_the_pool() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    change = membership.join(joined(context_tokens=5))
    assert change.left == "the pool was relaunched"
    assert homes(membership, before) == ["lost: its pool has left"] * 4
    assert change.void == (0, 1, 2, 3)
    assert membership.workers == ()


def test_load_is_as_last_reported_and_unknown_before() -> None:
    scene = Scene(None)
    scene.feed(joined("p", 2))
    follower = replace(
        reported(1, Block(0, 2)), running_requests=7, waiting_requests=7, kv_used_tokens=70
    )
    scene.feed(follower)
    (worker,) = scene.control.workers(scene.now)
    assert (worker.running_requests, worker.waiting_requests) == (None, None)
    assert worker.rank_kv_used_tokens == (None, 70)
    leader = replace(reported(0, Block(0, 2)), running_requests=2, waiting_requests=1)
    for tokens in (10, 20):
        scene.feed(replace(leader, kv_used_tokens=tokens))
    (worker,) = scene.control.workers(scene.now)
    assert (worker.running_requests, worker.waiting_requests) == (2, 1)
    assert worker.rank_kv_used_tokens == (20, 70)


def test_a_lost_pool_is_forgotten() -> None:
    membership = pool_of_pairs()
    before = membership.serving
    change = membership.leave(PoolId("p"), "front dead")
    assert (change.pool, change.left) == ("p", "front dead")
    assert homes(membership, before) == ["lost: its pool has left"] * 4
    assert membership.workers == () and membership.pools == ()
    assert membership.leave(PoolId("p"), "again").pool is None
    membership.report(reported(0, ONES[0]))
    assert membership.workers == ()
