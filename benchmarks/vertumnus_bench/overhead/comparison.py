"""Routers under the same load in turns, so that what else the machine does hits all alike."""

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vertumnus_router.clock import WallClock

from vertumnus_bench.overhead.load import Load, Seen, Times, chat, loading, run
from vertumnus_bench.overhead.mock_pool import MockPool
from vertumnus_bench.overhead.targets import Target

#: Of one stream. The gap is that of a fast engine where CPU time and the first event are
#: measured, and none where the router sets the pace.
EVENTS = 16
GAP_US = 5000
CLIENTS, MANY_CLIENTS = 16, 128
#: A stream that is weighed stays open for longer than it takes to open all.
_OPEN_S = 4

SHORT = chat("What is so special about the number @@@@@@@@?")
STREAM = chat("What is so special about the number @@@@@@@@?", stream=True)


def document(size: int, seed: int = 0) -> str:
    """So many bytes of words that are neither all different nor all alike."""
    source = random.Random(seed)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "en", "i", "or", "u")]
    words = ["".join(source.choices(syllables, k=source.randint(1, 3))) for _ in range(3000)]
    text = " ".join(source.choices(words, k=size // 2))
    return text[:size]


def long(size: int) -> bytes:
    """A question about a document of ``size`` bytes."""
    return chat(document(size) + "\nWhat does it say about the number @@@@@@@@?")


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` turns of ``seconds`` for each figure and router, behind one that warms up;
    ``open_streams`` are held open at once to weigh them."""

    rounds: int = 5
    seconds: float = 2.0
    long_bytes: int = 64 * 1024
    open_streams: int = 1000


QUICK = Plan(rounds=1, seconds=0.1, long_bytes=2048, open_streams=50)


@dataclass(frozen=True, slots=True)
class Turn:
    """One load on one router; ``cpu_us`` of the router for each answer, None without one."""

    seen: Seen
    cpu_us: float | None


class Comparison:
    """``targets`` stand before ``pool``. ``say`` tells of progress."""

    def __init__(
        self, pool: MockPool, targets: Sequence[Target], plan: Plan, say: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._targets = targets
        self._plan = plan
        self._say = say
        self._clock = WallClock()

    def figures(self) -> dict[str, dict[str, Any]]:
        """By target: ``short``, ``prompt64k``, ``stream``, ``kib_per_stream``. CPU microseconds
        are of the router alone, and medians as the times are; rates are those of the best turn."""
        found: dict[str, dict[str, Any]] = {one.name: {} for one in self._targets}
        for name, body in (("short", SHORT), ("prompt64k", long(self._plan.long_bytes))):
            few, many = self._turns(body, CLIENTS), self._turns(body, MANY_CLIENTS)
            for target in found:
                found[target][name] = {
                    "cpu_us": _cpu_us(few[target]),
                    "p50_us": _median(_whole(turn).p50_us for turn in few[target]),
                    "rps_c16": _best_rate(few[target]),
                    "rps_c128": _best_rate(many[target]),
                }
        self._pool.stream(events=EVENTS, gap_us=GAP_US)
        paced = self._turns(STREAM, CLIENTS)
        self._pool.stream(events=EVENTS, gap_us=0)
        fast = self._turns(STREAM, CLIENTS)
        for target in found:
            found[target]["stream"] = {
                "cpu_us": _cpu_us(paced[target]),
                "first_event_ms": _median(_first(turn).p50_us / 1000 for turn in paced[target]),
                "rps_c16": _best_rate(fast[target]),
            }
        for one in self._targets:
            found[one.name]["kib_per_stream"] = self._kib_per_stream(one)
        return found

    def _turns(self, body: bytes, clients: int) -> dict[str, list[Turn]]:
        turns: dict[str, list[Turn]] = {one.name: [] for one in self._targets}
        for number in range(self._plan.rounds + 1):
            for target in self._targets:
                turn = self._turn(target, body, Load(clients, self._plan.seconds))
                if number > 0:
                    turns[target.name].append(turn)
        return turns

    def _turn(self, target: Target, body: bytes, load: Load) -> Turn:
        before_s = 0.0 if target.router is None else target.router.cpu_s()
        seen = run(target.port, body, load)
        cpu_us = None
        if target.router is not None and seen.requests:
            cpu_us = 1e6 * (target.router.cpu_s() - before_s) / seen.requests
        if seen.errors:
            self._say(f"{target.name}: {seen.errors} of {seen.requests} requests failed")
        cpu = "" if cpu_us is None else f", {cpu_us:.0f} µs of CPU each"
        self._say(
            f"{target.name}: {load.connections} clients, {len(body)} bytes: {seen.rate:.0f} a "
            f"second, {_whole(Turn(seen, None)).p50_us} µs{cpu}"
        )
        return Turn(seen, cpu_us)

    def _kib_per_stream(self, target: Target) -> float | None:
        """What the router's memory grows by, between one open stream and many."""
        if target.router is None:
            return None
        count = self._plan.open_streams
        self._pool.stream(events=2, gap_us=0)
        run(target.port, STREAM, Load(CLIENTS, 30.0, requests=count))
        self._pool.stream(events=2, gap_us=_OPEN_S * 1_000_000)
        before = target.router.rss_bytes()
        with loading(target.port, STREAM, Load(count, 30.0, requests=count)) as load:
            load.wait_open()
            during = target.router.rss_bytes()
        return round((during - before) / count / 1024, 1)


def _whole(turn: Turn) -> Times:
    if turn.seen.whole is None:
        raise RuntimeError("no request was answered")
    return turn.seen.whole


def _first(turn: Turn) -> Times:
    if turn.seen.first is None:
        raise RuntimeError("no request was answered")
    return turn.seen.first


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _cpu_us(turns: Sequence[Turn]) -> float | None:
    known = [turn.cpu_us for turn in turns if turn.cpu_us is not None]
    return round(statistics.median(known), 1) if known else None


def _best_rate(turns: Sequence[Turn]) -> float:
    return round(max(turn.seen.rate for turn in turns), 1)
