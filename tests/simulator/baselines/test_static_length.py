"""A border by input length between small and large workers."""

import pytest

from tests.router.core.scene import chain, with_overhead
from tests.simulator.baselines.baseline_scene import BaselineScene


def scene_of(composition: str = "1x2,2x1", **knobs: object) -> BaselineScene:
    knobs.setdefault("threshold_tokens", 4000)
    return BaselineScene("static_length", composition, **knobs)


def test_the_border_decides_whatever_the_queues() -> None:
    scene = scene_of()
    for i in range(4):
        assert scene.worker(f"long-{i}", 4000) == "p/0x2"
    for i in range(8):
        assert scene.worker(f"short-{i}", 3999) in ("p/2x1", "p/3x1")


def test_it_is_the_input_that_is_long_cached_or_not() -> None:
    scene = scene_of()
    scene.store(2, chain(1, 99))
    assert scene.worker("a", 10_000, blocks=chain(1, 100)) == "p/0x2"


def test_the_large_workers_are_those_of_the_highest_degree() -> None:
    scene = scene_of("1x4,1x2,2x1")
    assert scene.worker("long", 4000) == "p/0x4"
    assert "x4" not in scene.worker("short", 100)


def test_within_a_class_by_queue_and_service() -> None:
    # Rank 2 holds 8 of 10 blocks and has 1.0 s queued: 1.0 + β·0.2 against β·1.0.
    for beta, worker in ((1.0, "p/3x1"), (3.0, "p/2x1")):
        scene = scene_of(beta=beta)
        scene.store(2, chain(1, 8))
        scene.store(2, chain(2, 20))
        assert scene.worker("busy", 3000, blocks=chain(2, 30)) == "p/2x1"
        terms = scene.dispatched("a", 1000, blocks=chain(1, 10)).decision.chosen
        assert terms.worker == worker
        assert terms.total == pytest.approx(terms.queue_s + beta * terms.service_s)


def test_the_queue_ages_with_the_running_prefill() -> None:
    scene = scene_of()
    first = scene.worker("a", 3000)
    scene.start("a", first)
    other = scene.worker("b", 1000)
    assert other != first
    scene.wait(2.5)  # 0.5 s are left at the first, 1.0 s at the other, which did not start
    assert scene.worker("c", 1000) == first


def test_one_class_alone_takes_everything() -> None:
    scene = scene_of("4x1")
    assert {scene.worker(str(i), 9000) for i in range(4)} == {f"p/{i}x1" for i in range(4)}
    assert scene.worker("short", 10)
    lost = scene_of("1x2,2x1")
    lost.lose(0)
    assert lost.worker("long", 9000) in ("p/2x1", "p/3x1")


def test_reported_times_correct_the_queue() -> None:
    scene = scene_of(profile=with_overhead(0.0))
    worker = scene.worker("a", 2000)
    scene.start("a", worker)
    scene.first_token("a", worker, cached_tokens=0, compute_s=4.0)
    assert scene.dispatched("b", 2000).decision.chosen.service_s > 2.0
