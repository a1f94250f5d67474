"""A control plane whose prefix manager acts, with one token of KV to a byte."""

from typing import Any

from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Copy, Dispatch, Effect, Reclaim
from vertumnus_router.core.events import CopyEnded, Tick, TransferOutcome
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.snapshot import PrefixDecision, PrefixesSnapshot
from vertumnus_router.core.types import BlockHash, TransferId

from tests.router.core.scene import IDEAL, Scene

SCAN_S = 20.0


class PrefixScene(Scene):
    """The default thresholds are far away; a test brings near the one that it is about."""

    def __init__(
        self,
        composition: str = "4x1",
        profile: Profile = IDEAL,
        *,
        pool: dict[str, Any] | None = None,
        scene: dict[str, Any] | None = None,
        **prefix: Any,
    ) -> None:
        # Nothing is copied but what a test lets the scan copy.
        defaults = {
            **{"mode": "on", "pull": False},
            **{"theta_inter_s": 1e9, "theta_intra": 1e9, "theta_reclaim": 0.0},
        }
        super().__init__(
            None, profile, prefix=PrefixConfig(**{**defaults, **prefix}), **(scene or {})
        )
        self.launch(composition, **{"kv_token_bytes": 1, **(pool or {})})
        self.feed(Tick())
        self.names = 0

    def serve(self, blocks: tuple[BlockHash, ...], tokens: int, times: int = 1) -> Dispatch:
        """So many requests, one after the other; the dispatch of the last."""
        for _ in range(times):
            self.names += 1
            dispatch = self.dispatched(f"n{self.names}", tokens, blocks=blocks)
            self.finish(f"n{self.names}")
        return dispatch

    def scan(self) -> list[Copy | Reclaim]:
        """Wait for the next scan and go through with it."""
        self.wait(SCAN_S)
        effects = self.tick()
        while self.control.scanning:
            effects += self.tick()
        return [effect for effect in effects if isinstance(effect, Copy | Reclaim)]

    def tick(self) -> list[Effect]:
        self.wait(0.01)
        return self.feed(Tick())

    def copied(self, copy: Copy, held: int = 0, seconds: float = 1.0) -> None:
        """The copy ends, and the destination tells of its blocks."""
        self.store(copy.destination.rank.index, copy.blocks, copy.destination.rank.pool)
        size = (len(copy.blocks) - held) * 100
        self.end(copy.transfer, size=size, seconds=seconds)

    def end(
        self,
        transfer: TransferId,
        outcome: TransferOutcome = TransferOutcome.DONE,
        size: int = 0,
        seconds: float = 1.0,
    ) -> None:
        self.feed(CopyEnded(transfer, outcome, size // 100, size, seconds, seconds))

    def prefixes(self) -> PrefixesSnapshot:
        return self.control.prefixes(self.now)

    def decisions(self) -> tuple[PrefixDecision, ...]:
        return self.prefixes().decisions


def where(effects: list[Copy | Reclaim]) -> list[tuple[int | None, int, int]]:
    """Of each transfer: the rank that it reads, the one that it changes, blocks."""
    return [
        (e.source.rank.index, e.destination.rank.index, len(e.blocks))
        if isinstance(e, Copy)
        else (None, e.holder.rank.index, len(e.blocks) - e.keep)
        for e in effects
    ]
