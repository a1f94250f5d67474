"""A cluster whose composition follows the controller's verdicts, one window at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.controller import Controller
from vertumnus_router.core.moves import Move, PricedMove
from vertumnus_router.core.types import PoolId
from vertumnus_router.core.verdict import MoveOption, PoolView, Verdict
from vertumnus_router.lattice import Block, format_composition, parse_composition

LADDER = (1, 2, 4)
WINDOW_S = 20.0
#: With ρ = 0.5 and windows of 20 s: κ₁ = 10 s, κ₂ = 16 s, κ₄ = 24 s of work at degree 1.
SPEED = {1: 1.0, 2: 1.6, 4: 2.4}


def service_s(degree: int, uncached_tokens: int, cached_tokens: int) -> float:
    """1000 tokens a second at degree 1, cached ones free."""
    return uncached_tokens / 1000 / SPEED[degree]


def options(
    pool: str,
    blocks: Sequence[Block],
    *,
    drain_s: Mapping[int, float] | None = None,
    reconcile_tokens: Mapping[int, int] | None = None,
    largest: int = 4,
) -> tuple[MoveOption, ...]:
    """Every adjacent move of the pool; drain and tokens by the lowest rank that it touches."""
    drain_s, reconcile_tokens = drain_s or {}, reconcile_tokens or {}
    sides: list[tuple[tuple[Block, ...], tuple[Block, ...]]] = []
    for block in blocks:
        if block.degree > 1:
            sides.append(((block,), halves(block)))
        if block.degree < largest and block.first % (2 * block.degree) == 0:
            merged = Block(block.first, 2 * block.degree)
            if halves(merged)[1] in blocks:
                sides.append((halves(merged), (merged,)))
    return tuple(
        MoveOption(
            PoolId(pool),
            PricedMove(
                Move(tuple(blocks), tuple(sorted(set(blocks) - set(old) | set(new)))),
                drain_s.get(old[0].first, 0.0),
                reconcile_tokens.get(old[0].first, 0),
            ),
        )
        for old, new in sides
    )


def halves(block: Block) -> tuple[Block, Block]:
    half = block.degree // 2
    return Block(block.first, half), Block(block.first + half, half)


class Composed:
    """One pool. ``window`` lets requests arrive, ends the window and carries the command out."""

    def __init__(
        self,
        composition: str = "2x2",
        *,
        service: Any = service_s,
        limits: Mapping[int, float] | None = None,
        **config: Any,
    ) -> None:
        base: dict[str, Any] = {"mode": "on", "rho": 0.5, "window_s": WINDOW_S}
        self.controller = Controller(ControllerConfig(**base | config), service, limits or {})
        size = sum(int(n) * int(d) for n, d in (t.split("x") for t in composition.split(",")))
        self.size = size
        self.blocks = parse_composition(composition, size, LADDER)
        self.failed: frozenset[Block] = frozenset()
        self.unsettled: str | None = None
        self.obeys = True
        self.terms: dict[str, Any] = {}
        self.now = 100.0
        assert self.controller.tick(self.now, self.look) is None

    @property
    def composition(self) -> str:
        return format_composition(self.blocks)

    def become(self, composition: str) -> None:
        self.blocks = parse_composition(composition, self.size, LADDER)

    def look(self) -> tuple[PoolView, ...]:
        serving = tuple(block for block in self.blocks if block not in self.failed)
        moves = tuple(
            option
            for option in options("p", self.blocks, **self.terms)
            if self.failed.isdisjoint(option.move.leaving)
        )
        return (PoolView(PoolId("p"), self.blocks, serving, self.unsettled, moves),)

    def arrive(self, *tokens: int, cached: int = 0) -> None:
        """Requests of ``tokens`` uncached tokens each, and ``cached`` ones on top."""
        for uncached in tokens:
            self.controller.arrived(LADDER, uncached + cached, uncached, cached, self.now)

    def window(self, *tokens: int, after_s: float = WINDOW_S) -> Verdict:
        self.arrive(*tokens)
        self.now += after_s
        verdict = self.controller.tick(self.now, self.look)
        assert verdict is not None
        if verdict.command is not None and self.obeys:
            self.blocks = verdict.command.move.after
        return verdict

    def windows(self, count: int, *tokens: int) -> Verdict:
        """The same arrivals in ``count`` windows; the last verdict."""
        verdict = self.window(*tokens)
        for _ in range(count - 1):
            verdict = self.window(*tokens)
        return verdict
