"""Requests through a prefill pool and its decode server while the pool regroups, clients leave
and the decode server dies: what becomes of each."""

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sgl_vertumnus.demo.servers import Server
from vertumnus_bench import reference, router_metrics
from vertumnus_bench.client import Streams, conversations, open_loop, running
from vertumnus_bench.decoding import DecodeServer
from vertumnus_bench.figures import say, spread
from vertumnus_bench.moves import Move, reach, reconfigure, walk
from vertumnus_bench.pool_state import drain
from vertumnus_bench.router_metrics import Counted
from vertumnus_bench.stream import Fault, Stream, causes, tally
from vertumnus_bench.switching import DEGREES, SIZE, router_of
from vertumnus_bench.workload import Arrival, Mix

CLIENTS = Mix(clients=20)
#: A stream hangs that is open when nothing has come on any for so long, all requests are sent,
#: and nothing is disturbed any more.
QUIET_S = 5.0
_MARGIN_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessPlan:
    """``kill_at_s``: when the decode server is killed, to be started again at once."""

    requests: int = 200
    rate_per_s: float = 5.0
    move_every_s: float = 2.0
    mix: Mix = CLIENTS
    kill_at_s: float | None = None
    seed: int = 13


#: The load goes on after the server is back.
KILLED = LosslessPlan(rate_per_s=3.5, kill_at_s=12.0, seed=17)
QUICK = LosslessPlan(requests=16, rate_per_s=4.0, move_every_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``down_s``: from the kill until the decode server was ready again."""

    streams: Streams
    moves: list[Move]
    counted: Counted
    compared_outputs: int
    kv_held_tokens: int
    down_s: float | None

    @property
    def excused(self) -> Streams:
        """Those that the killed decode server had begun to answer: nobody else could go on,
        and their clients were told."""
        if self.down_s is None:
            return []
        return [stream for stream in self.streams if told_after_beginning(stream)]

    def figures(self) -> dict[str, Any]:
        excused = self.excused
        faults = tally(self.streams)
        return {
            "requests": len(self.streams),
            **faults,
            "lost": faults["lost"] - len(excused),
            "served": sum(not s.faults and not s.left for s in self.streams),
            "left": sum(stream.left for stream in self.streams),
            "failed_with_cause": len(excused),
            "retried": router_metrics.retried(self.counted),
            "leg_failures": self.counted.by("vertumnus_pair_failures_total", "leg"),
            "moves": sum(move.committed for move in self.moves),
            "refusals": sorted({m.reason or "" for m in self.moves if not m.committed}),
            "down_s": self.down_s,
            "outputs_compared": self.compared_outputs,
            "kv_held_after": self.kv_held_tokens,
            "ttft_s": spread([s.first_s for s in self.streams if s.first_s is not None]),
            "causes": causes(self.streams),
        }


def told_after_beginning(stream: Stream) -> bool:
    """An error event is all that is wrong with it, and it came after tokens."""
    kinds = {fault for fault, _ in stream.faults}
    return stream.broke_off and bool(stream.output) and kinds == {Fault.LOST}


def arrivals(plan: LosslessPlan) -> list[Arrival]:
    """At random times, the clients of the mix in turn; nobody goes on with a conversation."""
    source = Random(plan.seed)
    clients = conversations(plan.mix, plan.seed)
    found: list[Arrival] = []
    at_s = 0.0
    for number in range(plan.requests):
        at_s += source.expovariate(plan.rate_per_s)
        found.append(Arrival(at_s, clients[number % len(clients)].next(())))
    return found


def run(server: Server, decode: DecodeServer, model: Path, plan: LosslessPlan) -> Outcome:
    router = router_of(server)
    start = f"{SIZE}x1"
    reach(router, start)
    schedule = arrivals(plan)
    before = router_metrics.read(router)
    with running(lambda stop: open_loop(lambda: router, schedule, stop, quiet_s=QUIET_S)) as load:
        moves, down_s = _disturb(router, decode, plan, until_s=schedule[-1].at_s + _MARGIN_S)
    streams = load.result
    say(f"lossless: {tally(streams)} of {len(streams)}, {len(moves)} moves; comparing outputs")
    return Outcome(
        streams=streams,
        moves=moves,
        counted=router_metrics.read(router).since(before),
        compared_outputs=reference.check(model, streams),
        kv_held_tokens=drain(server),
        down_s=down_s,
    )


def _disturb(
    router: str, decode: DecodeServer, plan: LosslessPlan, until_s: float
) -> tuple[list[Move], float | None]:
    """Moves and a killed decode server, until ``until_s`` has passed and all is well again."""
    began = time.perf_counter()
    steps = walk(f"{SIZE}x1", SIZE, DEGREES, plan.seed)
    moves: list[Move] = []
    killed_s: float | None = None
    back_s: float | None = None
    while True:
        at_s = time.perf_counter() - began
        if killed_s is None and plan.kill_at_s is not None and at_s >= plan.kill_at_s:
            killed_s = at_s
            decode.kill()
            decode.launch()
        if killed_s is not None and back_s is None and decode.is_ready():
            back_s = at_s
        if at_s >= until_s and (killed_s is None or back_s is not None):
            break
        if at_s >= (len(moves) + 1) * plan.move_every_s:
            moves += reconfigure(router, next(steps), began)
        time.sleep(_POLL_S)
    down_s = None if killed_s is None or back_s is None else round(back_s - killed_s, 1)
    return moves, down_s
