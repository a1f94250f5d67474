"""From one composition of a pool to another, one adjacent step of the ladder at a time."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vertumnus_router.lattice import Block, format_composition, lattice


@dataclass(frozen=True, slots=True)
class Move:
    """One block splits into those of the next smaller degree that fill it, or back.

    ``before`` and ``after`` are compositions of the whole pool, in rank order.
    """

    before: tuple[Block, ...]
    after: tuple[Block, ...]

    @property
    def leaving(self) -> tuple[Block, ...]:
        """The blocks that end."""
        return tuple(block for block in self.before if block not in self.after)

    @property
    def arriving(self) -> tuple[Block, ...]:
        """The blocks that begin, on the same ranks."""
        return tuple(block for block in self.after if block not in self.before)

    @property
    def merges(self) -> bool:
        return len(self.after) < len(self.before)

    def __str__(self) -> str:
        return f"{format_composition(self.before)} to {format_composition(self.after)}"


@dataclass(frozen=True, slots=True)
class PricedMove:
    """A move and what it is predicted to cost, as things stand.

    ``drain_s``: until the blocks that end stand at a step boundary. ``reconcile_tokens``: cached
    tokens that only some ranks of a merged block hold; the others copy them on first use.
    """

    move: Move
    drain_s: float
    reconcile_tokens: int


def plan(
    current: Collection[Block], target: Collection[Block], degrees: Sequence[int]
) -> tuple[Move, ...]:
    """The shortest way from ``current`` to ``target``, two compositions of one pool.

    Blocks are nested or disjoint, so each block that differs has to be split down to the target
    or merged up to it, and nothing else has to move: splits come first, since they add capacity,
    then merges from the smallest degree up. ``ValueError`` if the ranks are not the same or a
    degree is not on the ladder.
    """
    if _ranks(current) != _ranks(target):
        raise ValueError(f"not the ranks of one pool: {sorted(current)} and {sorted(target)}")
    ladder = sorted(set(degrees))
    blocks, moves = set(current), []
    for old, new in (*_splits(blocks, set(target), ladder), *_merges(blocks, set(target), ladder)):
        before = tuple(sorted(blocks, key=_first))
        blocks = blocks - set(old) | set(new)
        moves.append(Move(before, tuple(sorted(blocks, key=_first))))
    return tuple(moves)


def adjacent(current: Collection[Block], degrees: Sequence[int]) -> tuple[Move, ...]:
    """Every move of one step that a pool of that composition can make, small blocks first."""
    ladder = sorted(set(degrees))
    blocks, moves = set(current), []
    before = tuple(sorted(blocks, key=_first))
    for block in lattice(sum(block.degree for block in blocks), ladder[1:]):
        parts = _parts(block, ladder)
        if block in blocks:
            after = blocks - {block} | set(parts)
        elif blocks.issuperset(parts):
            after = blocks - set(parts) | {block}
        else:
            continue
        moves.append(Move(before, tuple(sorted(after, key=_first))))
    return tuple(moves)


def surround(current: Collection[Block], block: Block, degrees: Sequence[int]) -> tuple[Block, ...]:
    """The composition nearest to ``current`` that has ``block``: larger ones around it are split
    as far as it takes. ``ValueError`` if its degree is not on the ladder."""
    ladder = sorted(set(degrees))
    blocks = {other for other in current if not _within(other, block)}
    while block not in blocks:
        around = [other for other in blocks if _within(block, other)]
        if not around:
            blocks.add(block)
            break
        blocks = blocks - {around[0]} | set(_parts(around[0], ladder))
    return tuple(sorted(blocks, key=_first))


_Step = tuple[tuple[Block, ...], tuple[Block, ...]]


def _splits(current: set[Block], target: set[Block], ladder: Sequence[int]) -> list[_Step]:
    """From the top down, in rank order: every block that is larger than the target's there."""
    steps: list[_Step] = []
    waiting = sorted(current, key=_first)
    while waiting:
        block = waiting.pop(0)
        if block not in target and any(_within(smaller, block) for smaller in target):
            parts = _parts(block, ladder)
            steps.append(((block,), parts))
            waiting = [*parts, *waiting]
    return steps


def _merges(current: set[Block], target: set[Block], ladder: Sequence[int]) -> list[_Step]:
    """What leads to each block that is larger than the current ones there, the last step last."""
    steps: list[_Step] = []
    waiting = sorted(target, key=_first, reverse=True)
    while waiting:
        block = waiting.pop(0)
        if block not in current and any(_within(smaller, block) for smaller in current):
            parts = _parts(block, ladder)
            steps.append((parts, (block,)))
            waiting += reversed(parts)
    return steps[::-1]


def _parts(block: Block, ladder: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of the next smaller degree that fill ``block``."""
    if block.degree not in ladder or block.degree == ladder[0]:
        raise ValueError(f"{block} cannot be split on the ladder {', '.join(map(str, ladder))}")
    degree = ladder[ladder.index(block.degree) - 1]
    return tuple(Block(first, degree) for first in range(block.first, block.ranks.stop, degree))


def _within(inner: Block, outer: Block) -> bool:
    return inner != outer and inner.first in outer and inner.degree < outer.degree


def _ranks(blocks: Collection[Block]) -> list[int]:
    return sorted(rank for block in blocks for rank in block.ranks)


def _first(block: Block) -> int:
    return block.first
