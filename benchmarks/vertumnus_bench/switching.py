"""How long a switch takes, and a whole move: idle, and under load."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from sgl_vertumnus.demo.servers import Server
from vertumnus_bench.client import closed_loop, conversations, flat, running
from vertumnus_bench.figures import percentile, say, spread
from vertumnus_bench.moves import Move, reconfigure, walk
from vertumnus_bench.pool_state import drain
from vertumnus_bench.stream import causes, tally
from vertumnus_bench.workload import Mix, random_tokens

SIZE = 4
DEGREES = (1, 2, 4)
FEW_CLIENTS = Mix(clients=16)
_LEADERS = {"4x1": (0, 1, 2, 3), "2x2": (0, 2), "1x4": (0,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlan:
    moves: int = 120
    pause_s: float = 0.15
    mix: Mix = FEW_CLIENTS
    chunk_tokens: int = 1024
    chunk_rounds: int = 5
    seed: int = 1


def measure(server: Server, plan: SwitchPlan) -> dict[str, Any]:
    """``plan.moves`` idle and as many under load, and the chunk that they are held against."""
    router = router_of(server)
    start = "4x1"
    reconfigure(router, start)
    steps = walk(start, SIZE, DEGREES, plan.seed)
    reconfigure(router, next(steps))  # the first one is not like the others
    idle = take(router, steps, plan.moves, 0.0)
    say(f"switch: {len(idle)} moves idle, {spread([m.switch_ms for m in idle])} ms")
    clients = conversations(plan.mix, plan.seed)

    with running(lambda stop: closed_loop(router, clients, lambda *_: not stop.is_set())) as load:
        loaded = take(router, steps, plan.moves, plan.pause_s)
    say(f"switch: {len(loaded)} moves under load, {spread([m.switch_ms for m in loaded])} ms")
    drain(server)
    streams = flat(load.result)
    chunks_ms = {name: _chunk_ms(server, name, plan) for name in _LEADERS}
    both = [move.switch_ms for move in idle + loaded]
    return {
        "switch_ms": spread(both),
        "switch_ms_idle": spread([move.switch_ms for move in idle]),
        "switch_ms_load": spread([move.switch_ms for move in loaded]),
        "move_ms": spread([move.total_ms for move in loaded]),
        "move_ms_idle": spread([move.total_ms for move in idle]),
        "asked_ms_load": spread([move.asked_ms for move in loaded]),
        "stages_ms_load": {
            stage: spread([move.stages_ms[stage] for move in loaded])
            for stage in loaded[0].stages_ms
        },
        "chunk_ms": chunks_ms,
        "drain_max_over_chunk": round(
            max(move.stages_ms["drain"] for move in loaded) / max(chunks_ms.values()), 3
        ),
        "load": {"requests": len(streams), **tally(streams)},
        "load_causes": causes(streams),
    }


def take(router: str, steps: Iterator[str], count: int, pause_s: float) -> list[Move]:
    """``count`` moves; ``RuntimeError`` at the first that is not committed."""
    moves: list[Move] = []
    for composition in islice(steps, count):
        taken = reconfigure(router, composition)
        for move in taken:
            if not move.committed:
                raise RuntimeError(f"{move.before} to {move.after}: {move.outcome}, {move.reason}")
        moves += taken
        time.sleep(pause_s)
    return moves


def _chunk_ms(server: Server, composition: str, plan: SwitchPlan) -> float:
    """The median time of one full prefill chunk while every worker computes one."""
    reconfigure(router_of(server), composition)
    source = Random(composition)
    took_ms: list[float] = []

    def chunk(leader: int) -> float:
        body = {
            "input_ids": list(random_tokens(source, plan.chunk_tokens)),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "routed_dp_rank": leader,
        }
        began = time.perf_counter()
        server.post("/generate", body)
        return (time.perf_counter() - began) * 1e3

    with ThreadPoolExecutor(SIZE) as clients:
        for _ in range(plan.chunk_rounds):
            took_ms += clients.map(chunk, _LEADERS[composition])
    return round(percentile(took_ms, 50), 1)


def router_of(server: Server) -> str:
    if server.router_url is None:
        raise ValueError("moves go through a router: start the pool with one")
    return server.router_url
