"""Load that changes its nature, under the controller and under each fixed composition.

A burst of short prompts, which wants many workers, then few long prompts, which want large
ones; only the first token counts, as in a pool that does nothing but prefill. The same
arrivals are replayed against one pool, its caches emptied and a new router before it each
time.
"""

import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sgl_vertumnus.demo.random_model import RandomModelSpec
from sgl_vertumnus.demo.servers import Server, fetch, router
from vertumnus_bench.client import Streams, open_loop, running
from vertumnus_bench.figures import percentile, say
from vertumnus_bench.moves import reconfigure
from vertumnus_bench.pool_state import drain, flush
from vertumnus_bench.profiling import profile
from vertumnus_bench.stream import causes, tally
from vertumnus_bench.workload import Phase, arrivals

#: Heavy enough for a larger degree to pay off: about 2000 tokens a second on one thread.
MODEL = RandomModelSpec(hidden=512, layers=6)
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "1024", "--max-total-tokens", "65536")
BURST = Phase(seconds=40.0, rate_per_s=16.0, tokens=(32, 128))
LONG = Phase(seconds=40.0, rate_per_s=0.5, tokens=(1500, 3500))
START = "4x1"
CONTROLLED = "controller"
FIXED = ("4x1", "2x1,1x2", "2x2", "1x4")
_SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class VaryingPlan:
    #: Long enough for a few long prompts: shorter ones tell the controller little.
    window_s: float = 4.0
    burst: Phase = BURST
    long: Phase = LONG
    rounds: int = 2
    seed: int = 11

    @property
    def phases(self) -> list[Phase]:
        return [self.burst, self.long] * self.rounds

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    composition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of the arrivals under one regime; ``composition`` over time, and the
    controller's verdict on every window that was seen (none when it was off)."""

    name: str
    streams: Streams
    composition: list[Sample]
    verdicts: list[dict[str, Any]]

    @property
    def ttft_s(self) -> list[float]:
        return [stream.first_s for stream in self.streams if stream.first_s is not None]

    def mean_ttft_s(self) -> float:
        return statistics.fmean(self.ttft_s)


def compare(server: Server, folder: Path, plan: VaryingPlan) -> list[Replay]:
    """Every fixed composition, then the controller. ``server`` is a pool of four ranks of
    ``MODEL`` without a router; its profile is written into ``folder``."""
    path = folder / "profile.json"
    with router(server.url) as before:
        path.write_text(json.dumps(profile(before)))
    flags = (
        *("--profile", str(path), "--controller-window-s", str(plan.window_s)),
        *("--long-tokens", str(plan.long.tokens[0] - 1)),
    )
    replays = [_replay(server, name, name, (*flags, "--controller", "off"), plan) for name in FIXED]
    controlled = (*flags, "--controller", "on")
    return [*replays, _replay(server, CONTROLLED, START, controlled, plan)]


def figures(replays: list[Replay]) -> dict[str, Any]:
    by_name = {replay.name: replay for replay in replays}
    controlled = by_name.pop(CONTROLLED)
    changes = [
        after.composition
        for before, after in pairwise(controlled.composition)
        if before.composition != after.composition
    ]
    return {
        "controller_mean_ttft_s": round(controlled.mean_ttft_s(), 4),
        "fixed": {name: round(replay.mean_ttft_s(), 4) for name, replay in by_name.items()},
        "p90_ttft_s": {r.name: round(percentile(r.ttft_s, 90), 4) for r in replays},
        "requests": {r.name: len(r.streams) for r in replays},
        "lost": {r.name: tally(r.streams)["lost"] for r in replays},
        "causes": causes(stream for r in replays for stream in r.streams),
        "compositions": [controlled.composition[0].composition, *changes],
        "verdicts": Counter(
            f"{verdict['action']}: {verdict['reason']}" for verdict in controlled.verdicts
        ),
        "utilisation": [verdict["utilisation"] for verdict in controlled.verdicts],
    }


def _replay(
    server: Server, name: str, composition: str, flags: tuple[str, ...], plan: VaryingPlan
) -> Replay:
    drain(server)
    flush(server)
    schedule = arrivals(plan.phases, plan.seed)
    with router(server.url, flags) as before:
        url = before.router_url or ""
        reconfigure(url, composition)
        samples: list[Sample] = []
        verdicts: dict[int, dict[str, Any]] = {}
        with running(lambda stop: open_loop(lambda: url, schedule, stop)) as load:
            began = time.perf_counter()
            while (at_s := time.perf_counter() - began) < plan.seconds:
                state = fetch(f"{url}/vertumnus/composition")
                samples.append(Sample(at_s, state["pools"][0]["composition"]))
                seen = state["controller"]["last_decisions"]
                verdicts |= {verdict["window"]: verdict for verdict in seen}
                time.sleep(_SAMPLE_S)
        replay = Replay(
            name=name,
            streams=load.result,
            composition=samples,
            verdicts=list(verdicts.values()),
        )
    say(f"varying: {name} mean TTFT {replay.mean_ttft_s():.3f} s of {len(replay.streams)}")
    return replay
