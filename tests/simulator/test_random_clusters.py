"""Clusters, delays, deaths, moves and policies at random: nothing is lost or left behind, and a
fresh router agrees with all that was decided."""

from dataclasses import replace
from random import Random

import pytest
from vertumnus_router.core.control import ControlPlane
from vertumnus_sim.policies import policy_config
from vertumnus_sim.scenario import Cluster, Death, Delays

from tests.simulator.scene import HARDWARE, PROFILE, Ask, cluster, conversations, faults, play

MANAGED = {
    "prefix.mode": "on",
    "prefix.scan_s": "0.5",
    "prefix.theta_inter_s": "0.001",
    "prefix.theta_intra": "0.5",
    "prefix.theta_reclaim": "0.4",
}
CONTROLLED = {
    "controller.mode": "on",
    "controller.window_s": "1",
    "controller.persistence": "1",
    "controller.sigmas": "0",
}


def some_cluster(source: Random) -> Cluster:
    deaths = source.choice([0, 0, 1, 2, 4])
    return cluster(
        source.choice(["8x1", "2x4", "4x2", "4x1,2x2"]),
        gpus=8,
        hardware=replace(
            HARDWARE,
            kv_blocks=source.choice([26, 40, 100]),
            remote_bytes_per_s=source.choice([1e6, 1e7, 1e9]),
            local_bytes_per_s=source.choice([3e6, 1e8]),
            chunk_tokens=source.choice([250, 1_000, 4_000]),
            noise=source.choice([0.0, 0.1, 1.0]),
        ),
        delays=Delays(
            dispatch_s=source.choice([0.0, 0.001, 0.1]),
            report_s=source.choice([0.0, 0.001, 0.1]),
            vote_s=source.choice([0.0, 0.2]),
            switch_s=source.choice([0.0, 0.3]),
        ),
        deaths=[
            Death(source.uniform(0.5, 6), source.randrange(2), source.randrange(4))
            for _ in range(deaths)
        ],
    )


def some_settings(source: Random) -> dict[str, str]:
    found: dict[str, str] = {}
    for share, part in (
        (0.7, {"prefix.pull": "true"}),
        (0.5, MANAGED),
        (0.3, {"prefix.timeout_s": "0.3"}),
        (0.4, CONTROLLED),
    ):
        if source.random() < share:
            found |= part
    return found


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_left_behind(seed: int) -> None:
    source = Random(f"cluster {seed}")
    where, settings = some_cluster(source), some_settings(source)
    policy = source.choice(["paper", "late", "fluid"])
    if policy == "fluid":  # moves by itself, and knows no degrees that last
        settings = {name: v for name, v in settings.items() if name not in CONTROLLED | MANAGED}
    asks = [
        Ask(source.uniform(1, 6), source.randrange(2), source.choice(["1x4", "4x1", "2x2"]))
        for _ in range(source.choice([0, 5, 25]))
    ]
    rate_per_s, turns = source.choice([10, 30, 100]), source.choice([3, 10])
    requests = conversations(120, rate_per_s, seed, turns=turns, first_blocks=6, turn_blocks=3)
    played = play(requests, where, policy=policy, settings=settings, seed=seed, asks=asks)
    assert faults(played, len(requests)) == []
    fresh = ControlPlane(policy_config(policy, settings, where.hardware, seed), PROFILE)
    assert all(fresh.on_event(event, now) == effects for event, now, effects in played.log)
