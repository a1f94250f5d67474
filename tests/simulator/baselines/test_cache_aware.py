"""SGLang's rule: the longest match if the load is balanced, the shortest queue if it is not."""

from vertumnus_router.core.types import BlockHash
from vertumnus_router.lattice import Block
from vertumnus_sim.baselines.request_tree import RequestTree

from tests.router.core.scene import chain, reported
from tests.simulator.baselines.baseline_scene import BaselineScene


def scene_of(composition: str = "2x1", **knobs: object) -> BaselineScene:
    return BaselineScene("cache_aware", composition, **knobs)


def test_a_prompt_follows_the_one_whose_prefix_it_has() -> None:
    scene = scene_of("4x1")
    first = scene.worker("a", 1000, blocks=chain(1, 10))
    assert scene.worker("other", 1000, blocks=chain(2, 10)) != first
    # No event has told of any cache: what was sent is what counts.
    assert scene.worker("b", 1200, blocks=(*chain(1, 10), *chain(3, 2))) == first


def test_what_the_workers_hold_is_not_known() -> None:
    scene = scene_of("2x1")
    scene.worker("a", 1000)
    scene.store(0, chain(1, 10))
    assert scene.worker("b", 1000, blocks=chain(1, 10)) == "p/1x1"  # the idle one
    # The decision says what it will find nevertheless.
    scene.store(1, chain(1, 4))
    assert scene.dispatched("c", 1000, blocks=chain(1, 10)).decision.chosen.cached_tokens == 400


def test_a_match_counts_above_the_threshold_only() -> None:
    # The match is 500 of 1000 tokens.
    for threshold, follows in ((0.49, True), (0.5, False)):
        scene = scene_of("2x1", cache_threshold=threshold)
        first = scene.worker("a", 500, blocks=chain(1, 5))
        second = scene.worker("b", 1000, blocks=(*chain(1, 5), *chain(2, 5)))
        assert (second == first) == follows


def test_out_of_balance_it_takes_the_shortest_queue() -> None:
    # 3 at one worker: 3 - 0 > 2, and 3 > 1.5 · 0.
    scene = scene_of("2x1", balance_abs_threshold=2)
    taken = [scene.worker(str(i), 1000, blocks=chain(1, 10)) for i in range(4)]
    assert len(set(taken[:3])) == 1
    assert taken[3] != taken[0]


def test_both_thresholds_must_be_exceeded() -> None:
    # 4 against 2: more than 1 apart, but no more than 2.5 times.
    scene = scene_of("2x1", balance_abs_threshold=1, balance_rel_threshold=2.5)
    first = scene.worker("a-0", 1000, blocks=chain(1, 10))
    other = scene.worker("b-0", 1000, blocks=chain(2, 10))
    assert other != first
    scene.worker("b-1", 1000, blocks=chain(2, 10))
    for i in (1, 2, 3):
        assert scene.worker(f"a-{i}", 1000, blocks=chain(1, 10)) == first
    assert scene.worker("a-4", 1000, blocks=chain(1, 10)) == first
    # 6 against 2 is both.
    scene.worker("a-5", 1000, blocks=chain(1, 10))
    assert scene.worker("a-6", 1000, blocks=chain(1, 10)) == other


def test_load_is_requests_that_have_not_ended() -> None:
    scene = scene_of("2x1", balance_abs_threshold=1)
    first = scene.worker("a", 1000, blocks=chain(1, 10))
    assert scene.worker("b", 1000, blocks=chain(1, 10)) == first
    scene.serve("a", first)
    assert scene.worker("c", 1000, blocks=chain(1, 10)) == first
    assert scene.worker("d", 1000, blocks=chain(1, 10)) != first


def test_the_shortest_queue_is_remembered_as_a_holder() -> None:
    scene = scene_of("2x1", balance_abs_threshold=1)
    first = scene.worker("a", 1000, blocks=chain(1, 10))
    scene.worker("b", 1000, blocks=chain(1, 10))
    other = scene.worker("c", 1000, blocks=chain(1, 10))
    assert other != first
    scene.serve("c", other)
    scene.serve("a", first)  # 1 against 0, in balance: both match, the idle one is taken
    assert scene.worker("d", 1000, blocks=chain(1, 10)) == other


def test_the_fallback_may_be_the_smallest_tree() -> None:
    for fallback, expected in (("min_load", "same"), ("smallest_tree", "other")):
        scene = scene_of("2x1", fallback=fallback)
        first = scene.worker("large", 9000, blocks=chain(1, 90))
        scene.serve("large", first)
        other = scene.worker("small", 100, blocks=chain(2, 1))
        assert other != first
        # Now one request at the worker with one block, none at the one with ninety.
        third = scene.worker("new", 1000, blocks=chain(3, 10))
        assert third == (first if expected == "same" else other)


def test_old_prompts_are_evicted_in_time() -> None:
    for waited_s, remembered in ((9.0, True), (10.0, False)):
        scene = scene_of("2x1", eviction_interval_s=10, max_tree_tokens=1000)
        first = scene.worker("a", 1000, blocks=chain(1, 10))
        scene.serve("a", first)
        scene.worker("b", 1000, blocks=chain(2, 10))
        assert scene.worker("c", 1000, blocks=chain(3, 10)) == first  # the idle one
        scene.serve("c", first)
        scene.worker("d", 100, blocks=chain(4, 1))
        scene.wait(waited_s)
        # Two requests at the worker that had it, one at the other: a match or the shortest queue.
        scene.worker("e", 1000, blocks=chain(3, 10))
        assert (scene.worker("f", 1000, blocks=chain(1, 10)) == first) == remembered


def test_a_worker_that_left_is_forgotten() -> None:
    scene = scene_of("2x1")
    first = scene.worker("a", 1000, blocks=chain(1, 10))
    scene.serve("a", first)
    rank = int(first[2])
    scene.lose(rank)
    scene.feed(reported(rank, Block(rank, 1), life="life-2"))
    (other,) = {"p/0x1", "p/1x1"} - {first}
    scene.worker("b", 500, blocks=chain(2, 5))
    scene.worker("c", 500, blocks=chain(3, 5))  # one each
    scene.serve("b" if scene.control._table.get("b").candidate.id == other else "c", other)
    assert scene.worker("d", 1000, blocks=chain(1, 10)) == other


# -- the tree -----------------------------------------------------------------------------------


def test_the_tree_evicts_the_least_recently_sent_ends() -> None:
    tree = RequestTree()
    shared = chain(1, 4)
    tree.insert((*shared, *chain(2, 4)))
    tree.insert((*shared, *chain(3, 4)))
    tree.insert((*shared, *chain(2, 4)))  # sent again
    assert len(tree) == 12
    tree.evict(10)
    assert len(tree) == 10
    assert tree.match((*shared, *chain(3, 4))) == 6
    assert tree.match((*shared, *chain(2, 4))) == 8
    tree.evict(8)
    assert tree.match((*shared, *chain(3, 4))) == 4
    assert tree.match((*shared, *chain(2, 4))) == 8
    tree.evict(0)
    assert len(tree) == 0


def test_the_tree_agrees_with_a_naive_one() -> None:
    import random

    rng = random.Random(3)
    tree = RequestTree()
    paths: set[tuple[BlockHash, ...]] = set()

    def prompt() -> tuple[BlockHash, ...]:
        # A hash names its whole prefix.
        words, blocks = [rng.randrange(2) for _ in range(rng.randrange(0, 8))], []
        for depth in range(len(words)):
            blocks.append(BlockHash(hash((7, *words[: depth + 1]))))
        return tuple(blocks)

    for _ in range(500):
        blocks = prompt()
        if rng.random() < 0.1:
            size = rng.randrange(len(tree) + 1)
            tree.evict(size)
            assert len(tree) <= size
            paths = {path for path in paths if tree.match(path) == len(path)}
            assert len(paths) == len(tree), "a block is counted that no prompt reaches"
        tree.insert(blocks)
        paths |= {blocks[:depth] for depth in range(1, len(blocks) + 1)}
        asked = prompt()
        expected = max((d for d in range(len(asked) + 1) if asked[:d] in paths), default=0)
        assert tree.match(asked) == expected
        assert len(tree) == len(paths)
