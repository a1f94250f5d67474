"""Requests that share a few long prefixes, some much more often than others.

The same arrivals are replayed against one pool, its caches emptied and a new router before it
each time: without the prefix manager, with it, and with prefixes pulled at dispatch.
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from sgl_vertumnus.demo.servers import Server, router
from vertumnus_bench.client import Streams, open_loop, running
from vertumnus_bench.figures import percentile, say
from vertumnus_bench.pool_state import drain, flush, until
from vertumnus_bench.router_metrics import read
from vertumnus_bench.stream import causes, hit_rate, tally
from vertumnus_bench.workload import Arrival, Ask, random_tokens

MODES = {
    "off": ("--prefix-manager", "off", "--no-pull"),
    "on": ("--prefix-manager", "on", "--no-pull"),
    "pull": ("--prefix-manager", "on", "--pull"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPlan:
    """``prefixes`` of ``prefix_tokens``, the n-th asked for in proportion to n**-``skew``."""

    seconds: float = 60.0
    rate_per_s: float = 4.0
    prefixes: int = 8
    prefix_tokens: int = 1024
    question_tokens: tuple[int, int] = (32, 96)
    skew: float = 1.2
    #: Many scans in a short run.
    scan_s: float = 5.0
    seeds: tuple[int, ...] = (3, 4)


QUICK = HotPlan(seconds=6.0, prefixes=3, prefix_tokens=256, scan_s=1.0, seeds=(3,))


def arrivals(plan: HotPlan, seed: int) -> list[Arrival]:
    """Poisson, one new token each."""
    source = Random(f"hot prefixes {seed}")
    shared = [random_tokens(source, plan.prefix_tokens) for _ in range(plan.prefixes)]
    weights = list(accumulate((n + 1) ** -plan.skew for n in range(plan.prefixes)))
    found: list[Arrival] = []
    at_s = source.expovariate(plan.rate_per_s)
    while at_s < plan.seconds:
        prefix = source.choices(shared, cum_weights=weights)[0]
        question = random_tokens(source, source.randint(*plan.question_tokens))
        found.append(Arrival(at_s, Ask(prefix + question, 1)))
        at_s += source.expovariate(plan.rate_per_s)
    return found


def compare(server: Server, flags: Sequence[str], plan: HotPlan) -> dict[str, Any]:
    """``server`` is a pool without a router; ``flags`` go to each router."""
    streams: dict[str, Streams] = {mode: [] for mode in MODES}
    copied: dict[str, dict[str, int]] = {mode: {} for mode in MODES}
    for seed in plan.seeds:
        for mode, own in MODES.items():
            found, outcomes = _replay(server, (*flags, *own), arrivals(plan, seed), plan)
            streams[mode] += found
            for cause, count in outcomes.items():
                copied[mode][cause] = copied[mode].get(cause, 0) + count
            say(f"hot prefixes: {mode}, seed {seed}: {_ttft_ms(found)}, {outcomes}")
    return {
        "ttft_ms": {mode: _ttft_ms(found) for mode, found in streams.items()},
        "hit_pct": {mode: round(100 * hit_rate(found), 1) for mode, found in streams.items()},
        "copies": copied,
        "requests": {mode: len(found) for mode, found in streams.items()},
        "lost": {mode: tally(found)["lost"] for mode, found in streams.items()},
        "causes": causes(stream for found in streams.values() for stream in found),
    }


def _replay(
    server: Server, flags: Sequence[str], schedule: list[Arrival], plan: HotPlan
) -> tuple[Streams, dict[str, int]]:
    drain(server)
    flush(server)
    scan = ("--prefix-scan-s", str(plan.scan_s))
    with router(server.url, (*flags, *scan)) as before:
        url = before.router_url or ""
        with running(lambda stop: open_loop(lambda: url, schedule, stop)) as load:
            until(
                "all were sent and answered",
                lambda: read(url).total("vertumnus_requests_total") >= len(schedule),
                limit_s=plan.seconds + 120,
            )
        return load.result, read(url).by("vertumnus_copies_total", "cause")


def _ttft_ms(streams: Streams) -> dict[str, float]:
    times = [stream.first_s * 1e3 for stream in streams if stream.first_s is not None]
    return {"mean": round(statistics.fmean(times), 1), "p90": round(percentile(times, 90), 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """``requests`` at once on one document that nobody has seen."""

    requests: int = 20
    document_tokens: int = 1500
    question_tokens: int = 24
    rounds: int = 3


QUICK_BURST = BurstPlan(requests=6, document_tokens=300, rounds=1)


def bursts(server: Server, flags: Sequence[str], plan: BurstPlan) -> dict[str, Any]:
    """Prompt tokens that the ranks computed for a burst, with and without counting what is being
    computed as soon to be there; the mean over the rounds."""
    found = {}
    for name, own in {"with": "--in-flight", "without": "--no-in-flight"}.items():
        drain(server)
        flush(server)
        with router(server.url, (*flags, "--policy", "late", own)) as before:
            front = replace(server, router_url=before.router_url)
            tokens = [_burst(front, plan, seed) for seed in range(plan.rounds)]
        found[name] = round(statistics.fmean(tokens))
        say(f"burst {name} in-flight awareness: {tokens} tokens computed")
    return found


def _burst(server: Server, plan: BurstPlan, seed: int) -> int:
    source = Random(f"burst {seed}")
    document = random_tokens(source, plan.document_tokens)
    prompts = [document + random_tokens(source, plan.question_tokens) for _ in range(plan.requests)]

    def computed(prompt: Sequence[int]) -> int:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        meta = server.post("/generate", body, router=True)["meta_info"]
        return int(meta["prompt_tokens"]) - int(meta["cached_tokens"])

    with ThreadPoolExecutor(plan.requests) as clients:
        return sum(clients.map(computed, prompts))
