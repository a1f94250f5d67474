"""A prefill-time profile of the pool at hand, good enough for a router to price with."""

import datetime
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from sgl_vertumnus.demo.servers import Server
from vertumnus_bench.moves import reconfigure
from vertumnus_bench.workload import random_tokens

_UNIFORM = {1: "4x1", 2: "2x2", 4: "1x4"}
_PROFILED_TOKENS = (64, 2048)


def profile(server: Server, degrees: Sequence[int] = tuple(_UNIFORM)) -> dict[str, Any]:
    """A profile of this pool of four ranks: ``d_C + (a_C + c/C)·R`` through two lengths at every
    degree. Leaves it in the composition of the last one."""
    short, long = _PROFILED_TOKENS
    source = Random(0)
    starts: dict[int, float] = {}
    slopes: dict[int, float] = {}
    for degree in degrees:
        reconfigure(server.router_url or "", _UNIFORM[degree])
        _prefill_s(server, source, short)
        short_s, long_s = (
            statistics.median(_prefill_s(server, source, tokens) for _ in range(3))
            for tokens in _PROFILED_TOKENS
        )
        slopes[degree] = (long_s - short_s) / (long - short)
        starts[degree] = max(0.0, short_s - slopes[degree] * short)
    # The largest share that no degree contradicts is what the degree divides.
    shared = min(slope * degree for degree, slope in slopes.items())
    return {
        "version": 1,
        "device": "CPU, one thread per rank",
        "model": "random llama, float32",
        "sglang_version": server.get("/vertumnus/pool")["sglang_version"],
        "date": datetime.date.today().isoformat(),
        "measured": True,
        "note": f"A line through {short} and {long} cold tokens, idle.",
        "degrees": {
            str(degree): {
                "d_s": starts[degree],
                "a_s_per_token": slopes[degree] - shared / degree,
            }
            for degree in degrees
        },
        "b_s_per_token": 0.0,
        "c_s_per_token": shared,
        "alpha_s_per_pair": 0.0,
    }


def _prefill_s(server: Server, source: Random, tokens: int) -> float:
    """Of one cold prompt on the first worker, otherwise idle."""
    body = {
        "input_ids": list(random_tokens(source, tokens)),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "routed_dp_rank": 0,
    }
    began = time.perf_counter()
    server.post("/generate", body)
    return time.perf_counter() - began
