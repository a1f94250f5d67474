"""What must never happen, whatever the load: flapping, and moves that are none.

The composition follows the verdicts. Arrivals are Poisson; the level of the load is a square wave.
"""

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.core.verdict import Action, Verdict

from tests.router.core.composed import Composed

WINDOWS = 120
#: Tokens a request: ever fewer and larger requests make the same load ever noisier.
SIZES = [100, 500, 2_000, 5_000]


def poisson(source: random.Random, mean: float) -> int:
    """How many arrivals of a unit-rate process fall into [0, ``mean``]."""
    count, at = 0, source.expovariate(1.0)
    while at <= mean:
        count, at = count + 1, at + source.expovariate(1.0)
    return count


def replay(
    level: Callable[[int], float],
    tokens: Callable[[random.Random], int],
    *,
    size: float,
    seed: int,
    windows: int = WINDOWS,
) -> list[Verdict]:
    """``level``: demand of a window in seconds, of requests of ``size`` tokens on average."""
    source, cluster = random.Random(seed), Composed("2x2")
    return [
        cluster.window(*(tokens(source) for _ in range(poisson(source, level(k) * 1000 / size))))
        for k in range(windows)
    ]


def square(high: float, low: float, half: int) -> Callable[[int], float]:
    return lambda window: high if window // half % 2 == 0 else low


def directions(verdicts: list[Verdict]) -> list[Action]:
    return [verdict.action for verdict in verdicts if verdict.chosen is not None]


def reversals(verdicts: list[Verdict]) -> int:
    moves = directions(verdicts)
    return sum(one is not other for one, other in itertools.pairwise(moves))


def equal(size: int) -> Callable[[random.Random], int]:
    return lambda source: size


def skewed(size: int) -> Callable[[random.Random], int]:
    return lambda source: max(1, round(source.expovariate(1 / size)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [equal, skewed])
@pytest.mark.parametrize("half", [2, 3, 5, 10, 20])
def test_no_more_reversals_than_changes_of_the_load(
    size: int, spread: Callable[[int], Callable[[random.Random], int]], half: int
) -> None:
    for high, low in ((28.0, 6.0), (36.0, 4.0), (24.0, 12.0)):
        for seed in range(3):
            verdicts = replay(square(high, low, half), spread(size), size=size, seed=seed)
            assert reversals(verdicts) <= WINDOWS // half + 2


@pytest.mark.parametrize("size", SIZES[:3])
@pytest.mark.parametrize("spread", [equal, skewed])
def test_a_load_that_changes_faster_than_it_persists_moves_nothing(
    size: int, spread: Callable[[int], Callable[[random.Random], int]]
) -> None:
    for high, low in ((28.0, 6.0), (36.0, 4.0)):
        for seed in range(5):
            verdicts = replay(square(high, low, 1), spread(size), size=size, seed=seed)
            assert directions(verdicts[8:]) == []


@pytest.mark.parametrize("size", [1_000, 3_000, 6_000])
@pytest.mark.parametrize("spread", [equal, skewed])
def test_noise_alone_hardly_ever_turns_back(
    size: int, spread: Callable[[int], Callable[[random.Random], int]]
) -> None:
    """A steady load of few requests, at every height: no reversal has a reason. Five hours."""
    for level in range(4, 40, 4):
        for seed in range(2):
            verdicts = replay(
                lambda window, level=level: level, spread(size), size=size, seed=seed, windows=900
            )
            assert reversals(verdicts) <= 6


def test_a_load_that_does_change_is_followed() -> None:
    verdicts = replay(square(36.0, 4.0, 20), equal(100), size=100, seed=1)
    assert reversals(verdicts) == WINDOWS // 20 - 1
    first_low = verdicts[20:24]
    assert [verdict.action for verdict in first_low[:2]] == [Action.KEEP, Action.MERGE]


def test_a_noisy_fraction_of_long_requests_is_no_signal() -> None:
    """A tenth of about 140 requests is long: give or take a third, every window."""
    for seed in range(10):
        source = random.Random(seed)
        cluster = Composed("2x2", lower=0.2, long_tokens=100)
        verdicts = [
            cluster.window(
                *(110 if source.random() < 0.1 else 90 for _ in range(poisson(source, 140)))
            )
            for _ in range(WINDOWS)
        ]
        assert reversals(verdicts) <= 1


@settings(max_examples=150, deadline=None)
@given(
    composition=st.sampled_from(["4x1", "2x2", "1x4", "2x1,1x2", "1x4,2x2", "8x1"]),
    persistence=st.integers(1, 3),
    cooldown=st.integers(1, 3),
    windows=st.lists(
        st.lists(st.integers(1, 60_000), max_size=12)
        | st.integers(1, 400).map(lambda count: [200] * count),
        max_size=40,
    ),
)
def test_whatever_arrives(
    composition: str, persistence: int, cooldown: int, windows: list[list[int]]
) -> None:
    cluster = Composed(composition, persistence=persistence, cooldown=cooldown)
    last: Verdict | None = None
    for arrivals in windows:
        offered = cluster.look()[0].options
        verdict = cluster.window(*arrivals)
        assert verdict.action is (verdict.wanted if verdict.chosen else Action.KEEP)
        assert verdict.detail
        assert math.isfinite(verdict.demand_s)
        if verdict.chosen is None:
            continue
        assert verdict.chosen in offered
        assert verdict.chosen.action is verdict.action
        if last is not None:
            assert verdict.window - last.window >= cooldown + persistence
        last = verdict
