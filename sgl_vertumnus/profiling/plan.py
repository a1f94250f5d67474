"""What is to be measured: the grid of degrees, suffixes and prefixes, and in which order."""

from collections.abc import Sequence
from random import Random

import msgspec
from vertumnus_router.lattice import Block, format_composition

from sgl_vertumnus.errors import ConfigurationError

#: Suffixes that are measured unless told otherwise, as far as they fit.
LENGTHS = (32, 128, 512, 2048, 8192, 32768)
HIT_RATIOS = (0.0, 0.5, 0.9)


class Cell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A prefill of R uncached behind P cached tokens at a degree."""

    degree: int
    uncached_tokens: int
    cached_tokens: int

    @property
    def tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides which measurements are made; two runs of the same plan can share
    theirs. ``prompts`` are (R, P), P in whole blocks. Token ids are drawn below ``highest_id``."""

    degrees: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    repetitions: int
    seed: int
    highest_id: int

    def cells(self, repetition: int) -> list[Cell]:
        """One repetition: degree by degree, both in an order of its own, so that what drifts
        meanwhile is not taken for an effect of length or degree."""
        source = Random(f"order {repetition} of {self.seed}")
        degrees = source.sample(self.degrees, len(self.degrees))
        cells = []
        for degree in degrees:
            for uncached, cached in source.sample(self.prompts, len(self.prompts)):
                cells.append(Cell(degree=degree, uncached_tokens=uncached, cached_tokens=cached))
        return cells

    @property
    def size(self) -> int:
        """The number of measurements."""
        return len(self.degrees) * len(self.prompts) * self.repetitions

    @property
    def longest_prefix(self) -> int:
        return max(cached for _, cached in self.prompts)


def prompts(
    lengths: Sequence[int],
    *,
    hit_ratios: Sequence[float] = (),
    cached_tokens: Sequence[int] = (),
    block_tokens: int,
    most_tokens: int,
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(R, P) of every length with every prefix, P rounded to whole blocks: those of up to
    ``most_tokens`` in all, and those that are left out because they are longer.

    A hit ratio h is P = R·h / (1 − h). Raises ``ConfigurationError`` for values that make no sense.
    """
    for length in lengths:
        if length < 1:
            raise ConfigurationError(f"--lengths {length}: a prefill has at least one token")
    for ratio in hit_ratios:
        if not 0 <= ratio < 1:
            raise ConfigurationError(f"--hit-ratios {ratio:g}: choose from 0 to below 1")
    if min(cached_tokens, default=0) < 0:
        raise ConfigurationError(f"--cached-tokens {min(cached_tokens)}: choose 0 or more")
    found = set()
    for length in lengths:
        prefixes = [*cached_tokens, *(length * ratio / (1 - ratio) for ratio in hit_ratios)]
        for prefix in prefixes or [0]:
            found.add((length, round(prefix / block_tokens) * block_tokens))
    fit = tuple(sorted(one for one in found if sum(one) <= most_tokens))
    return fit, tuple(sorted(found - set(fit)))


def composition_for(degree: int, size: int, degrees: Sequence[int]) -> str:
    """As many workers of ``degree`` as fit, the first at rank 0, and the largest below it on what
    is left. ``ConfigurationError`` if that leaves ranks over."""
    blocks: list[Block] = []
    at = 0
    for one in sorted((d for d in set(degrees) if d <= degree), reverse=True):
        while at + one <= size:
            blocks.append(Block(at, one))
            at += one
    if at < size:
        raise ConfigurationError(
            f"degree {degree}: {size - at} of the pool's {size} ranks would be left over"
        )
    return format_composition(blocks)
