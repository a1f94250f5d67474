"""Moves of a live pool through its router, and the walk over the lattice that they take."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.error import HTTPError

from vertumnus_router.core.moves import adjacent
from vertumnus_router.lattice import format_composition, parse_composition

from sgl_vertumnus.demo.servers import fetch
from vertumnus_bench.pool_state import until

#: What counts as the switch: from the vote to the published epoch.
_SWITCH_STAGES = ("vote", "switch", "publish")


@dataclass(frozen=True, slots=True)
class Move:
    """One move as the router reports it. ``asked_ms`` is what its caller waited, HTTP and
    planning included; ``stages_ms`` is empty when the move did not get that far."""

    at_s: float
    before: str
    after: str
    outcome: str
    reason: str | None
    stages_ms: dict[str, float]
    total_ms: float
    asked_ms: float

    @property
    def committed(self) -> bool:
        return self.outcome == "committed"

    @property
    def switch_ms(self) -> float:
        return sum(self.stages_ms[stage] for stage in _SWITCH_STAGES)


def walk(start: str, size: int, degrees: Sequence[int], seed: int) -> Iterator[str]:
    """An endless random walk by adjacent compositions, not including ``start``."""
    source = Random(seed)
    blocks = parse_composition(start, size, degrees)
    while True:
        blocks = source.choice(adjacent(blocks, degrees)).after
        yield format_composition(blocks)


def reconfigure(router: str, composition: str, began: float = 0.0) -> list[Move]:
    """Command ``composition``; the moves that it took. A refusal is in their outcomes, or a
    single move that says so. ``at_s`` counts from ``began``."""
    sent = time.perf_counter()
    try:
        answer = fetch(f"{router}/vertumnus/reconfigure", {"composition": composition})
    except HTTPError as exc:
        answer = _refusal(exc, composition)
    asked_ms = (time.perf_counter() - sent) * 1e3
    return [
        Move(
            at_s=sent - began,
            before=move["from"],
            after=move["to"],
            outcome=move.get("outcome") or "not tried",
            reason=move.get("reason"),
            stages_ms=move.get("stages_ms") or {},
            total_ms=move.get("total_ms") or 0.0,
            asked_ms=asked_ms,
        )
        for move in answer["moves"]
    ]


def reach(router: str, composition: str) -> None:
    """Until the pool serves as ``composition``. A pool that has just started refuses moves until
    all its ranks have reported."""
    until(
        f"the pool serves as {composition}",
        lambda: all(move.committed for move in reconfigure(router, composition)),
        limit_s=30.0,
    )


def _refusal(refused: HTTPError, composition: str) -> dict[str, Any]:
    text = refused.read().decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {}
    if isinstance(answer, dict) and answer.get("moves"):
        return answer
    reason = f"{refused.code}: {text[:300]}"
    return {"moves": [{"from": "", "to": composition, "outcome": "refused", "reason": reason}]}
