"""The cache of a rank against a naive model, which sorts where the cache keeps order."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vertumnus_router.core.types import BlockHash
from vertumnus_sim.cache import RankCache

#: A block is named by its path from the root, of digits, so its ancestors are its prefixes.
paths = st.text("12", min_size=1, max_size=6)


def chain(path: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(int(path[: n + 1])) for n in range(len(path)))


def parent(block: BlockHash) -> BlockHash | None:
    return BlockHash(block // 10) if block >= 10 else None


@dataclass(slots=True)
class Use:
    """A prompt that is being computed: the first ``filled`` blocks are here."""

    blocks: tuple[BlockHash, ...]
    keep: bool
    filled: int


@dataclass(slots=True)
class Copy:
    used_at: int
    kept: bool
    pins: int = 0


class NaiveCache:
    """Every block with when it was last used; what goes next is found by looking at all."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.reserved = capacity, 0
        self.here: dict[BlockHash, Copy] = {}
        self._clock = 0

    def pinned(self) -> int:
        return sum(copy.pins > 0 for copy in self.here.values())

    def reserve(self, blocks: int) -> list[BlockHash]:
        self.reserved += blocks
        gone = []
        while len(self.here) + self.reserved > self.capacity:
            parents = {parent(block) for block in self.here}
            free = [b for b, copy in self.here.items() if not copy.pins and b not in parents]
            victim = min(free, key=lambda b: (self.here[b].kept, self.here[b].used_at))
            gone.append(victim)
            del self.here[victim]
        return gone

    def pin(self, blocks: tuple[BlockHash, ...], keep: bool) -> None:
        for block in blocks:
            self.here[block].pins += 1
            self.here[block].kept |= keep

    def fill(self, blocks: tuple[BlockHash, ...], keep: bool) -> None:
        self.reserved -= len(blocks)
        for block in blocks:
            self.here.setdefault(block, Copy(0, keep))
        self.pin(blocks, keep)

    def unpin(self, blocks: tuple[BlockHash, ...]) -> None:
        for block in reversed(blocks):
            self._clock += 1
            self.here[block].pins -= 1
            self.here[block].used_at = self._clock


class CacheMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(4, 14))
    def begin(self, capacity: int) -> None:
        self.cache, self.naive = RankCache(capacity), NaiveCache(capacity)
        self.uses: list[Use] = []

    def _free(self) -> int:
        return self.naive.capacity - self.naive.pinned() - self.naive.reserved

    @rule(path=paths, keep=st.booleans())
    def use(self, path: str, keep: bool) -> None:
        """As a worker begins a prefill: pin what is here, reserve the rest, if there is room."""
        blocks, here = chain(path), self.naive.here
        held = next((n for n, block in enumerate(blocks) if block not in here), len(blocks))
        assert self.cache.held(blocks) == held
        anew = [block for block in blocks[:held] if not here[block].pins]
        assert len(anew) == self.cache.unpinned(blocks[:held])
        needed = len(anew) + len(blocks) - held
        assert self.cache.fits(needed) == (needed <= self._free())
        if needed > self._free():
            return
        for cache in (self.cache, self.naive):
            cache.pin(blocks[:held], keep)
        gone = self.cache.reserve(len(blocks) - held)
        assert gone == self.naive.reserve(len(blocks) - held)
        assert not set(gone) & set(blocks)
        self.uses.append(Use(blocks, keep, held))

    @precondition(lambda self: self.uses)
    @rule(which=st.integers(0, 99), steps=st.integers(1, 6))
    def compute(self, which: int, steps: int) -> None:
        use = self.uses[which % len(self.uses)]
        new = use.blocks[use.filled : use.filled + steps]
        self.cache.fill(use.blocks[use.filled - 1] if use.filled else None, new, use.keep)
        self.naive.fill(new, use.keep)
        use.filled += len(new)

    @precondition(lambda self: self.uses)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        """It is complete, or goes elsewhere."""
        use = self.uses.pop(which % len(self.uses))
        left = len(use.blocks) - use.filled
        for cache in (self.cache, self.naive):
            cache.unpin(use.blocks[: use.filled])
        self.cache.unreserve(left)
        self.naive.reserved -= left

    @rule(path=paths, keep=st.integers(0, 5))
    def drop(self, path: str, keep: int) -> None:
        named, here = chain(path)[keep:], self.naive.here
        below = any(parent(block) in named and block not in named for block in here)
        may = all(block in here and not here[block].pins for block in named) and not below
        assert self.cache.drop(named) == may
        for block in named if may else ():
            del here[block]

    @invariant()
    def alike(self) -> None:
        cache, naive = self.cache, self.naive
        assert len(cache) == len(naive.here)
        assert all(block in cache for block in naive.here)
        assert cache.pinned == naive.pinned() and cache.reserved == naive.reserved

    @invariant()
    def within_its_capacity(self) -> None:
        assert len(self.cache) + self.cache.reserved <= self.cache.capacity

    @invariant()
    def no_block_without_its_parent(self) -> None:
        above = (parent(block) for block in self.naive.here)
        assert all(block in self.cache for block in above if block is not None)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def filled(capacity: int, *paths: str, keep: bool = True) -> RankCache:
    """Each used in turn."""
    cache = RankCache(capacity)
    for path in paths:
        held = cache.held(chain(path))
        cache.pin(chain(path)[:held], keep)
        cache.reserve(len(path) - held)
        cache.fill(chain(path)[held - 1] if held else None, chain(path)[held:], keep)
        cache.unpin(chain(path))
    return cache


def test_the_least_recently_used_end_goes_first() -> None:
    cache = filled(5, "11", "12", "21")  # 1, 11, 12, 2, 21
    assert cache.reserve(2) == [BlockHash(11), BlockHash(12)]
    cache.unreserve(2)
    assert cache.reserve(3) == [BlockHash(1)]


def test_surplus_goes_before_what_is_kept_however_new_it_is() -> None:
    cache = filled(4, "11")
    cache.reserve(2)
    cache.fill(None, chain("21"), keep=False)
    cache.unpin(chain("21"))
    assert cache.reserve(3) == [BlockHash(21), BlockHash(2), BlockHash(11)]


def test_surplus_that_its_home_uses_is_kept() -> None:
    cache = filled(4, "11", keep=False)
    cache.pin(chain("11"), keep=True)
    cache.unpin(chain("11"))
    cache.reserve(2)
    cache.fill(None, chain("21"), keep=False)
    cache.unpin(chain("21"))
    assert cache.reserve(2) == [BlockHash(21), BlockHash(2)]


def test_what_is_kept_stays_so_when_others_use_it() -> None:
    cache = filled(4, "11")
    cache.pin(chain("11"), keep=False)
    cache.unpin(chain("11"))
    cache.reserve(2)
    cache.fill(None, chain("21"), keep=False)
    cache.unpin(chain("21"))
    assert cache.reserve(2) == [BlockHash(21), BlockHash(2)]


def test_what_is_pinned_twice_stays_until_it_is_unpinned_twice() -> None:
    cache = filled(2, "11")
    cache.pin(chain("11"), keep=True)
    cache.pin(chain("11"), keep=True)
    cache.unpin(chain("11"))
    assert cache.pinned == 2 and not cache.fits(1)
    cache.unpin(chain("11"))
    assert not cache.pinned and cache.fits(2)


@pytest.mark.parametrize(("path", "keep"), [("1", 0), ("11", 1), ("11", 0), ("113", 1)])
def test_nothing_is_dropped_from_under_others_or_that_is_not_here(path: str, keep: int) -> None:
    cache = filled(9, "111", "112")
    assert not cache.drop(chain(path)[keep:])
    assert len(cache) == 4
    assert cache.drop(chain("111")[2:])
    assert cache.drop(chain("112")) and not len(cache)
