"""Moves of a pool under load, and what they wait for."""

from dataclasses import dataclass, replace
from typing import Any

from sgl_vertumnus.demo.random_model import RandomModelSpec
from sgl_vertumnus.demo.servers import Server
from vertumnus_bench import soak, varying
from vertumnus_bench.client import closed_loop, conversations, flat, running
from vertumnus_bench.figures import say, spread
from vertumnus_bench.moves import Move, reach, walk
from vertumnus_bench.pool_state import drain
from vertumnus_bench.steps import watching
from vertumnus_bench.stream import causes, tally
from vertumnus_bench.switching import DEGREES, FEW_CLIENTS, SIZE, router_of, take
from vertumnus_bench.workload import Mix

CHUNK_TOKENS = 1024
#: The model and the flags of the other benchmarks' mixed loads; a decode server needs to be
#: told the page size.
MIXED_MODEL = soak.MODEL
MIXED_FLAGS = (*soak.FLAGS, "--page-size", "16")
#: Heavy enough for a chunk to be longer than everything else in a move.
HEAVY_MODEL: RandomModelSpec = varying.MODEL
HEAVY_FLAGS = (*varying.FLAGS, "--page-size", "16")
#: Nothing but whole chunks, none of them cached: more than the ranks can compute.
ONLY_PREFILLS = Mix(
    clients=8,
    question_tokens=(CHUNK_TOKENS, CHUNK_TOKENS),
    new_tokens=(2, 2),
    follow_ups=0.0,
    shared=0.0,
    disconnects=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    moves: int = 120
    pause_s: float = 0.15
    mix: Mix = FEW_CLIENTS
    seed: int = 1


PREFILL_PLAN = MovePlan(moves=60, pause_s=0.3, mix=ONLY_PREFILLS)
QUICK_MOVES = MovePlan(moves=6, pause_s=0.1, mix=replace(FEW_CLIENTS, clients=4))


def under_load(server: Server, plan: MovePlan, what: str) -> dict[str, Any]:
    """``plan.moves`` at random adjacent compositions under the load of ``plan.mix``.

    The drains against the longest prefill step that was timed under this load, by the ranks'
    own reports.
    """
    router = router_of(server)
    start = f"{SIZE}x1"
    reach(router, start)
    steps = walk(start, SIZE, DEGREES, plan.seed)
    reach(router, next(steps))  # the first one is not like the others
    clients = conversations(plan.mix, plan.seed)
    with (
        watching(server, CHUNK_TOKENS) as times,
        running(lambda stop: closed_loop(router, clients, lambda *_: not stop.is_set())) as load,
    ):
        moves = take(router, steps, plan.moves, plan.pause_s)
    drain(server)
    streams = flat(load.result)
    found = {
        **figures(moves, [seconds * 1e3 for seconds in times.steps_s]),
        "load": {"requests": len(streams), **tally(streams)},
        "causes": causes(streams),
        "ttft_s": spread([s.first_s for s in streams if s.first_s is not None]),
    }
    say(f"{what}: {found}")
    return found


def figures(moves: list[Move], steps_ms: list[float]) -> dict[str, Any]:
    """Committed moves against the prefill steps of the same load."""
    drains_ms = [move.stages_ms["drain"] for move in moves]
    return {
        "move_ms": spread([move.total_ms for move in moves]),
        "switch_ms": spread([move.switch_ms for move in moves]),
        "stages_ms": {
            stage: spread([move.stages_ms[stage] for move in moves]) for stage in moves[0].stages_ms
        },
        "prefill_step_ms": spread(steps_ms),
        "drain_max_over_step_max": (round(max(drains_ms) / max(steps_ms), 3) if steps_ms else None),
    }
