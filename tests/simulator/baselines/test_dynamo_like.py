"""Dynamo's rule: blocks to compute and active blocks, by hand."""

from collections import Counter
from dataclasses import replace

import pytest
from vertumnus_router.core.types import RequestId, WorkerId
from vertumnus_sim.baselines.active_blocks import ActiveBlocks

from tests.router.core.scene import chain, request
from tests.simulator.baselines.baseline_scene import BaselineScene


def scene_of(composition: str = "2x1", **knobs: object) -> BaselineScene:
    return BaselineScene("dynamo_like", composition, **knobs)


def test_it_goes_where_the_prefix_is_cached() -> None:
    scene = scene_of("4x1")
    scene.store(2, chain(1, 8))
    for i in range(5):
        worker = scene.worker(str(i), 1000, blocks=chain(1, 10))
        assert worker == "p/2x1"
        scene.serve(str(i), worker)


def test_load_outweighs_the_overlap() -> None:
    # 6 blocks of 10 are cached at rank 0, where 8 blocks are being computed and are active:
    # (4 + 8) + (10 + 8) = 30 against 10 + 10 = 20 at rank 1.
    scene = scene_of("2x1")
    scene.store(0, chain(1, 6))
    scene.store(0, chain(2, 12))
    assert scene.worker("busy", 2000, blocks=chain(2, 20)) == "p/0x1"
    assert scene.worker("a", 1000, blocks=chain(1, 10)) == "p/1x1"


def test_prefills_that_have_not_ended_count() -> None:
    # 3 blocks are being computed at rank 0 and 4 are active: (3 + 4) + (4 + 10) = 21 against
    # 10 + 10 = 20; after the first token 4 + (4 + 10) = 18.
    scene = scene_of("2x1")
    scene.store(0, chain(1, 6))
    scene.store(0, chain(2, 1))
    assert scene.worker("busy", 400, blocks=chain(2, 4)) == "p/0x1"
    assert scene.worker("a", 1000, blocks=chain(1, 10)) == "p/1x1"
    scene.serve("a", "p/1x1")
    scene.first_token("busy", "p/0x1")
    assert scene.worker("b", 1000, blocks=chain(1, 10)) == "p/0x1"


def test_active_blocks_count_after_the_prefill() -> None:
    # Past its prefill the long request weighs 20: 2 + 8 + 20 = 30 against 10 + 8 = 18.
    scene = scene_of("2x1")
    scene.store(0, chain(1, 6))
    scene.store(0, chain(2, 20))
    assert scene.worker("busy", 2000, blocks=chain(2, 20)) == "p/0x1"
    scene.first_token("busy", "p/0x1")
    assert scene.worker("a", 800, blocks=chain(1, 8)) == "p/1x1"
    scene.finish("busy")
    assert scene.worker("b", 800, blocks=chain(1, 8)) == "p/0x1"


def test_the_weight_favours_the_overlap() -> None:
    # Without overlap 10·w + 10, with it 4·w + 10 + 20.
    for weight, worker in ((3.0, "p/1x1"), (4.0, "p/0x1")):
        scene = scene_of("2x1", overlap_score_weight=weight)
        scene.store(0, chain(1, 6))
        scene.store(0, chain(2, 20))
        assert scene.worker("busy", 2000, blocks=chain(2, 20)) == "p/0x1"
        scene.first_token("busy", "p/0x1")
        assert scene.worker("a", 1000, blocks=chain(1, 10)) == worker


def test_a_temperature_draws_by_cost() -> None:
    counts = {}
    for temperature in (0.0, 0.3, 100.0):
        scene = scene_of("2x1", temperature=temperature)
        scene.store(0, chain(1, 10))
        taken = Counter[str]()
        for i in range(300):
            worker = scene.worker(str(i), 1000, blocks=chain(1, 10))
            taken[worker] += 1
            scene.serve(str(i), worker)
        counts[temperature] = taken["p/0x1"]
    assert counts[0.0] == 300
    assert 260 < counts[0.3] < 300  # 1 / (1 + exp(-1 / 0.3)) = 0.966
    assert 110 < counts[100.0] < 190


def test_a_prefill_pool_has_no_active_blocks() -> None:
    scene = scene_of("2x1")
    rule, question = scene.control.rule, _Question()
    rule._active.add(RequestId("x"), WorkerId("w"), chain(2, 20))
    assert rule.cost(question, _worker(prefill_only=False)) == pytest.approx(10 + 10 + 20)
    assert rule.cost(question, _worker(prefill_only=True)) == pytest.approx(10)


class _Question:
    request = request("a", 1000, blocks=chain(1, 10))

    def waiting_tokens(self, worker: object) -> int:
        return 0

    def uncached_tokens(self, worker: object) -> int:
        return 1000


def _worker(prefill_only: bool) -> object:
    scene = BaselineScene("round_robin", "2x1")
    worker = scene.control._membership.serving[0]
    return replace(worker, id=WorkerId("w"), pool=replace(worker.pool, prefill_only=prefill_only))


def test_shared_blocks_are_active_once() -> None:
    active, worker = ActiveBlocks(), WorkerId("w")
    active.add(RequestId("a"), worker, chain(1, 10))
    assert active.with_request(worker, (*chain(1, 6), *chain(2, 3))) == 13
    active.add(RequestId("b"), worker, (*chain(1, 6), *chain(2, 3)))
    assert active.with_request(worker, ()) == 13
    active.free(RequestId("a"))
    assert active.with_request(worker, ()) == 9
    active.free(RequestId("a"))  # told twice
    assert active.with_request(worker, chain(1, 10)) == 9 + 4
    active.free(RequestId("b"))
    assert (active.with_request(worker, ()), len(active)) == (0, 0)


def test_a_prompt_without_a_whole_block_may_end_last() -> None:
    active, worker = ActiveBlocks(), WorkerId("w")
    active.add(RequestId("short"), worker, ())
    active.add(RequestId("long"), worker, chain(1, 2))
    active.free(RequestId("long"))
    active.free(RequestId("short"))
    assert len(active) == active.with_request(worker, ()) == 0
