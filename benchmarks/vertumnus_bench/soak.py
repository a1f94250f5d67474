"""Random moves under mixed load for a long time, and the same load without moves."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sgl_vertumnus.demo.random_model import RandomModelSpec
from sgl_vertumnus.demo.servers import Server
from vertumnus_bench import reference
from vertumnus_bench.client import Streams, closed_loop, conversations, flat, running
from vertumnus_bench.figures import say, spread
from vertumnus_bench.moves import Move, reconfigure, walk
from vertumnus_bench.pool_state import drain, flush, rank_rss_bytes
from vertumnus_bench.stream import causes, hit_rate, tally
from vertumnus_bench.switching import DEGREES, SIZE
from vertumnus_bench.workload import Mix, random_tokens

#: Small enough for 64 streams on two cores; untied, so that wrong attention shows.
MODEL = RandomModelSpec(
    hidden=128, layers=2, query_heads=4, kv_heads=2, head_dim=32, intermediate=256
)
#: A rank holds a part of what the load would like cached: eviction takes part.
CAPACITY_TOKENS = 49152
FLAGS = (
    *("--dtype", "float32", "--chunked-prefill-size", "1024"),
    *("--max-total-tokens", str(CAPACITY_TOKENS)),
)
#: The middle of the lattice: the load without moves runs here.
STILL = "2x1,1x2"
CHATTING = Mix()
_FILL_TOKENS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    minutes: float = 20.0
    move_every_s: float = 6.0
    warm_s: float = 20.0
    #: The load without moves is cut after so long; None: it asks all that the other asked.
    still_minutes: float | None = None
    mix: Mix = CHATTING
    seed: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """``streams`` and ``moves`` of the load with moves, ``still`` of the one without, and
    ``same``, those of the first that the second asked again.

    ``rss_bytes`` of all ranks is taken at every move, under load. Growth is between two drains,
    before and after the moves; ``kv_held_tokens`` at the second.
    """

    moves: list[Move]
    streams: Streams
    still: Streams
    same: Streams
    compared_outputs: int
    rss_bytes: list[int]
    rss_growth_bytes: int
    kv_held_tokens: int

    def figures(self) -> dict[str, Any]:
        faults, still_faults = tally(self.streams), tally(self.still)
        begun_s = [s.first_s for s in self.streams if s.first_s is not None]
        still_begun_s = [s.first_s for s in self.still if s.first_s is not None]
        return {
            "moves": sum(move.committed for move in self.moves),
            "moves_refused": sum(not move.committed for move in self.moves),
            "requests": len(self.streams),
            **faults,
            "hit_rate": round(hit_rate(self.same), 4),
            "hit_rate_still": round(hit_rate(self.still), 4),
            "rss_growth_mib": round(self.rss_growth_bytes / 2**20, 1),
            "rss_mib": _thinned([round(size / 2**20, 1) for size in self.rss_bytes]),
            "kv_held_after": self.kv_held_tokens,
            "hit_rate_all": round(hit_rate(self.streams), 4),
            "clients_left": sum(stream.left for stream in self.streams),
            "outputs_compared": self.compared_outputs,
            "tokens_streamed": sum(len(stream.output) for stream in self.streams),
            "ttft_s": spread(begun_s),
            "ttft_s_still": spread(still_begun_s),
            "move_ms": spread([move.total_ms for move in self.moves if move.committed]),
            "still": {"requests": len(self.still), **still_faults},
            "causes": causes(self.streams),
            "refusals": sorted({move.reason or "" for move in self.moves if not move.committed}),
        }


def _thinned(values: list[float], keep: int = 20) -> list[float]:
    """Evenly spaced ones of them, the last included."""
    step = max(1, len(values) // keep)
    return values[::-step][::-1]


def soak(server: Server, model: Path, plan: SoakPlan) -> SoakResult:
    """Needs a pool of four ranks of ``MODEL`` with ``FLAGS``, behind a router."""
    router = server.router_url
    if router is None:
        raise ValueError("the soak needs a router")
    _touch_all_memory(server, router)
    _start_cold(server, router)
    _with_moves(router, plan, plan.warm_s, plan.seed + 1)
    drain(server)
    rss_before = rank_rss_bytes(server)
    _start_cold(server, router)
    rss_bytes: list[int] = []

    def watch_memory() -> None:
        rss_bytes.append(rank_rss_bytes(server))

    moves, by_client = _with_moves(router, plan, plan.minutes * 60, plan.seed, watch_memory)
    held_tokens = drain(server)
    rss_growth = rank_rss_bytes(server) - rss_before
    _start_cold(server, router)
    say(f"soak: {sum(map(len, by_client))} requests, {len(moves)} moves; again without moves")
    still = _without_moves(router, plan, [len(streams) for streams in by_client])
    drain(server)
    streams, still_streams = flat(by_client), flat(still)
    say("soak: comparing with the reference")
    return SoakResult(
        moves=moves,
        streams=streams,
        still=still_streams,
        same=flat(a[: len(b)] for a, b in zip(by_client, still, strict=True)),
        compared_outputs=reference.check(model, [*streams, *still_streams]),
        rss_bytes=rss_bytes,
        rss_growth_bytes=rss_growth,
        kv_held_tokens=held_tokens,
    )


def _with_moves(
    router: str,
    plan: SoakPlan,
    seconds: float,
    seed: int,
    after_move: Callable[[], None] = lambda: None,
) -> tuple[list[Move], list[Streams]]:
    """The load for ``seconds``, and a random move now and then. A move that is not committed
    is written down, and the walk goes on: the router plans the way back to it."""
    moves: list[Move] = []
    clients = conversations(plan.mix, seed)
    began = time.perf_counter()
    steps = walk(STILL, SIZE, DEGREES, seed)
    with running(lambda stop: closed_loop(router, clients, lambda *_: not stop.is_set())) as load:
        while (next_s := (len(moves) + 1) * plan.move_every_s) < seconds:
            time.sleep(max(0.0, began + next_s - time.perf_counter()))
            moves += reconfigure(router, next(steps), began)
            after_move()
            if len(moves) % 10 == 0:
                say(f"soak: {next_s:.0f} s of {seconds:.0f}, {len(moves)} moves")
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
    return moves, load.result


def _without_moves(router: str, plan: SoakPlan, asked: list[int]) -> list[Streams]:
    """The same conversations again, each client at most ``asked`` requests."""
    minutes = plan.still_minutes
    deadline = time.monotonic() + (60 * minutes if minutes is not None else float("inf"))
    clients = conversations(plan.mix, plan.seed)

    def goes_on(client: int, answered: int) -> bool:
        return answered < asked[client] and time.monotonic() < deadline

    with running(lambda _: closed_loop(router, clients, goes_on)) as load:
        pass
    return load.result


def _start_cold(server: Server, router: str) -> None:
    drain(server)
    flush(server)
    reconfigure(router, STILL)


def _touch_all_memory(server: Server, router: str) -> None:
    """Fill every rank's KV once: the system hands out its pages at the first touch, which
    would look like growth."""
    reconfigure(router, f"{SIZE}x1")

    def fill(rank: int) -> None:
        source = Random(rank)
        for _ in range(-(-CAPACITY_TOKENS // _FILL_TOKENS)):
            body = {
                "input_ids": list(random_tokens(source, _FILL_TOKENS)),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "routed_dp_rank": rank,
            }
            server.post("/generate", body)

    with ThreadPoolExecutor(SIZE) as clients:
        list(clients.map(fill, range(SIZE)))
