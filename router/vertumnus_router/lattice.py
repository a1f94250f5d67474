"""Blocks of ranks and compositions: the geometry that router and pools agree on.

A *block* is an aligned power-of-two run of ranks of one pool. A *composition* says which
blocks of a pool serve, written ``2x1,1x2`` (two workers of degree 1, then one of degree 2).
"""

from collections.abc import Sequence

import msgspec


class CompositionError(ValueError):
    """The composition cannot be laid out on the pool; the message says what would fit."""


class Block(msgspec.Struct, frozen=True, order=True, gc=False):
    """``degree`` ranks from ``first`` on; the lowest rank leads."""

    first: int
    degree: int

    def __post_init__(self) -> None:
        if self.degree < 1 or self.degree & (self.degree - 1):
            raise CompositionError(f"a degree is a power of two, not {self.degree}")
        if self.first < 0 or self.first % self.degree:
            raise CompositionError(
                f"a block of degree {self.degree} starts at a multiple of {self.degree}, "
                f"not at rank {self.first}"
            )

    @property
    def leader(self) -> int:
        return self.first

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.degree)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks


def lattice(pool_size: int, degrees: Sequence[int]) -> tuple[Block, ...]:
    """Every aligned block of every supported degree of a pool, small degrees first."""
    return tuple(
        Block(first, degree)
        for degree in sorted(set(degrees))
        for first in range(0, pool_size - degree + 1, degree)
    )


def check_degrees(pool_size: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """The sorted ladder of degrees, or ``CompositionError`` if the pool cannot host it."""
    ladder = tuple(sorted(set(degrees)))
    if not ladder:
        raise CompositionError("name at least one degree, for example --cp-degrees 1,2")
    for degree in ladder:
        if degree < 1 or degree & (degree - 1):
            raise CompositionError(f"--cp-degrees {degree}: a degree is a power of two")
        if degree > pool_size:
            raise CompositionError(
                f"--cp-degrees {degree}: larger than the pool of {pool_size} rank(s); "
                f"raise --pool-size or drop the degree"
            )
    return ladder


def parse_composition(text: str, pool_size: int, degrees: Sequence[int]) -> tuple[Block, ...]:
    """Lay ``2x1,1x2`` out on the pool, in the order written, every rank used once.

    Raises ``CompositionError`` when a term is malformed, a degree is not supported, a block
    would be misaligned, or the terms do not add up to the pool.
    """
    blocks: list[Block] = []
    at = 0
    for term in text.split(","):
        count_text, _, degree_text = term.strip().lower().partition("x")
        if not (_is_number(count_text) and _is_number(degree_text)):
            raise CompositionError(
                f"--composition {text!r}: {term.strip()!r} is not COUNTxDEGREE, as in 2x1,1x2"
            )
        count, degree = int(count_text), int(degree_text)
        if degree not in degrees:
            raise CompositionError(
                f"--composition {text!r}: degree {degree} is not among --cp-degrees "
                f"{','.join(map(str, sorted(set(degrees))))}"
            )
        if count and at % degree:
            raise CompositionError(
                f"--composition {text!r}: a degree-{degree} worker would start at rank {at}; "
                f"blocks are aligned, so write larger degrees first or fill up to a "
                f"multiple of {degree}"
            )
        at += count * degree
        if at > pool_size:
            break  # before a list is made that could be of any length
        blocks += [Block(first, degree) for first in range(at - count * degree, at, degree)]
    if at != pool_size:
        raise CompositionError(
            f"--composition {text!r} uses {at} rank(s), the pool has {pool_size}"
        )
    return tuple(blocks)


def _is_number(text: str) -> bool:
    """Digits that ``int`` reads."""
    return text.isascii() and text.isdigit() and len(text) < 20


def format_composition(blocks: Sequence[Block]) -> str:
    """The inverse of ``parse_composition``: runs of equal degree in rank order."""
    terms: list[list[int]] = []
    for block in sorted(blocks):
        if terms and terms[-1][1] == block.degree:
            terms[-1][0] += 1
        else:
            terms.append([1, block.degree])
    return ",".join(f"{count}x{degree}" for count, degree in terms)
