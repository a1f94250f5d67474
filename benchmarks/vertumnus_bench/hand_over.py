"""Where the time to the first token goes in a prefill pool, and how fast its KV travels."""

import asyncio
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_vertumnus.demo.random_model import RandomModelSpec
from sgl_vertumnus.demo.servers import Server
from vertumnus_bench import router_metrics
from vertumnus_bench.client import Streams, closed_loop
from vertumnus_bench.figures import say
from vertumnus_bench.moves import reach
from vertumnus_bench.router_metrics import Counted
from vertumnus_bench.stream import causes
from vertumnus_bench.switching import router_of
from vertumnus_bench.workload import Conversation, Mix

#: 24 KiB of KV a token: enough to time.
MODEL = RandomModelSpec(hidden=512, layers=6, kv_heads=8)
LENGTHS = (1024, 4096)
#: No prompt is computed in two chunks: all its KV is sent after its prefill, and what is timed
#: is the whole transfer.
CHUNK_TOKENS = 8192
LOG_FLAGS = ("--enable-request-time-stats-logging",)
FLAGS = (
    *("--dtype", "float32", "--chunked-prefill-size", str(CHUNK_TOKENS), "--page-size", "16"),
    *("--max-total-tokens", "16384", *LOG_FLAGS),
)
_BYTES = 4  # of a float32
_RATE = re.compile(r"transfer_speed=([\d.]+) GB/s, transfer_total=([\d.]+) MB")
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverPlan:
    rounds: int = 8
    warm: int = 2
    lengths: tuple[int, ...] = LENGTHS
    #: The first is the one whose figures stand for all.
    compositions: tuple[str, ...] = ("4x1", "2x2")
    new_tokens: int = 4
    seed: int = 7


def kv_bytes(spec: RandomModelSpec, tokens: int) -> int:
    """K and V of ``tokens`` in all layers, in float32."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * _BYTES * tokens


def logged_rates(log: str) -> list[tuple[float, float]]:
    """(GB/s, MB) of each transfer that SGLang has logged, in bytes of 1000: it writes GB and
    MB and counts in 1024."""
    return [
        (float(speed) * _GIB / 1e9, float(total) * 2**20 / 1e6)
        for speed, total in _RATE.findall(log)
    ]


def measure(server: Server, spec: RandomModelSpec, plan: HandOverPlan) -> dict[str, Any]:
    """Cold prompts, one at a time, on a pool of ``spec`` with ``FLAGS``."""
    router = router_of(server)
    counted: dict[tuple[str, int], Counted] = {}
    rates: dict[int, list[float]] = {length: [] for length in plan.lengths}
    for composition in plan.compositions:
        reach(router, composition)
        for length in plan.lengths:
            _ask(router, plan, f"warm {composition}", length, plan.warm)
            before, logged = router_metrics.read(router), server.log.stat().st_size
            _ask(router, plan, composition, length, plan.rounds)
            counted[composition, length] = router_metrics.read(router).since(before)
            rates[length] += [speed for speed, _ in logged_rates(_tail(server.log, logged))]
            say(
                f"ttft at {composition}, {length} tokens: "
                f"{router_metrics.ttft_ms(counted[composition, length])} ms"
            )
    first, longest = plan.compositions[0], max(plan.lengths)
    split = {at: router_metrics.ttft_ms(each) for at, each in counted.items()}
    both = [split[first, length] for length in plan.lengths]
    return {
        "ttft_ms": {part: round(statistics.fmean(s[part] for s in both), 2) for part in both[0]},
        "ttft_of": f"the mean over {plan.rounds} cold prompts of each of {list(plan.lengths)} "
        f"tokens, one at a time at {first}",
        "ttft_ms_by_tokens": {
            composition: {str(length): split[composition, length] for length in plan.lengths}
            for composition in plan.compositions
        },
        "transfer_gbps": _median(rates[longest]),
        "transfer_of": f"GB/s, the median over prompts of {longest} tokens by SGLang's own clock: "
        "all bytes of KV over the time from the end of the prefill to the end of the transfer",
        "transfer": {
            str(length): {
                "mb": round(kv_bytes(spec, length) / 1e6, 1),
                "gbps": _median(rates[length]),
                "gbps_by_router": round(
                    kv_bytes(spec, length) / 1e6 / split[first, length]["transfer"], 3
                ),
                "n": len(rates[length]),
            }
            for length in plan.lengths
        },
    }


def _ask(router: str, plan: HandOverPlan, words: str, length: int, count: int) -> Streams:
    mix = Mix(
        clients=1,
        question_tokens=(length, length),
        new_tokens=(plan.new_tokens, plan.new_tokens),
        follow_ups=0.0,
        shared=0.0,
        disconnects=0.0,
    )
    # Other words for other prompts: nothing is cached.
    one = Conversation(mix, [()], f"{words}, {length} tokens, {plan.seed}", client=0)
    (streams,) = asyncio.run(closed_loop(router, [one], lambda _, answered: answered < count))
    if found := causes(streams):
        raise RuntimeError(f"{length} tokens: {found}")
    return streams


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
