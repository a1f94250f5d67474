"""One trace on a real pool of two ranks and in the simulator, with the pool's own profile."""

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

from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.profile import Profile
from vertumnus_router.profiles import load_profile
from vertumnus_sim.metrics import percentile
from vertumnus_sim.run import Run, simulate
from vertumnus_sim.scenario import Cluster, Delays, Hardware, lay_out
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


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """``utilisation``: of both ranks, by the profile at degree 1, that the rate is chosen for."""

    requests: int = 240
    utilisation: float = 0.5
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Beside:
    """What an idle pool shows beside its profile: seconds of a request outside of its prefill, how
    much longer prefills take when all ranks compute, and the profile's own mean error."""

    overhead_s: float
    contention: float
    noise: float


def compare(model: Path, folder: Path, plan: TrialPlan) -> dict[str, Any]:
    """Every policy on both; see the keys of the last line of ``benchmarks/validity.py``."""
    path = folder / "profile.json"
    with pool(
        model, size=SIZE, degrees=DEGREES, composition="2x1", router=False, flags=FLAGS
    ) as server:
        _profile(server, path)
        profile = load_profile(str(path))
        requests = small_trace(profile, plan)
        overhead_s = _overhead_s(server, profile)
        say(f"outside of the prefill a request takes {overhead_s * 1000:.1f} ms")
        contention = _contention(server)
        say(f"two ranks at once take {contention:.1%} longer than one")
        noise = statistics.fmean(one.error.mean for one in profile.measurements.values())
        beside = Beside(overhead_s, contention, noise)
        rows = []
        for policy, composition in POLICIES:
            measured = _measured(server, str(path), policy, composition, requests, plan)
            simulated = _simulated(profile, policy, composition, requests, plan, beside)
            rows.append(row(policy, composition, measured, simulated))
            say(str(rows[-1]))
    return summary(rows) | {
        "requests": plan.requests,
        "utilisation": plan.utilisation,
        "overhead_ms": round(overhead_s * 1000, 2),
        "contention": round(contention, 4),
        "noise": round(noise, 4),
        "profile_error": {
            str(degree): round(one.error.mean, 4) for degree, one in profile.measurements.items()
        },
    }


def row(
    policy: str, composition: str, measured_s: Sequence[float], simulated_s: dict[str, float]
) -> dict[str, Any]:
    """TTFT in ms of both, and how far the simulated one is off, of the measured."""
    ordered = sorted(measured_s)
    mean_ms = 1000 * statistics.fmean(ordered)
    p90_ms = 1000 * percentile(ordered, 90)
    return {
        "policy": policy,
        "composition": composition,
        "measured_ms": {"mean": round(mean_ms, 1), "p90": round(p90_ms, 1)},
        "simulated_ms": {name: round(value, 1) for name, value in simulated_s.items()},
        "mean_err_pct": round(100 * (simulated_s["mean"] / mean_ms - 1), 1),
        "p90_err_pct": round(100 * (simulated_s["p90"] / p90_ms - 1), 1),
    }


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


def _overhead_s(server: Server, profile: Profile) -> float:
    """What an idle pool's client waits beyond the prefill: HTTP, tokens, the router's share."""
    prompts, found = Prompts(seed=7), []
    model = PrefillModel(profile)
    with router(server.url, ("--controller", "off")) as before:
        for number in range(15):
            request = TraceRequest(0.0, 256, 1, (), BLOCK_TOKENS)
            body = {
                "input_ids": prompts.tokens(number, request),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            }
            began = time.perf_counter()
            before.post("/generate", body, router=True)
            found.append(time.perf_counter() - began - model.service_s(1, 256, 0))
    flush(server)
    return max(0.0, statistics.median(found))


def _contention(server: Server) -> float:
    """Of prefills of the same length, on one rank and on all at once."""
    prompts = Prompts(seed=8)
    numbers = count()

    def prefill_s(rank: int) -> float:
        request = TraceRequest(0.0, 768, 1, (), BLOCK_TOKENS)
        body = {
            "input_ids": prompts.tokens(next(numbers), request),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "routed_dp_rank": rank,
        }
        began = time.perf_counter()
        server.post("/generate", body)
        return time.perf_counter() - began

    alone: list[float] = []
    together: list[float] = []
    with ThreadPoolExecutor(SIZE) as clients:
        for _ in range(10):
            alone.append(prefill_s(0))
            together += clients.map(prefill_s, range(SIZE))
    flush(server)
    return max(0.0, statistics.median(together) / statistics.median(alone) - 1)


def _measured(
    server: Server,
    profile: str,
    policy: str,
    composition: str,
    requests: Sequence[TraceRequest],
    plan: TrialPlan,
) -> list[float]:
    """TTFT of every request that counts, seconds."""
    flags = ("--policy", policy, "--profile", profile, "--controller", "off")
    with router(server.url, flags) as before:
        url = before.router_url or ""
        reconfigure(url, composition)
        drain(server)
        flush(server)
        endpoint = SglangGenerate(ignore_eos=True)
        replayed = asyncio.run(replay(requests, ReplayPlan(url=url, endpoint=endpoint)))
    drain(server)
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
) -> dict[str, float]:
    """Mean and P90 of TTFT in ms."""
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
    run = Run(
        workload="conversation, small",
        rate=None,
        policy=policy,
        composition=composition,
        cluster=cluster,
        profile="measured",
        seed=plan.seed,
        warm_up=WARM_UP,
    )
    found = simulate(run, requests, profile)
    return {"mean": found.mean_ms, "p90": found.p90_ms}
