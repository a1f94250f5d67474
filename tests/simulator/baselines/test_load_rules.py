"""The rules that look at load alone, or at nothing."""

from collections import Counter

import pytest

from tests.router.core.scene import chain
from tests.simulator.baselines.baseline_scene import BaselineScene


def test_round_robin_takes_turns_whatever_the_load() -> None:
    scene = BaselineScene("round_robin", "3x1,1x1")
    taken = [scene.worker(str(i), 50_000 if i % 4 == 0 else 10) for i in range(8)]
    assert taken == ["p/0x1", "p/1x1", "p/2x1", "p/3x1"] * 2


def test_least_loaded_by_tokens_avoids_the_long_prefill() -> None:
    scene = BaselineScene("least_loaded", "2x1")
    busy = scene.worker("long", 9000)
    (other,) = {"p/0x1", "p/1x1"} - {busy}
    assert [scene.worker(str(i), 1000) for i in range(5)] == [other] * 5
    scene.first_token("long", busy)  # its tokens are done, though it goes on
    assert scene.worker("next", 1000) == busy


def test_least_loaded_by_requests_counts_them_until_they_end() -> None:
    scene = BaselineScene("least_loaded", "2x1", measure="requests")
    busy = scene.worker("long", 9000)
    (other,) = {"p/0x1", "p/1x1"} - {busy}
    assert scene.worker("a", 10) == other
    scene.first_token("long", busy)
    scene.finish("a")
    assert scene.worker("b", 10) == other  # the long one still decodes


def test_least_loaded_counts_what_is_not_cached() -> None:
    scene = BaselineScene("least_loaded", "2x1")
    scene.store(0, chain(1, 99))
    scene.store(1, chain(1, 99))
    first = scene.worker("mostly cached", 10_000, blocks=chain(1, 100))  # 100 tokens to compute
    second = scene.worker("a", 500)
    assert second != first
    assert scene.worker("b", 500) == first


def test_least_loaded_counts_load_per_rank() -> None:
    scene = BaselineScene("least_loaded", "1x2,1x1,1x1")
    taken = Counter(scene.worker(str(i), 1000) for i in range(8))
    # 4000 tokens at the pair are 2000 at each of its ranks.
    assert taken == {"p/0x2": 4, "p/2x1": 2, "p/3x1": 2}


@pytest.mark.parametrize("measure", ["requests", "tokens"])
def test_power_of_two_takes_the_better_of_two(measure: str) -> None:
    # With two workers both are always drawn, so the less loaded one always wins.
    scene = BaselineScene("power_of_two", "2x1", measure=measure)
    counts = Counter(scene.worker(str(i), 1000) for i in range(20))
    assert counts == {"p/0x1": 10, "p/1x1": 10}


def test_power_of_two_never_takes_the_worst_but_does_not_always_take_the_best() -> None:
    scene = BaselineScene("power_of_two", "4x1")
    loads = {"p/0x1": 0, "p/1x1": 0, "p/2x1": 0, "p/3x1": 0}
    missed_best = 0
    for i in range(200):
        worker = scene.worker(str(i))
        if min(loads.values()) < max(loads.values()):
            worst = [w for w, load in loads.items() if load == max(loads.values())]
            assert len(worst) > 1 or worker != worst[0]
        missed_best += loads[worker] > min(loads.values())
        loads[worker] += 1
    assert missed_best > 10


def test_ties_of_an_idle_cluster_spread() -> None:
    scene = BaselineScene("least_loaded", "4x1")
    seen = set()
    for i in range(40):
        worker = scene.worker(str(i))
        scene.serve(str(i), worker)
        seen.add(worker)
    assert len(seen) == 4
