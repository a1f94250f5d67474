"""Algorithm 2, by hand: what a scan copies and deletes, from where to where.

Ê_C(R, P) = R/1000/C, blocks of 100 tokens: one saves 0.1 s at degree 1, 0.05 s at degree 2.
Rank r has slot r; "1x2,2x1" is the worker p/0x2 of ranks 0 and 1, then p/2x1 and p/3x1.
"""

from dataclasses import replace

import pytest
from vertumnus_router.core.effects import Cause, Copy, Dispatch, Reclaim
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    IndexReset,
    PoolLost,
    RankLost,
    ReclaimEnded,
    RequestArrived,
    TransferOutcome,
)
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.lattice import Block

from tests.router.core.prefix_scene import SCAN_S, PrefixScene, where
from tests.router.core.scene import chain, only, reported, request

DOCUMENT = chain(1, 4)


def inter(**config: object) -> PrefixScene:
    """Rank 2 holds four blocks. A request of 1000 tokens takes 0.6 s there and 0.5 s at degree 2,
    which it prefers and where it misses 4·0.05 s = 0.2 s."""
    scene = PrefixScene("1x2,2x1", theta_inter_s=0.9, **config)
    scene.store(2, DOCUMENT)
    return scene


# -- copies to another degree --------------------------------------------------------------------


def test_a_degree_that_misses_enough_gets_a_copy() -> None:
    scene = inter()
    assert scene.serve(DOCUMENT, 1000, times=4).worker == "p/0x2"
    assert scene.scan() == []  # 0.8 s, and half of that is left
    scene.serve(DOCUMENT, 1000, times=3)
    (copy,) = scene.scan()  # 0.4 + 0.6 s
    assert isinstance(copy, Copy)
    assert (copy.blocks, copy.cause) == (DOCUMENT, Cause.INTER_DEGREE)
    assert where([copy]) == [(2, 0, 4)]
    (decision,) = scene.decisions()
    assert decision.missed_s == pytest.approx(1.0)
    assert decision.level == pytest.approx(0.25)  # a copied block
    assert (decision.degree, decision.replicas, decision.blocks) == (2, 0, 4)
    assert (decision.source, decision.target) == (copy.source.rank, copy.destination.rank)


def test_the_seconds_are_those_of_the_missing_part_of_the_path() -> None:
    scene = inter()
    scene.store(1, DOCUMENT[:2])
    scene.serve(DOCUMENT, 1000, times=9)  # 2·0.05 s each
    assert scene.scan() == []
    scene.serve(DOCUMENT, 1000, times=5)  # 0.45 + 0.5 s
    (copy,) = scene.scan()
    # To the rank that has half of it; the copy is the whole chain, of which it lacks two blocks.
    assert where([copy]) == [(2, 1, 4)]
    (decision,) = scene.decisions()
    assert (decision.blocks, decision.level) == (2, pytest.approx(0.475))


def test_one_copy_is_ordered_once() -> None:
    scene = inter()
    scene.serve(DOCUMENT, 1000, times=20)
    (copy,) = scene.scan()
    assert isinstance(copy, Copy)
    scene.wait(9.0)
    scene.serve(DOCUMENT, 1000, times=20)
    assert scene.scan() == []
    assert scene.decisions()[-1].reason is not None and "on its way" in scene.decisions()[-1].reason
    scene.copied(copy)
    scene.serve(DOCUMENT, 1000, times=20)
    assert scene.scan() == []  # it is there


def test_what_is_missed_most_per_block_goes_first_and_the_path_below_waits() -> None:
    scene = inter(per_scan=1)
    deep = (*DOCUMENT, *chain(2, 2))
    scene.store(2, deep)
    scene.serve(DOCUMENT, 1000, times=10)
    scene.serve(deep, 1500, times=2)  # 0.9 s there, 0.75 s at degree 2
    (copy,) = scene.scan()
    # 12·0.05 s a block for the four of the document, 2·0.05 s for the two below.
    assert copy.blocks == DOCUMENT
    assert scene.decisions()[0].level == pytest.approx(0.6)


def test_no_more_than_so_many_are_ordered_in_one_scan() -> None:
    scene = PrefixScene("1x4,4x1", theta_inter_s=0.01, per_scan=2)
    for n in range(4):
        scene.store(4 + n, chain(n, 4))
        scene.serve(chain(n, 4), 1000, times=1 + n)
    copies = scene.scan()
    assert len({copy.destination.rank for copy in copies if isinstance(copy, Copy)}) == 2
    assert [copy.blocks for copy in copies] == [chain(3, 4), chain(2, 4)]


def test_copies_in_flight_are_bounded_in_all_and_at_each_rank() -> None:
    scene = PrefixScene("1x4,4x1", theta_inter_s=0.01, copies_in_flight=2)
    for n in range(2):
        scene.store(4, chain(n, 4))  # both at one rank
        scene.serve(chain(n, 4), 1000)
    assert where(scene.scan()) == [(4, 0, 4)]
    scene = PrefixScene("1x2,4x1", theta_inter_s=0.01)
    for n in range(4):
        scene.store(2 + n, chain(n, 4))
        scene.serve(chain(n, 4), 1000)
    assert [copy[:2] for copy in where(scene.scan())] == [(2, 0), (3, 1)]
    scene = PrefixScene("1x4,4x1", theta_inter_s=0.01, copies_in_flight=2)
    for n in range(4):
        scene.store(4 + n, chain(n, 4))
        scene.serve(chain(n, 4), 1000)
    assert len(scene.scan()) == 2


def test_a_copy_whose_ranks_are_busy_follows_when_they_are_free() -> None:
    scene = PrefixScene("1x4,4x1", theta_inter_s=0.01, copies_in_flight=1, per_scan=3)
    for n in range(4):
        scene.store(4, chain(n, 4))
        scene.serve(chain(n, 4), 1000, times=4 - n)
    copies = scene.scan()
    for n in range(3):
        (copy,) = copies
        assert isinstance(copy, Copy) and copy.blocks == chain(n, 4)
        assert scene.tick() == []  # it is in flight
        scene.copied(copy)
        copies = scene.tick()
    assert copies == []  # a scan orders no more than three
    assert sum(one.reason is not None for one in scene.decisions()) == 3  # noted once each


def test_a_copy_that_waits_is_forgotten_with_the_next_scan() -> None:
    scene = PrefixScene("1x4,4x1", theta_inter_s=0.01, copies_in_flight=1, timeout_s=1000.0)
    for n in range(2):
        scene.store(4, chain(n, 4))
        scene.serve(chain(n, 4), 1000, times=2 - n)
    (copy,) = scene.scan()
    for _ in range(8):
        assert scene.scan() == []  # nobody asks any more
    scene.copied(copy)
    assert scene.tick() == []


# -- more replicas at one degree -----------------------------------------------------------------


def test_a_busy_prefix_gets_another_replica_where_most_of_it_is() -> None:
    scene = PrefixScene("4x1", theta_intra=8)
    prompt = chain(1, 10)
    scene.store(1, prompt)
    scene.store(3, prompt[:2])
    scene.serve(prompt, 1001, times=8)
    assert scene.scan() == []  # 8 are not more than 8
    scene.serve(prompt, 1001, times=5)
    (copy,) = scene.scan()  # 4 + 5
    assert where([copy]) == [(1, 3, 10)]
    assert copy.cause is Cause.INTRA_DEGREE
    (decision,) = scene.decisions()
    assert (decision.level, decision.replicas, decision.blocks) == (9.0, 1, 8)


def test_accesses_count_per_replica() -> None:
    scene = PrefixScene("4x1", theta_intra=4)
    prompt = chain(1, 10)
    for rank in (0, 1):
        scene.store(rank, prompt)
    scene.serve(prompt, 1001, times=8)
    assert scene.scan() == []
    scene.serve(prompt, 1001, times=5)
    assert [decision.level for decision in scene.decisions()] == []
    (copy,) = scene.scan()  # 4 + 5 accesses at two replicas
    assert scene.decisions()[0].level == 4.5
    assert where([copy])[0][1] in (2, 3)


def test_of_similar_ones_the_smaller_copy_goes_first() -> None:
    scene = PrefixScene("4x1", theta_intra=4, per_scan=1)
    scene.store(0, chain(1, 10))
    scene.store(1, chain(2, 3))
    scene.serve(chain(1, 10), 1001, times=21)
    scene.serve(chain(2, 3), 301, times=20)
    assert [copy.blocks for copy in scene.scan()] == [chain(2, 3)]


def test_the_destination_is_one_with_room_then_one_without_load() -> None:
    scene = PrefixScene("4x1", theta_intra=4)
    prompt = chain(1, 10)
    scene.store(0, prompt)
    scene.feed(replace(reported(1, Block(1, 1)), kv_used_tokens=999_500))
    scene.serve(prompt, 1001, times=5)
    busy = scene.dispatched("busy", 5000)  # an idle worker with nothing cached
    assert busy.worker != "p/0x1"
    (copy,) = scene.scan()
    assert isinstance(copy, Copy)
    expected = {2, 3} - {busy.home.index}
    assert copy.destination.rank.index in expected


def test_the_source_is_the_holder_with_the_least_load() -> None:
    scene = inter()
    scene.store(3, DOCUMENT)
    scene.serve(DOCUMENT, 1000, times=10)
    for name in ("a", "b"):
        scene.feed(RequestArrived(request(name, 10_000)))
    loads = {worker.id: worker.queue_s for worker in scene.control.workers(scene.now)}
    (copy,) = scene.scan()
    assert isinstance(copy, Copy)
    lightest = min((2, 3), key=lambda rank: loads[f"p/{rank}x1"])  # type: ignore[index]
    assert copy.source.rank.index == lightest


# -- deletions -----------------------------------------------------------------------------------


def test_of_two_replicas_nobody_reads_one_goes_from_the_fullest() -> None:
    scene = PrefixScene("4x1", theta_reclaim=0.5)
    for rank in (0, 1):
        scene.store(rank, DOCUMENT)
    scene.feed(replace(reported(1, Block(1, 1)), kv_used_tokens=500))
    (reclaim,) = scene.scan()
    assert isinstance(reclaim, Reclaim)
    assert (reclaim.holder.rank.index, reclaim.blocks, reclaim.keep) == (1, DOCUMENT, 0)
    # Until it is told to have ended the other one is the last, and then, too.
    assert scene.scan() == []
    scene.feed(ReclaimEnded(reclaim.transfer, TransferOutcome.DONE, 4))
    scene.feed(BlocksRemoved(reclaim.holder.rank, DOCUMENT[::-1]))
    assert scene.scan() == []


def test_a_replica_that_is_used_stays() -> None:
    scene = PrefixScene("4x1", theta_reclaim=0.5)
    for rank in (0, 1):
        scene.store(rank, DOCUMENT)
    scene.serve(DOCUMENT, 401)
    assert scene.scan() == []  # 1 access is not below 2·0.5
    assert len(scene.scan()) == 1  # 0.5 is


def test_the_last_replica_of_a_degree_stays_while_the_degree_wants_it() -> None:
    scene = PrefixScene("1x2,2x1", theta_reclaim=0.9)
    scene.store(0, DOCUMENT)  # degree 2
    scene.store(2, DOCUMENT)  # degree 1
    scene.serve(DOCUMENT, 500)  # 0.05 s at degree 2
    assert where(scene.scan()) == [(None, 2, 4)]
    assert scene.scan() == []


def test_only_the_cold_end_of_a_path_goes() -> None:
    scene = PrefixScene("4x1", theta_reclaim=0.5)
    prompt = chain(1, 10)
    for rank in (0, 1):
        scene.store(rank, prompt)
    scene.serve(prompt[:6], 601, times=4)
    (reclaim,) = scene.scan()
    assert isinstance(reclaim, Reclaim)
    assert (reclaim.blocks, reclaim.keep) == (prompt, 6)


def test_cold_runs_of_one_path_go_together_and_branches_one_by_one() -> None:
    scene = PrefixScene("4x1", theta_reclaim=0.5)
    trunk, one, other = chain(1, 3), chain(2, 2), chain(3, 2)
    for rank in (0, 1):
        scene.store(rank, (*trunk, *one))
    scene.store(2, (*trunk, *other))  # another branch, elsewhere
    reclaims = scene.scan()
    assert where(reclaims) == [(None, 0, 5)]
    # A rank with both branches keeps the trunk until they are gone.
    scene = PrefixScene("4x1", theta_reclaim=0.5)
    for rank in (0, 1):
        scene.store(rank, (*trunk, *one))
        scene.store(rank, (*trunk, *other))
    assert [where([one])[0][2] for one in scene.scan()] == [2, 2]


def test_nothing_goes_that_a_request_at_the_worker_uses() -> None:
    scene = PrefixScene("1x1,1x1", theta_reclaim=0.9)
    for rank in (0, 1):
        scene.store(rank, DOCUMENT)
    first = scene.dispatched("a", 401, blocks=DOCUMENT)
    second = scene.dispatched("b", 401, blocks=DOCUMENT)
    assert {first.worker, second.worker} == {"p/0x1", "p/1x1"}
    for _ in range(4):
        assert scene.scan() == []
    scene.finish("a")
    assert where(scene.scan()) == [(None, first.home.index, 4)]


def test_nothing_goes_that_is_being_copied_from_there() -> None:
    scene = inter(theta_reclaim=0.5)
    scene.store(3, DOCUMENT)
    scene.serve(DOCUMENT, 1000, times=10)
    copy, reclaim = scene.scan()
    assert isinstance(copy, Copy) and isinstance(reclaim, Reclaim)
    assert reclaim.holder != copy.source


def test_what_was_just_copied_is_not_deleted_before_it_could_be_used() -> None:
    scene = inter(theta_reclaim=0.5)
    scene.serve(DOCUMENT, 1000, times=10)
    (copy,) = scene.scan()
    assert isinstance(copy, Copy)
    scene.copied(copy)
    # The degree-1 copy that nobody reads may go, the new one may not.
    assert where(scene.scan()) == [(None, 2, 4)]


def test_the_trunk_stays_where_it_is_the_last_one_that_its_degree_wants() -> None:
    scene = PrefixScene("1x2,2x1", theta_reclaim=2.0)
    for rank in (0, 2):
        scene.store(rank, (*DOCUMENT, *chain(2, 2)))
    assert scene.serve(DOCUMENT, 401).worker == "p/0x2"
    assert where(scene.scan()) == [(None, 0, 2)]


# -- what does not stand still -------------------------------------------------------------------


def test_a_copy_that_never_ends_is_given_up() -> None:
    scene = inter(timeout_s=10.0, retry_s=100.0)
    scene.serve(DOCUMENT, 1000, times=50)
    (copy,) = scene.scan()
    scene.wait(9.0)
    scene.tick()
    assert [one.transfer for one in scene.prefixes().transfers] == [copy.transfer]
    scene.wait(1.0)
    scene.tick()
    assert scene.prefixes().transfers == ()
    assert where([copy]) == [(2, 0, 4)]
    assert where(scene.scan()) == [(2, 1, 4)]  # not between the same ranks again


def test_a_copy_that_failed_is_not_tried_again_between_the_same_ranks_at_once() -> None:
    scene = inter(retry_s=50.0)
    scene.serve(DOCUMENT, 1000, times=50)
    for expected in ([(2, 0, 4)], [(2, 1, 4)], [], [(2, 0, 4)]):
        copies = scene.scan()
        assert where(copies) == expected
        for copy in copies:
            scene.end(copy.transfer, TransferOutcome.FAILED)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("how", ["death", "silence", "restart", "pool"])
def test_a_copy_is_forgotten_with_the_life_of_either_end(rank: int, how: str) -> None:
    scene = inter()
    scene.serve(DOCUMENT, 1000, times=10)
    (copy,) = scene.scan()
    at = Rank(PoolId("p"), rank)
    if how == "restart":
        block = Block(0, 2) if rank == 0 else Block(2, 1)
        scene.feed(reported(rank, block, life="life-2"))
    elif how == "pool":
        scene.feed(PoolLost(PoolId("p"), "gone"))
    else:
        scene.feed(RankLost(at, "gone", "life-1" if how == "death" else None))
    assert scene.prefixes().transfers == ()
    before = scene.prefixes().local
    scene.end(copy.transfer, size=400, seconds=100.0)
    assert scene.prefixes().local == before  # too late to be news
    assert scene.control.violations() == []


def test_a_copy_outlives_a_reset_of_the_index_and_a_regroup() -> None:
    scene = inter()
    scene.serve(DOCUMENT, 1000, times=10)
    (copy,) = scene.scan()
    scene.feed(IndexReset(Rank(PoolId("p"), 2), "a gap"))
    for rank, block in ((0, Block(0, 1)), (1, Block(1, 1))):
        scene.feed(reported(rank, block, epoch=2))
    assert [one.transfer for one in scene.prefixes().transfers] == [copy.transfer]
    assert scene.control.violations() == []


def test_a_prefix_that_goes_in_the_middle_of_a_scan_is_let_be() -> None:
    scene = inter(slice_blocks=1)
    scene.serve(DOCUMENT, 1000, times=10)
    scene.wait(SCAN_S)
    scene.tick()
    assert scene.control.scanning
    scene.feed(BlocksRemoved(Rank(PoolId("p"), 2), DOCUMENT[::-1]))
    scene.feed(BlocksStored(Rank(PoolId("p"), 3), None, chain(9, 5)))
    ticks = 0
    while scene.control.scanning:
        assert scene.tick() == []
        ticks += 1
    assert ticks > 2


def test_pools_whose_kv_differs_never_copy_from_each_other() -> None:
    scene = PrefixScene("1x1", theta_inter_s=0.1, theta_intra=1)
    for number, other in enumerate(({"kv_token_bytes": 2}, {"kv_token_bytes": 0})):
        scene.launch("1x2", pool=f"q{number}", **other)
    scene.store(0, DOCUMENT)
    scene.serve(DOCUMENT, 1000, times=10)
    assert scene.scan() == []
    scene.launch("1x2", pool="like", kv_token_bytes=1)
    (copy,) = scene.scan()
    assert isinstance(copy, Copy)
    assert (copy.source.rank.pool, copy.destination.rank.pool) == ("p", "like")


def test_observing_decides_the_same_and_orders_nothing() -> None:
    scene = inter(mode="observe")
    scene.serve(DOCUMENT, 1000, times=10)
    assert scene.scan() == []
    (decision,) = scene.decisions()
    assert (decision.cause, decision.reason, decision.transfer) == (
        Cause.INTER_DEGREE,
        None,
        None,
    )
    assert decision.source == Rank(PoolId("p"), 2)
    assert scene.prefixes().transfers == ()


def test_off_neither_counts_nor_scans() -> None:
    scene = inter(mode="off")
    scene.serve(DOCUMENT, 1000, times=10)
    scene.wait(SCAN_S)
    scene.tick()
    assert (scene.prefixes().scans, scene.control.scanning) == (0, False)
    assert scene.prefixes().hot == ()


def test_a_retried_request_counts_once() -> None:
    scene = PrefixScene("4x1")
    for rank in (0, 1):
        scene.store(rank, DOCUMENT)
    first = scene.dispatched("a", 401, blocks=DOCUMENT)
    assert first.worker != only(Dispatch, scene.fail("a")).worker
    scene.finish("a")
    scene.scan()
    (hot,) = scene.prefixes().hot
    assert hot.accesses == {1: 1.0}


def test_operators_see_the_hot_prefixes_as_whole_paths() -> None:
    scene = PrefixScene("1x2,2x1")
    scene.store(2, DOCUMENT)
    scene.store(2, chain(5, 3))  # nobody asks for it
    scene.serve(DOCUMENT, 1000, times=3)
    scene.scan()
    (hot,) = scene.prefixes().hot
    assert (hot.tip, hot.tokens, hot.workers) == (DOCUMENT[-1], 400, ("p/2x1",))
    assert hot.ranks == (Rank(PoolId("p"), 2),)
    assert (hot.accesses, hot.missed_s) == ({}, {2: pytest.approx(0.6)})
    assert scene.prefixes().scans == 1
