"""Whatever happens in a simulated cluster, every request ends once and leaves nothing behind."""

from collections import Counter
from dataclasses import replace

import pytest
from vertumnus_router.core.effects import Copy, Dispatch, PlanEnded, Reclaim, Regroup
from vertumnus_router.core.events import (
    BlocksRemoved,
    CopyEnded,
    MoveOutcome,
    ReclaimEnded,
    RegroupEnded,
    RequestFailed,
    RequestFinished,
    TransferOutcome,
)
from vertumnus_sim.scenario import Death, Delays

from tests.simulator.scene import (
    HARDWARE,
    Ask,
    Played,
    cluster,
    conversations,
    faults,
    play,
    strangers,
)

COUNT = 300
PULL = {"prefix.pull": "true"}
MANAGED = {
    "prefix.mode": "on",
    "prefix.scan_s": "1",
    "prefix.theta_inter_s": "0.01",
    "prefix.theta_intra": "1",
    "prefix.theta_reclaim": "0.9",
}
CONTROLLED = {
    "controller.mode": "on",
    "controller.window_s": "2",
    "controller.persistence": "1",
    "controller.cooldown": "1",
    "controller.sigmas": "0",
}
SLOW_SWITCH = Delays(vote_s=0.2, switch_s=0.3)


def outcomes(played: Played) -> Counter[MoveOutcome]:
    return Counter(event.outcome for event in played.events(RegroupEnded))


@pytest.mark.parametrize("policy", ["paper", "late"])
@pytest.mark.parametrize("composition", ["8x1", "4x1,2x2", "2x4"])
def test_every_request_is_served_once(policy: str, composition: str) -> None:
    where = cluster(composition, gpus=8)
    played = play(conversations(COUNT, 30), where, policy=policy)
    assert faults(played, COUNT) == []
    assert not played.outcome.refused
    ended = Counter(event.request_id for event in played.events(RequestFinished))
    assert ended == Counter(map(str, range(COUNT)))
    assert set(played.outcome.requests_by_degree) <= {
        block.degree for blocks in where.compositions for block in blocks
    }


def test_pulls_leave_nothing_behind() -> None:
    played = play(conversations(COUNT, 50), cluster("8x1", gpus=8), settings=PULL)
    assert faults(played, COUNT) == []
    assert played.outcome.pulls > 20 and played.outcome.copied_blocks > 20
    pulled = {order.pull.transfer for order in played.effects(Dispatch) if order.pull}
    assert pulled == {event.transfer for event in played.events(CopyEnded)}
    assert len(pulled) == played.outcome.pulls


def test_the_prefix_manager_copies_and_deletes() -> None:
    where = cluster("4x1,2x2", gpus=8)
    requests = conversations(150, 20, turns=30, systems=1)
    played = play(requests, where, settings={**PULL, **MANAGED})
    assert faults(played, 150) == []
    done = [e for e in played.events(ReclaimEnded) if e.outcome is TransferOutcome.DONE]
    assert played.outcome.copies == len(played.effects(Copy)) > 5
    assert played.outcome.reclaims == len(played.effects(Reclaim)) > 5 and len(done) > 5
    moved = sum(event.blocks for event in played.events(CopyEnded))
    assert moved == played.outcome.copied_blocks > 10


def test_little_memory_is_used_over_and_over() -> None:
    hardware = replace(HARDWARE, kv_blocks=30)
    requests = conversations(COUNT, 15, turns=3)
    assert max(r.input_tokens for r in requests) > 15 * 100  # half of the memory and more
    for composition in ("4x1", "2x2", "1x4"):
        played = play(requests, cluster(composition, hardware=hardware), settings=PULL)
        assert faults(played, COUNT) == []
        gone = sum(len(event.blocks) for event in played.events(BlocksRemoved))
        assert gone > 10 * 30


def test_prompts_beyond_the_memory_are_refused_and_the_others_served() -> None:
    hardware = replace(HARDWARE, kv_blocks=10)
    requests = strangers([0.1 * n for n in range(20)], 900) + strangers([2.0], 1_100)
    played = play(requests, cluster("2x2", hardware=hardware))
    assert faults(played, 21) == []
    assert played.refused == 1


def test_the_controller_moves_under_a_load_that_varies() -> None:
    requests = conversations(60, 3, 1)
    requests = conversations(400, 30, 2, after=requests)
    requests = conversations(60, 3, 3, after=requests)
    for policy in ("paper", "late"):
        where = cluster("1x4", gpus=4)
        played = play(requests, where, policy=policy, settings={**CONTROLLED, **PULL})
        assert faults(played, len(requests)) == []
        sizes = [len(order.after) - len(order.before) for order in played.effects(Regroup)]
        assert min(sizes) < 0 < max(sizes)  # merges, and splits
        assert outcomes(played) == {MoveOutcome.COMMITTED: len(sizes)}
        assert played.outcome.moves == len(sizes)
        assert len(played.outcome.requests_by_degree) > 1


def test_moves_in_full_swing_lose_nothing() -> None:
    asks = [
        Ask(1.5 + n / 3, n % 2, ("1x4", "4x1", "2x2", "2x1,1x2")[n // 2 % 4]) for n in range(40)
    ]
    hardware = replace(HARDWARE, kv_blocks=40)
    for delays in (Delays(), SLOW_SWITCH):
        where = cluster("4x2", gpus=8, hardware=hardware, delays=delays)
        played = play(conversations(COUNT, 20), where, settings=PULL, asks=asks)
        assert faults(played, COUNT) == []
        assert not played.outcome.refused and not played.events(RequestFailed)
        assert outcomes(played)[MoveOutcome.COMMITTED] == played.outcome.moves > 20


@pytest.mark.parametrize("settings", [{}, PULL, {**PULL, **MANAGED}])
def test_the_dead_take_only_themselves_along(settings: dict[str, str]) -> None:
    deaths = [Death(2.0, 0, 0), Death(3.5, 1, 3), Death(4.0, 0, 0), Death(4.5, 0, 3)]
    where = cluster("4x1,2x2", gpus=8, deaths=deaths)
    for seed in range(3):
        requests = conversations(COUNT, 60, seed)
        played = play(requests, where, settings=settings, seed=seed)
        assert faults(played, COUNT) == []
        assert len(played.events(RequestFailed)) > 1
        assert not played.outcome.refused


@pytest.mark.parametrize(
    ("at_s", "rank", "expected"),
    [
        (3.002, 2, MoveOutcome.ABANDONED),  # its last step is under way
        (3.4, 3, MoveOutcome.ABANDONED),  # all stand
        (3.4, 1, MoveOutcome.COMMITTED),  # it has nothing to do with the move
        (4.5, 2, MoveOutcome.COMMITTED),  # the move is over
    ],
)
def test_a_death_ends_the_move_that_it_hits_and_no_other(
    at_s: float, rank: int, expected: MoveOutcome
) -> None:
    """From 1x2,2x1 to 2x2: ranks 2 and 3 move."""
    where = cluster("2x1,1x2", delays=SLOW_SWITCH, deaths=[Death(at_s, 0, rank)])
    requests = conversations(COUNT, 40)
    played = play(requests, where, settings=PULL, asks=[Ask(3.0, 0, "2x2")])
    assert faults(played, COUNT) == []
    assert not played.outcome.refused and played.events(RequestFailed)
    assert outcomes(played) == {expected: 1}
    assert played.outcome.moves == (expected is MoveOutcome.COMMITTED)


def test_a_death_during_the_hand_over_begins_all_anew() -> None:
    """The bytes that the dead rank was sending arrive nowhere."""
    hardware = replace(HARDWARE, noise=0.0, remote_bytes_per_s=1e6)
    requests = strangers([0.0], 1_000)  # a step of 0.1105 s, then a second of bytes
    undisturbed = play(requests, cluster(hardware=hardware))
    assert undisturbed.outcome.ttft_s[0] == pytest.approx(0.001 + 0.1105 + 1, abs=1e-5)
    (order,) = undisturbed.effects(Dispatch)
    where = cluster(hardware=hardware, deaths=[Death(1.5, 0, order.home.index)])
    played = play(requests, where)
    # Half a second after it came it dies; the router is told, and sends it elsewhere.
    assert played.outcome.ttft_s[0] == pytest.approx(0.5 + 0.002 + 0.1105 + 1, abs=1e-5)
    assert faults(played, 1) == []


def test_requests_outlive_their_cluster_by_as_long_as_they_may_wait() -> None:
    deaths = [Death(2.0, 0, rank) for rank in range(4)]
    played = play(
        conversations(COUNT, 50),
        cluster(deaths=deaths),
        settings={"queue_timeout_s": "5"},
    )
    assert faults(played, COUNT) == []
    assert 0 < len(played.outcome.ttft_s) < COUNT
    assert played.log[-1][1] < 2 + COUNT / 30 + 5 + 1


def test_what_was_asked_for_in_vain_ends_too() -> None:
    """The second comes while the first is on its way."""
    asks = [Ask(2.0, 0, "1x4"), Ask(2.01, 0, "2x2")]
    played = play(conversations(50, 20), cluster(delays=SLOW_SWITCH), asks=asks)
    assert faults(played, 50) == []
    reasons = {end.plan: end.reason for end in played.effects(PlanEnded)}
    assert reasons["ask-0"] is None and "is moving from" in str(reasons["ask-1"])
