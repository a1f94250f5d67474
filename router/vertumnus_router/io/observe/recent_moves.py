"""The last splits and merges that this router commanded, and those going on."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from vertumnus_router.core.effects import Regroup
from vertumnus_router.core.events import RegroupEnded
from vertumnus_router.core.types import PlanId, PoolId
from vertumnus_router.lattice import format_composition

_REMEMBERED = 32


@dataclass(slots=True)
class _Move:
    order: Regroup
    began_s: float
    ended_s: float | None = None
    end: RegroupEnded | None = None


class RecentMoves:
    """Bounded; a pool has one move at a time."""

    def __init__(self) -> None:
        self._moves: deque[_Move] = deque(maxlen=_REMEMBERED)
        self._open: dict[tuple[PoolId, PlanId], _Move] = {}

    def began(self, order: Regroup, now: float) -> None:
        move = _Move(order, now)
        self._moves.append(move)
        self._open[order.pool, order.plan] = move

    def ended(self, end: RegroupEnded, now: float) -> None:
        move = self._open.pop((end.pool, end.plan), None)
        if move is not None:
            move.end, move.ended_s = end, now

    def content(self, now: float) -> list[dict[str, Any]]:
        """As JSON, the latest first. Without an ``outcome`` a move is still going on."""
        return [_content(move, now) for move in reversed(self._moves)]


def _content(move: _Move, now: float) -> dict[str, Any]:
    order, end = move.order, move.end
    stages = None if end is None or end.stages is None else msgspec.structs.asdict(end.stages)
    return {
        "pool": order.pool,
        "kind": "merge" if len(order.after) < len(order.before) else "split",
        "from": format_composition(order.before),
        "to": format_composition(order.after),
        "age_s": now - move.began_s,
        "took_s": None if move.ended_s is None else move.ended_s - move.began_s,
        "outcome": None if end is None else end.outcome.value,
        "reason": None if end is None else end.reason,
        "stages_ms": stages,
    }
