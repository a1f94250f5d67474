"""A move under way: what it is about, and who has been heard in which stage. Pure."""

from dataclasses import dataclass, field

from vertumnus_router.lattice import Block
from vertumnus_router.protocol import Stages


@dataclass(frozen=True, slots=True)
class Plan:
    """From which blocks to which, at whose command, under which number."""

    command: bytes
    epoch: int
    before: tuple[Block, ...]
    after: tuple[Block, ...]
    asked_s: float

    @property
    def leaving(self) -> tuple[Block, ...]:
        """The blocks that end. Blocks are nested or disjoint, so they have the same ranks as
        those that begin."""
        return tuple(block for block in self.before if block not in self.after)

    @property
    def arriving(self) -> tuple[Block, ...]:
        return tuple(block for block in self.after if block not in self.before)

    @property
    def holders(self) -> tuple[int, ...]:
        """Whose ``Ready`` the move waits for."""
        return tuple(block.leader for block in self.leaving)

    def moves(self, rank: int) -> bool:
        return any(rank in block for block in self.leaving)

    def listeners(self, block: Block) -> set[int]:
        """Through whom the ranks of an arriving block hear of COMMIT: those who have not
        reached it follow an old leader, those who have but were not heard the new one."""
        old = {one.leader for one in self.leaving if one.first in block or block.first in one}
        return old | {block.leader}


@dataclass(slots=True)
class Draining:
    """PREPARE has gone out."""

    plan: Plan
    give_up_s: float
    ready_s: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Switching:
    """COMMIT has gone out."""

    plan: Plan
    ready_s: float
    give_up_s: float
    repeat_s: float
    entered_s: dict[int, float] = field(default_factory=dict)
    switched_s: dict[int, float] = field(default_factory=dict)
    #: failed since COMMIT, with the cause
    failed: dict[Block, str] = field(default_factory=dict)

    @property
    def pending(self) -> list[Block]:
        """Blocks that neither serve nor have failed."""
        return [
            block
            for block in self.plan.arriving
            if block not in self.failed and self.unheard(block)
        ]

    def unheard(self, block: Block) -> list[int]:
        return [rank for rank in block.ranks if rank not in self.switched_s]

    def stages(self, now: float) -> Stages:
        """Of a switch whose ranks have all answered."""
        entered_s = max(self.entered_s.get(rank, at) for rank, at in self.switched_s.items())
        switched_s = max(self.switched_s.values())
        return Stages(
            drain=_ms(self.plan.asked_s, self.ready_s),
            vote=_ms(self.ready_s, entered_s),
            switch=_ms(entered_s, switched_s),
            publish=_ms(switched_s, now),
        )


def _ms(begin_s: float, end_s: float) -> float:
    """Stamps of different processes may cross by a little."""
    return max(0.0, end_s - begin_s) * 1000
