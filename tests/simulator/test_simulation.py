"""Whole runs: the same arguments give the same run, the router is the live one, and queues are as
long as theory has them."""

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import msgspec
import pytest
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.events import Tick
from vertumnus_router.core.profile import Coefficients
from vertumnus_router.lattice import Block
from vertumnus_sim.metrics import Row
from vertumnus_sim.policies import make_router, policy_config
from vertumnus_sim.run import Run, simulate
from vertumnus_sim.scenario import Cluster, Death, Delays
from vertumnus_sim.simulation import Simulation
from vertumnus_sim.workloads.arrivals import poisson
from vertumnus_sim.workloads.traces import TraceRequest

from tests.simulator.scene import (
    HARDWARE,
    PROFILE,
    Ask,
    Played,
    cluster,
    conversations,
    faults,
    play,
    strangers,
)

SETTINGS = {
    "prefix.pull": "true",
    "prefix.mode": "on",
    "prefix.scan_s": "1",
    "prefix.theta_inter_s": "0.01",
    "prefix.theta_intra": "1",
}
ASKS = (Ask(2.0, 0, "1x4"), Ask(3.0, 1, "4x1"), Ask(4.0, 0, "2x2"))


def eventful(seed: int, policy: str = "late") -> Played:
    """Moves, copies and a death, all in one."""
    where = cluster("4x1,2x2", gpus=8, deaths=[Death(4.5, 1, 2)])
    requests = conversations(200, 50, 7)
    return play(requests, where, policy=policy, settings=SETTINGS, seed=seed, asks=ASKS)


def digest(played: Played) -> str:
    return hashlib.sha256(repr(played.log).encode()).hexdigest()


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_the_seed_decides_everything(policy: str) -> None:
    one, again, other = (eventful(seed, policy) for seed in (1, 1, 2))
    assert faults(one, 200) == []
    assert one.outcome.moves > 1 and one.outcome.pulls and one.outcome.copies
    assert one.log == again.log and one.outcome == again.outcome
    assert one.log != other.log and one.outcome.ttft_s != other.outcome.ttft_s


def test_another_process_with_other_hashes_does_the_same() -> None:
    program = (
        "from tests.simulator.test_simulation import digest, eventful; print(digest(eventful(1)))"
    )
    found = set()
    for hash_seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in ["", *sys.path]),
            "PYTHONHASHSEED": hash_seed,
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not done.returncode, done.stderr
        found.add(done.stdout.strip())
    assert found == {digest(eventful(1))}


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_a_log_replayed_through_a_fresh_router_gives_the_same_effects(policy: str) -> None:
    played = eventful(1, policy)
    fresh = ControlPlane(policy_config(policy, SETTINGS, HARDWARE, 1), PROFILE)
    for event, now, effects in played.log:
        assert fresh.on_event(event, now) == effects
    assert fresh.violations() == [] and fresh.pending_count == 0


def run_of(policy: str, seed: int) -> Run:
    return Run(
        workload="conversations",
        rate=40.0,
        policy=policy,
        composition="2x1,1x2",
        cluster=cluster("2x1,1x2"),
        profile="by hand",
        seed=seed,
        settings={"prefix.pull": "true"},
    )


def test_rows_are_equal_but_for_the_speed() -> None:
    requests = conversations(200, 10)

    def row(seed: int) -> Row:
        found = simulate(run_of("late", seed), requests, PROFILE)
        return msgspec.structs.replace(found, sim_requests_per_s=0.0)

    assert row(1) == row(1)
    assert row(1).mean_ms != row(2).mean_ms
    assert row(1).requests == 180 and row(1).rate == 40.0  # a tenth is for warming up


def test_what_warms_up_is_served_and_not_counted() -> None:
    requests = conversations(100, 30)
    where = cluster(hardware=replace(HARDWARE, noise=0.0))
    whole, part = play(requests, where), play(requests, where, warm_up=40)
    assert part.log == whole.log
    assert len(part.outcome.ttft_s) == 60 == sum(part.outcome.requests_by_degree.values())
    late = {number for number, request in enumerate(requests) if number >= 40}
    assert sorted(part.outcome.input_tokens) == sorted(requests[n].input_tokens for n in late)


def test_the_timer_runs_faster_during_a_scan() -> None:
    for settings, least_s in (({}, 0.1), ({**SETTINGS, "prefix.slice_blocks": "1"}, 0.01)):
        played = play(conversations(100, 30), settings=settings)
        ticks_s = [now for event, now, _ in played.log if isinstance(event, Tick)]
        gaps_s = [after_s - at_s for at_s, after_s in itertools.pairwise(ticks_s)]
        assert (min(gaps_s), max(gaps_s)) == (pytest.approx(least_s), pytest.approx(0.1))


def test_what_cannot_be_simulated_is_refused() -> None:
    router = ControlPlane(policy_config("late", {}, HARDWARE, 0), PROFILE)
    with pytest.raises(ValueError, match="no requests to simulate"):
        Simulation(cluster(), PROFILE, router, [], 0)
    mixed = [*strangers([0.0], 500), TraceRequest(1.0, 32, 1, (1, 2), 16)]
    with pytest.raises(ValueError, match=r"blocks of \[16, 100\] tokens cannot be mixed"):
        Simulation(cluster(), PROFILE, router, mixed, 0)


class _Deaf:
    """A router that never answers."""

    scanning = False

    def on_event(self, event: object, now: float) -> list[object]:
        return []


def test_a_router_that_forgets_a_request_is_found_out() -> None:
    simulation = Simulation(cluster(), PROFILE, _Deaf(), strangers([0.0], 500), 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="1 requests were never answered: 0"):
        simulation.run()


@pytest.mark.parametrize("policy", ["least_loaded", "late", "fluid"])
def test_when_all_ranks_are_dead_requests_end(policy: str) -> None:
    deaths = [Death(2.0, node, rank) for node in range(2) for rank in range(4)]
    where = cluster("8x1", gpus=8, deaths=deaths)
    router = make_router(policy, {}, PROFILE, where.hardware, 0)
    asked = strangers([0.5 * n for n in range(20)], 500)
    outcome = Simulation(where, PROFILE, router, asked, 0).run()
    assert outcome.refused
    assert len(outcome.ttft_s) + sum(outcome.refused.values()) == 20


# -- one rank as a queue -------------------------------------------------------------------------

TOKENS = 100
SERVICE_S = 0.1
#: Every prompt takes 0.1 s and fills a step; nothing else takes time.
ONE_SERVER = msgspec.structs.replace(
    PROFILE,
    degrees={1: Coefficients(d_s=0.0, a_s_per_token=0.0)},
    b_s_per_token=0.0,
    c_s_per_token=SERVICE_S / TOKENS,
    alpha_s_per_pair=0.0,
)
ONE_RANK = Cluster(
    node_gpus=1,
    degrees=(1,),
    compositions=((Block(0, 1),),),
    hardware=replace(HARDWARE, noise=0.0, chunk_tokens=TOKENS, remote_bytes_per_s=1e18),
    delays=Delays(dispatch_s=0.0, report_s=0.0, tick_s=10.0),
)


@pytest.mark.parametrize(("policy", "load"), [("paper", 0.5), ("late", 0.7)])
def test_one_rank_is_an_m_d_1_queue(policy: str, load: float) -> None:
    times_s = poisson(6_000, load / SERVICE_S, Random(f"queue {load}"))
    requests = strangers(times_s, TOKENS)
    played = play(requests, ONE_RANK, policy=policy, profile=ONE_SERVER, logged=False)
    waits_s = [ttft_s - SERVICE_S for ttft_s in played.outcome.ttft_s]

    # Lindley: each waits for what the one before it has left.
    expected_s, wait_s, before_s = [], 0.0, times_s[0]
    for at_s in times_s:
        wait_s = max(0.0, wait_s + (SERVICE_S if expected_s else 0.0) - (at_s - before_s))
        before_s = at_s
        expected_s.append(wait_s)
    assert waits_s == pytest.approx(expected_s, abs=1e-6)

    mean_s = load * SERVICE_S / (2 * (1 - load))
    assert sum(waits_s) / len(waits_s) == pytest.approx(mean_s, rel=0.05)
