"""Small traces on a real pool of two ranks and in the simulator, with the pool's own profile.

A machine that others share changes its pace by a fifth within minutes, and what waits in queues
multiplies that. So prefills of known lengths before and after every replay tell how its pace was
to that of the profile, and the simulator is given the profile at that pace. The policies take
turns, a new trace every round.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.profile import Coefficients, Profile
from vertumnus_router.profiles import load_profile
from vertumnus_sim.metrics import percentile
from vertumnus_sim.policies import make_router
from vertumnus_sim.scenario import Cluster, Delays, Hardware, lay_out
from vertumnus_sim.simulation import Simulation
from vertumnus_sim.workloads.arrivals import at_rate
from vertumnus_sim.workloads.conversation import conversation_like
from vertumnus_sim.workloads.statistics import reused_tokens
from vertumnus_sim.workloads.traces import TraceRequest

from sgl_vertumnus.demo.servers import Server, pool, router
from vertumnus_bench.endpoint import SglangGenerate
from vertumnus_bench.figures import say
from vertumnus_bench.moves import reconfigure
from vertumnus_bench.pool_state import drain, flush
from vertumnus_bench.replaying import ReplayPlan, replay
from vertumnus_bench.trace_prompts import Prompts, scaled

SIZE = 2
DEGREES = (1, 2)
#: A block of the scaled trace, and a page of the pool.
BLOCK_TOKENS = 32
CHUNK_TOKENS = 1024
MOST_TOKENS = 4096
CAPACITY_TOKENS = 32_768
#: A router's policy and the composition that it is tried on.
POLICIES = (("paper", "2x1"), ("paper", "1x2"), ("late", "2x1"))
FLAGS = (
    *("--dtype", "float32", "--page-size", str(BLOCK_TOKENS)),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", str(CAPACITY_TOKENS)),
)
#: Of the requests, those that come first and do not count.
WARM_UP = 0.1
#: What tells the pace: short and long prompts, for some seconds.
PACE_TOKENS = (256, 1024)
PACE_PREFILLS = 12


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """``rounds`` of ``requests`` for each policy. ``utilisation``: of both ranks, by the profile at
    degree 1, that the rate is chosen for."""

    rounds: int = 3
    requests: int = 100
    utilisation: float = 0.5
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Beside:
    """What an idle pool shows beside its profile: seconds of a request outside of its prefill,
    behind a router and (``direct_s``) without one, how much longer prefills take when all ranks
    compute, and the profile's own mean error."""

    overhead_s: float
    direct_s: float
    contention: float
    noise: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One policy under one trace: TTFT in seconds of what counts, measured and simulated, and the
    ``pace``, how long prefills took meanwhile, of what the profile says."""

    measured_s: Sequence[float]
    simulated_s: Sequence[float]
    pace: float


def compare(model: Path, folder: Path, plan: TrialPlan) -> dict[str, Any]:
    """Every policy on both; see the keys of the last line of ``benchmarks/validity.py``."""
    path = folder / "profile.json"
    with pool(
        model, size=SIZE, degrees=DEGREES, composition="2x1", router=False, flags=FLAGS
    ) as server:
        _profile(server, path)
        profile = load_profile(str(path))
        with router(server.url, ("--controller", "off")) as before:
            overhead_s = _overhead_s(before, profile, router=True)
        flush(server)
        direct_s = _overhead_s(server, profile, router=False)
        flush(server)
        say(f"outside of the prefill a request takes {overhead_s * 1000:.1f} ms")
        contention = _contention(server)
        say(f"two ranks at once take {contention:.1%} longer than one")
        noise = statistics.fmean(one.error.mean for one in profile.measurements.values())
        beside = Beside(overhead_s, direct_s, contention, noise)
        trials: dict[tuple[str, str], list[Trial]] = {one: [] for one in POLICIES}
        for number in range(plan.rounds):
            requests = small_trace(profile, replace(plan, seed=plan.seed + number))
            for policy, composition in POLICIES:
                trial = _trial(server, path, policy, composition, requests, plan, beside)
                trials[policy, composition].append(trial)
                say(f"round {number + 1}: {row(policy, composition, [trial])}")
        rows = [row(*names, of) for names, of in trials.items()]
    return summary(rows) | {
        "rounds": plan.rounds,
        "requests": plan.requests,
        "utilisation": plan.utilisation,
        "overhead_ms": round(overhead_s * 1000, 2),
        "direct_ms": round(direct_s * 1000, 2),
        "contention": round(contention, 4),
        "noise": round(noise, 4),
        "profile_error": {
            str(degree): round(one.error.mean, 4) for degree, one in profile.measurements.items()
        },
    }


def row(policy: str, composition: str, trials: Sequence[Trial]) -> dict[str, Any]:
    """TTFT in ms of both, over all rounds, and how far the simulated is off, of the measured."""
    measured = _mean_and_p90_ms([s for trial in trials for s in trial.measured_s])
    simulated = _mean_and_p90_ms([s for trial in trials for s in trial.simulated_s])
    return {
        "policy": policy,
        "composition": composition,
        "measured_ms": {name: round(value, 1) for name, value in measured.items()},
        "simulated_ms": {name: round(value, 1) for name, value in simulated.items()},
        "mean_err_pct": round(100 * (simulated["mean"] / measured["mean"] - 1), 1),
        "p90_err_pct": round(100 * (simulated["p90"] / measured["p90"] - 1), 1),
        "pace": [round(trial.pace, 3) for trial in trials],
    }


def _mean_and_p90_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"mean": 1000 * statistics.fmean(ordered), "p90": 1000 * percentile(ordered, 90)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest errors of any policy, and whether both sides rank the policies alike."""

    def ranked(side: str) -> list[str]:
        ordered = sorted(rows, key=lambda one: float(one[side]["mean"]))
        return [f"{one['policy']} {one['composition']}" for one in ordered]

    return {
        "mean_err_pct": max(abs(one["mean_err_pct"]) for one in rows),
        "p90_err_pct": max(abs(one["p90_err_pct"]) for one in rows),
        "same_ranking": ranked("measured_ms") == ranked("simulated_ms"),
        "ranking": ranked("measured_ms"),
        "policies": list(rows),
    }


def at_pace(profile: Profile, pace: float) -> Profile:
    """The profile of a machine on which every prefill takes ``pace`` times as long."""
    return msgspec.structs.replace(
        profile,
        degrees={
            degree: Coefficients(d_s=of.d_s * pace, a_s_per_token=of.a_s_per_token * pace)
            for degree, of in profile.degrees.items()
        },
        fit=None,
        b_s_per_token=profile.b_s_per_token * pace,
        c_s_per_token=profile.c_s_per_token * pace,
        alpha_s_per_pair=profile.alpha_s_per_pair * pace,
    )


def small_trace(profile: Profile, plan: TrialPlan) -> list[TraceRequest]:
    """Conversations with prompts of a sixteenth of their length and one token to answer, at the
    rate that keeps the ranks as busy as planned, once each prefix is cached."""
    found: list[TraceRequest] = []
    for request in conversation_like(plan.seed, 4 * plan.requests):
        small = replace(scaled(request, BLOCK_TOKENS), output_tokens=1)
        if small.input_tokens <= MOST_TOKENS and len(found) < plan.requests:
            found.append(small)
    model = PrefillModel(profile)
    busy_s = sum(
        model.service_s(1, max(1, request.input_tokens - cached), cached)
        for request, cached in zip(found, reused_tokens(found), strict=True)
    )
    return at_rate(found, plan.utilisation * SIZE * len(found) / busy_s)


def _profile(server: Server, path: Path) -> None:
    command = [sys.executable, "-m", "sgl_vertumnus.profile", "--url", server.url]
    command += ["--out", str(path), "--no-kappa", "--lengths", "32,64,128,256,512,1024,2048"]
    subprocess.run([*command, "--cached-tokens", "0,512,1536"], check=True, stdout=sys.stderr)


def _overhead_s(server: Server, profile: Profile, *, router: bool) -> float:
    """What an idle pool's client waits beyond the prefill: HTTP, tokens, the router's share if it
    asks one. Of prompts so short that the pace of the machine matters little."""
    prompts, found = Prompts(seed=7), []
    model = PrefillModel(profile)
    for number in range(30):
        request = TraceRequest(0.0, BLOCK_TOKENS, 1, (), BLOCK_TOKENS)
        body = {
            "input_ids": prompts.tokens(number, request),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        began = time.perf_counter()
        server.post("/generate", body, router=router)
        found.append(time.perf_counter() - began - model.service_s(1, BLOCK_TOKENS, 0))
    return max(0.0, statistics.median(found))


def _prefill_s(server: Server, rank: int, tokens: int, prompts: Prompts, number: int) -> float:
    """Until the one token that is asked for, behind a prompt that nobody has seen."""
    body = {
        "input_ids": prompts.tokens(number, TraceRequest(0.0, tokens, 1, (), BLOCK_TOKENS)),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "routed_dp_rank": rank,
    }
    began = time.perf_counter()
    server.post("/generate", body)
    return time.perf_counter() - began


def _contention(server: Server) -> float:
    """Of prefills of the same length, on one rank and on all at once."""
    prompts, numbers = Prompts(seed=8), count()

    def prefill_s(rank: int) -> float:
        return _prefill_s(server, rank, 768, prompts, next(numbers))

    alone: list[float] = []
    together: list[float] = []
    with ThreadPoolExecutor(SIZE) as clients:
        for _ in range(15):
            alone.append(prefill_s(0))
            together += clients.map(prefill_s, range(SIZE))
    flush(server)
    return max(0.0, statistics.median(together) / statistics.median(alone) - 1)


def _pace(server: Server, profile: Profile, degree: int, direct_s: float) -> float:
    """How long prefills at the first worker take now, of what the profile says."""
    prompts, model = Prompts(seed=9), PrefillModel(profile)
    spent_s = expected_s = 0.0
    for number in range(PACE_PREFILLS):
        tokens = PACE_TOKENS[number % len(PACE_TOKENS)]
        spent_s += _prefill_s(server, 0, tokens, prompts, number) - direct_s
        expected_s += model.service_s(degree, tokens, 0)
    flush(server)
    return spent_s / expected_s


def _trial(
    server: Server,
    path: Path,
    policy: str,
    composition: str,
    requests: Sequence[TraceRequest],
    plan: TrialPlan,
    beside: Beside,
) -> Trial:
    profile = load_profile(str(path))
    (degree,) = {int(term.partition("x")[2]) for term in composition.split(",")}
    flags = ("--policy", policy, "--profile", str(path), "--controller", "off")
    with router(server.url, flags) as before:
        url = before.router_url or ""
        reconfigure(url, composition)
        drain(server)
        pace = _pace(server, profile, degree, beside.direct_s)
        measured_s = _measured(url, requests, plan)
        drain(server)
        flush(server)
        pace = (pace + _pace(server, profile, degree, beside.direct_s)) / 2
    simulated_s = _simulated(at_pace(profile, pace), policy, composition, requests, plan, beside)
    return Trial(measured_s, simulated_s, pace)


def _measured(url: str, requests: Sequence[TraceRequest], plan: TrialPlan) -> list[float]:
    """TTFT of every request that counts, seconds."""
    endpoint = SglangGenerate(ignore_eos=True)
    replayed = asyncio.run(replay(requests, ReplayPlan(url=url, endpoint=endpoint)))
    failed = [answer for answer in replayed.answers if answer.failure is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0].failure}")
    counted = replayed.answers[int(WARM_UP * plan.requests) :]
    return [answer.first_s for answer in counted if answer.first_s is not None]


def _simulated(
    profile: Profile,
    policy: str,
    composition: str,
    requests: Sequence[TraceRequest],
    plan: TrialPlan,
    beside: Beside,
) -> list[float]:
    """The same in the simulator, with the profile as the time of its steps and the router's."""
    hardware = Hardware(
        kv_blocks=CAPACITY_TOKENS // BLOCK_TOKENS,
        kv_token_bytes=6144,
        chunk_tokens=CHUNK_TOKENS,
        noise=beside.noise,
        contention=beside.contention,
        local_bytes_per_s=2e9,
        # Nothing is handed over: the pool answers for itself.
        remote_bytes_per_s=1e15,
    )
    cluster = Cluster(
        node_gpus=SIZE,
        degrees=DEGREES,
        compositions=lay_out(composition, SIZE, SIZE, DEGREES),
        hardware=hardware,
        delays=Delays(dispatch_s=beside.overhead_s),
    )
    simulation = Simulation(
        cluster,
        profile,
        make_router(policy, {}, profile, hardware, plan.seed),
        requests,
        plan.seed,
        warm_up=int(WARM_UP * len(requests)),
    )
    return list(simulation.run().ttft_s)
