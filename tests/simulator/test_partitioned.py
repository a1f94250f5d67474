"""Workers whose ranks share their KV out: one cache of C times as many blocks, and C links."""

from dataclasses import replace

import pytest
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    CopyEnded,
    MoveOutcome,
    PrefillFinished,
    RegroupEnded,
    RequestFailed,
    TransferOutcome,
)
from vertumnus_router.core.types import BlockHash, PoolId, Rank
from vertumnus_sim.policies import make_router, policy_config
from vertumnus_sim.scenario import Death, ScenarioError

from tests.simulator.scene import HARDWARE, PROFILE, Ask, cluster, conversations, faults, play
from tests.simulator.test_pool import Stand, blocks_of, step_s

PARTITIONED = replace(HARDWARE, noise=0.0, kv_partitioned=True)
PULL = {"prefix.pull": "true"}
MANAGED = {
    "prefix.mode": "on",
    "prefix.scan_s": "1",
    "prefix.theta_inter_s": "0.01",
    "prefix.theta_intra": "1",
    "prefix.theta_reclaim": "0.9",
}


def rank(number: int) -> Rank:
    return Rank(PoolId("node-0"), number)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_worker_has_room_for_as_much_as_all_its_ranks(degree: int) -> None:
    stand = Stand(f"{4 // degree}x{degree}", replace(PARTITIONED, kv_blocks=10))
    described = stand.pool.describe()
    assert described.kv_capacity_tokens == described.context_tokens == degree * 1_000
    for number in range(degree):
        stand.timeline.at(float(number), stand.submit, str(number), 0, 1_000, 20 * number)
    stand.timeline.at(10.0, stand.submit, "last", degree - 1, 100, 500)
    stand.timeline.run()
    assert len(stand.first_tokens) == degree + 1
    # All of it is full, and the last one takes the place of what was used least recently.
    at_s, gone = stand.only(BlocksRemoved)
    assert (at_s, gone) == (10.0, BlocksRemoved(rank(0), (BlockHash(9),)))
    assert len(stand.pool.caches[0]) == 10 * degree and not stand.pinned()


def test_a_prompt_may_be_longer_than_one_rank_has_room_for() -> None:
    stand = Stand("1x4", replace(PARTITIONED, kv_blocks=10))
    stand.submit("a", 2, 3_500)
    stand.timeline.run()
    assert list(stand.first_tokens) == ["a"] and len(stand.pool.caches[0]) == 35


def test_a_pool_promises_what_its_smallest_worker_has_room_for() -> None:
    stand = Stand("1x2,2x1", replace(PARTITIONED, kv_blocks=10))
    assert stand.pool.describe().kv_capacity_tokens == 1_000


def test_a_prefix_is_found_at_its_worker_by_whichever_home_and_nowhere_else() -> None:
    stand = Stand("2x2", PARTITIONED)
    for at_s, (name, home) in enumerate((("first", 1), ("same", 0), ("other", 2))):
        stand.timeline.at(float(at_s), stand.submit, name, home, 850)
    stand.timeline.run()
    found = {e.request_id: e for _, e in stand.events(PrefillFinished)}
    cached = {name: event.cached_tokens for name, event in found.items()}
    assert cached == {"first": 0, "same": 800, "other": 0}
    # No rank has to copy anything from another one first.
    assert found["same"].compute_s == pytest.approx(step_s(2, (50, 800)))
    assert [event for _, event in stand.events(BlocksStored)] == [
        BlocksStored(rank(leader), None, blocks_of(0, 8)) for leader in (0, 2)
    ]
    assert not stand.pinned()


@pytest.mark.parametrize(
    ("composition", "source", "destination", "links"),
    [("2x2", 0, 2, 2), ("2x2", 0, 3, 2), ("1x2,2x1", 0, 2, 1), ("1x2,2x1", 3, 1, 1)],
)
def test_a_copy_has_as_many_bytes_as_ever_over_the_links_of_the_smaller_worker(
    composition: str, source: int, destination: int, links: int
) -> None:
    """The blocks are the leader's to the router, whichever rank of a worker it names."""
    stand = Stand(composition, PARTITIONED)
    stand.submit("a", source, 800)
    stand.submit("b", destination, 350)
    stand.timeline.at(5.0, stand.copy, rank(source), rank(destination), blocks_of(0, 8))
    stand.timeline.run()
    at_s, ended = stand.only(CopyEnded)
    transfer_s = 500_000 / (links * PARTITIONED.local_bytes_per_s)
    assert (ended.outcome, ended.blocks, ended.bytes) == (TransferOutcome.DONE, 5, 500_000)
    assert at_s == pytest.approx(5.0 + 0.002 + transfer_s)
    _, stored = stand.events(BlocksStored)[-1]
    leader = stand.pool._workers[destination].block.leader
    assert stored == BlocksStored(rank(leader), BlockHash(2), blocks_of(3, 5))
    assert not stand.pinned()


def test_what_goes_for_a_copy_is_the_leaders_to_the_router() -> None:
    stand = Stand("2x2", replace(PARTITIONED, kv_blocks=8))
    stand.submit("a", 0, 800)
    stand.submit("b", 2, 1_000, first=50)
    stand.timeline.at(5.0, stand.copy, rank(0), rank(3), blocks_of(0, 8))
    stand.timeline.run()
    assert stand.only(BlocksRemoved)[1] == BlocksRemoved(rank(2), blocks_of(58, 2)[::-1])


def test_a_copy_between_nodes_goes_over_all_links_of_both() -> None:
    stand = Stand("2x4", PARTITIONED, pools=2)
    stand.submit("a", 0, 800)
    other = Rank(PoolId("node-1"), 0)
    stand.timeline.at(5.0, stand.copy, rank(0), other, blocks_of(0, 8))
    stand.timeline.run()
    at_s, ended = stand.only(CopyEnded)
    assert ended.bytes == 800_000
    assert at_s == pytest.approx(5.002 + 800_000 / (4 * PARTITIONED.remote_bytes_per_s))


def test_every_rank_hands_its_part_over() -> None:
    """What was computed before the last step has been on its way meanwhile, over all links."""
    computed_s = sum(step_s(4, shape) for shape in ((1_000, 0), (1_000, 1_000), (500, 2_000)))
    for remote_bytes_per_s, left_bytes in (
        (1e7, 500_000.0),
        (2e6, 2_500_000 - 4 * 2e6 * computed_s),
    ):
        hardware = replace(PARTITIONED, remote_bytes_per_s=remote_bytes_per_s)
        stand = Stand("1x4", hardware)
        stand.submit("a", 3, 2_500)
        stand.timeline.run()
        expected_s = computed_s + left_bytes / (4 * remote_bytes_per_s)
        assert stand.first_tokens["a"] == (pytest.approx(expected_s, rel=1e-12), 4)


def test_a_worker_dies_with_all_it_holds() -> None:
    stand = Stand("2x2", PARTITIONED)
    stand.submit("a", 1, 2_000)
    stand.timeline.at(0.01, stand.pool.kill, 1)
    stand.timeline.at(1.0, stand.submit, "b", 0, 500)
    stand.timeline.at(1.0, stand.submit, "c", 3, 500)
    stand.timeline.run()
    assert [event.request_id for _, event in stand.events(RequestFailed)] == ["a", "b"]
    assert list(stand.first_tokens) == ["c"]


# -- whole runs ----------------------------------------------------------------------------------


def test_of_one_rank_there_is_nothing_to_share_out() -> None:
    requests = conversations(200, 50)
    plain, shared = (
        play(
            requests,
            cluster("8x1", gpus=8, hardware=replace(HARDWARE, kv_partitioned=partitioned)),
            settings=PULL,
        )
        for partitioned in (False, True)
    )
    assert plain.outcome.pulls > 5
    assert plain.log == shared.log and plain.outcome == shared.outcome


@pytest.mark.parametrize("policy", ["paper", "late"])
@pytest.mark.parametrize("composition", ["4x1,2x2", "4x2", "2x4"])
def test_nothing_is_lost_or_left_behind(policy: str, composition: str) -> None:
    hardware = replace(HARDWARE, kv_blocks=30, kv_partitioned=True)
    deaths = [Death(5.0, 1, 1)]
    where = cluster(composition, gpus=8, hardware=hardware, deaths=deaths)
    requests = conversations(150, 25, turns=10)
    played = play(requests, where, policy=policy, settings={**PULL, **MANAGED})
    assert faults(played, 150) == []
    assert played.outcome.copied_blocks and played.events(RequestFailed)
    leaders = {block.leader for blocks in where.compositions for block in blocks}
    assert {event.rank.index for event in played.events(BlocksStored)} == leaders


def test_more_is_found_where_the_same_memory_holds_more() -> None:
    hits = []
    for partitioned in (False, True):
        hardware = replace(HARDWARE, kv_blocks=40, kv_partitioned=partitioned)
        played = play(
            conversations(300, 15), cluster("1x4", hardware=hardware), settings={}, warm_up=30
        )
        assert faults(played, 270) == []
        hits.append(sum(played.outcome.cached_tokens))
    assert hits[1] > 1.1 * hits[0]


# -- what would have to move KV ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "settings", "mover"),
    [
        ("fluid", {}, "policy fluid"),
        ("late", {"controller.mode": "on"}, "controller.mode=on"),
        ("paper", {"controller.mode": "on"}, "controller.mode=on"),
    ],
)
def test_what_regroups_ranks_is_refused(policy: str, settings: dict[str, str], mover: str) -> None:
    message = f"^{mover} regroups ranks.*Leave hardware.kv_partitioned out"
    with pytest.raises(ScenarioError, match=message):
        make_router(policy, settings, PROFILE, PARTITIONED, 0)
    policy_config(policy, settings, HARDWARE, 0)
    policy_config("late", {"controller.mode": "observe"}, PARTITIONED, 0)


def test_an_operator_cannot_move_them_either() -> None:
    where = cluster("2x2", hardware=PARTITIONED)
    played = play(conversations(50, 20), where, asks=[Ask(1.5, 0, "1x4")])
    (ended,) = played.events(RegroupEnded)
    assert (ended.outcome, played.outcome.moves) == (MoveOutcome.REFUSED, 0)
    assert ended.reason == "workers that partition their KV are not regrouped in simulations"
