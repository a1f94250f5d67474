"""Steps of one worker: what is in them, how long they take, what they leave in the caches."""

from dataclasses import replace
from random import Random

import pytest
from vertumnus_router.core.events import BlocksRemoved, BlocksStored, Event
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.types import BlockHash, PoolId, Rank, Request, RequestId, WorkerId
from vertumnus_router.lattice import Block
from vertumnus_sim.cache import RankCache
from vertumnus_sim.jobs import Job
from vertumnus_sim.scenario import Hardware
from vertumnus_sim.worker import Step, StepTime, Worker

from tests.simulator.scene import BLOCK_TOKENS, HARDWARE, PROFILE

QUIET = replace(HARDWARE, noise=0.0)
POOL = PoolId("p")


class Bench:
    """One worker on ranks 0 to ``degree`` − 1, and all that it told."""

    def __init__(self, degree: int = 1, hardware: Hardware = QUIET) -> None:
        self.caches = {rank: RankCache(hardware.kv_blocks) for rank in range(4)}
        self.told: list[Event] = []
        self.source = Random(0)
        self.worker = self.formed(Block(0, degree), hardware)
        self._count = 0

    def formed(self, block: Block, hardware: Hardware = QUIET) -> Worker:
        return Worker(
            POOL,
            block,
            self.caches,
            StepTime(PROFILE, block.degree),
            hardware,
            BLOCK_TOKENS,
            self.source,
            self.told.append,
        )

    def add(self, blocks: tuple[int, ...], tokens: int | None = None, home: int = 0) -> Job:
        self._count += 1
        if tokens is None:
            tokens = len(blocks) * BLOCK_TOKENS
        request = Request(
            RequestId(str(self._count)), tokens, 1, tuple(BlockHash(block) for block in blocks)
        )
        job = Job(request, home, WorkerId("w"), 1, self._count)
        self.worker.queue.append(job)
        return job

    def start(self) -> Step:
        step = self.worker.start()
        assert step is not None
        return step

    def serve(self, blocks: tuple[int, ...], tokens: int | None = None, home: int = 0) -> Job:
        """Add, compute and forget."""
        job = self.add(blocks, tokens, home)
        while job.left:
            self.start()
            self.worker.finish()
        self.worker.forget(job, list(job.filled))
        return job


def parts(step: Step) -> list[tuple[Job, int]]:
    return step.parts


def run(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def seconds(degree: int, *shapes: tuple[int, int]) -> float:
    """The formula of the paper by hand, d_C once."""
    d_s = {1: 0.01, 2: 0.02, 4: 0.03}[degree]
    a_s = {1: 1e-5, 2: 2e-5, 4: 2e-5}[degree]
    total = d_s
    for uncached, before in shapes:
        pairs = uncached * before + uncached * (uncached + 1) / 2
        total += a_s * uncached + 1e-6 * before + (9e-5 * uncached + 1e-9 * pairs) / degree
    return total


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_step_takes_what_the_profile_says_and_the_router_expects(degree: int) -> None:
    found = StepTime(PROFILE, degree).seconds([(700, 300)])
    assert found == pytest.approx(seconds(degree, (700, 300)), rel=1e-12)
    assert found == pytest.approx(PrefillModel(PROFILE).service_s(degree, 700, 300), rel=1e-12)
    both = StepTime(PROFILE, degree).seconds([(700, 300), (50, 0)])
    assert both == pytest.approx(seconds(degree, (700, 300), (50, 0)), rel=1e-12)


def test_first_come_first_served_in_batches_of_a_chunk() -> None:
    bench = Bench()  # chunks of 1000 tokens
    jobs = [bench.add(run(100 * n, 4)) for n in range(4)]
    step = bench.start()
    assert parts(step) == [(jobs[0], 400), (jobs[1], 400), (jobs[2], 200)]
    assert step.begun == jobs[:3]
    assert step.seconds == pytest.approx(seconds(1, (400, 0), (400, 0), (200, 0)), rel=1e-12)
    assert bench.worker.finish() == jobs[:2]
    step = bench.start()
    assert parts(step) == [(jobs[2], 200), (jobs[3], 400)] and step.begun == [jobs[3]]
    assert step.seconds == pytest.approx(seconds(1, (200, 200), (400, 0)), rel=1e-12)
    assert bench.worker.finish() == jobs[2:] and not bench.worker.queue
    assert bench.worker.start() is None
    assert jobs[2].compute_s == pytest.approx(
        seconds(1, (400, 0), (400, 0), (200, 0)) + seconds(1, (200, 200), (400, 0))
    )


def test_a_long_prompt_is_computed_in_chunks_and_stored_as_it_goes() -> None:
    bench = Bench()
    job = bench.add(run(0, 25), 2_550)
    for tokens, before, stored in ((1_000, 0, 10), (1_000, 1_000, 20), (550, 2_000, 25)):
        step = bench.start()
        assert parts(step) == [(job, tokens)]
        assert step.seconds == pytest.approx(seconds(1, (tokens, before)), rel=1e-12)
        assert bench.worker.finish() == ([job] if tokens == 550 else [])
        assert len(bench.caches[0]) == stored
        assert bench.told[-1] == BlocksStored(
            Rank(POOL, 0),
            BlockHash(before // 100 - 1) if before else None,
            tuple(map(BlockHash, run(before // 100, stored - before // 100))),
        )
    assert bench.caches[0].reserved == 1  # the last, half a block


def test_a_cached_prefix_is_skipped_but_for_the_last_token() -> None:
    bench = Bench()
    assert bench.serve(run(0, 5), 550).cached == 0
    longer = bench.add((*run(0, 5), 90, 91))
    step = bench.start()
    assert (longer.cached, parts(step)) == (500, [(longer, 200)])
    assert step.seconds == pytest.approx(seconds(1, (200, 500)), rel=1e-12)
    bench.worker.finish()
    whole = bench.add(run(0, 5), 500)  # all of it is cached, yet a token must be computed
    assert parts(bench.start()) == [(whole, 100)] and whole.cached == 400
    bench.worker.finish()
    assert len(bench.caches[0]) == 7


def test_every_rank_of_the_block_holds_all_and_the_home_keeps_it() -> None:
    bench = Bench(degree=2, hardware=replace(QUIET, kv_blocks=12))
    bench.serve(run(0, 5), home=1)
    bench.serve(run(50, 5), home=0)
    assert [len(bench.caches[rank]) for rank in range(4)] == [10, 10, 0, 0]
    assert [bench.caches[rank].held(tuple(map(BlockHash, run(0, 5)))) for rank in (0, 1)] == [5, 5]
    bench.told.clear()
    bench.serve(run(90, 6), home=0)  # four have to go
    gone = {
        event.rank.index: event.blocks for event in bench.told if isinstance(event, BlocksRemoved)
    }
    assert gone == {0: (4, 3, 2, 1), 1: (54, 53, 52, 51)}  # each the other's


def test_without_keep_one_the_least_recently_used_goes_at_every_rank() -> None:
    hardware = replace(QUIET, kv_blocks=12, keep_one=False)
    bench = Bench(degree=2, hardware=hardware)
    bench.serve(run(0, 5), home=1)
    bench.serve(run(50, 5), home=0)
    bench.told.clear()
    bench.serve(run(90, 6), home=0)
    gone = [event for event in bench.told if isinstance(event, BlocksRemoved)]
    oldest = tuple(map(BlockHash, (4, 3, 2, 1)))
    assert gone == [BlocksRemoved(Rank(POOL, rank), oldest) for rank in (0, 1)]


def test_what_only_some_ranks_hold_is_copied_first() -> None:
    bench = Bench()
    bench.serve(run(0, 6))
    bench.worker = bench.formed(Block(0, 2))
    job = bench.add((*run(0, 6), 90, 91))
    step = bench.start()
    assert step.lacking == 600 and job.cached == 600
    copied_s = QUIET.copy_latency_s + 600 * QUIET.kv_token_bytes / QUIET.local_bytes_per_s
    assert step.seconds == pytest.approx(seconds(2, (200, 600)) + copied_s, rel=1e-12)
    bench.worker.finish()
    stored = {e.rank.index: e for e in bench.told[1:] if isinstance(e, BlocksStored)}
    assert stored[0].blocks == (90, 91) and stored[0].parent == 5
    assert stored[1].blocks == (*run(0, 6), 90, 91) and stored[1].parent is None


def test_the_head_of_the_line_waits_for_memory_and_holds_up_the_others() -> None:
    bench = Bench(hardware=replace(QUIET, kv_blocks=10))
    first, second, third = bench.add(run(0, 6)), bench.add(run(50, 5)), bench.add(run(90, 1))
    assert parts(bench.start()) == [(first, 600)]
    assert bench.worker.finish() == [first]
    assert bench.worker.start() is None  # 6 of 10 blocks are pinned
    assert not second.begun and not third.begun
    bench.worker.forget(first, [0])
    assert parts(bench.start()) == [(second, 500), (third, 100)]
    assert bench.told[1] == BlocksRemoved(Rank(POOL, 0), (BlockHash(5),))
    bench.worker.finish()


def test_noise_multiplies_times_and_is_one_on_average() -> None:
    bench = Bench(hardware=replace(QUIET, noise=0.3, kv_blocks=10_000))
    found = []
    for number in range(3_000):
        bench.add((number,))
        found.append(bench.start().seconds / seconds(1, (100, 0)))
        bench.worker.finish()
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.02)
    assert 0.25 < (sum(f * f for f in found) / len(found) - 1) ** 0.5 < 0.36


def test_what_is_suspended_leaves_its_kv_and_goes_on_elsewhere() -> None:
    bench = Bench(degree=2)
    running, waiting = bench.add(run(0, 15), home=1), bench.add(run(50, 2))
    bench.start()
    bench.worker.finish()
    assert running.done == 1_000
    assert bench.worker.suspend() == [running, waiting]
    assert not any(cache.pinned or cache.reserved for cache in bench.caches.values())
    bench.worker = bench.formed(Block(1, 1))
    bench.worker.queue.append(running)
    step = bench.start()
    assert parts(step) == [(running, 500)] and step.lacking == 0
    assert running.cached == 0 and step.seconds == pytest.approx(seconds(1, (500, 1_000)))


def test_a_suspended_prefill_keeps_the_tokens_behind_its_last_whole_block() -> None:
    bench = Bench(hardware=replace(QUIET, chunk_tokens=350))
    job = bench.add(run(0, 6))
    bench.start()
    bench.worker.finish()
    bench.worker.suspend()
    bench.worker.queue.append(job)
    assert parts(bench.start()) == [(job, 250)] and job.done == 350


def test_a_suspended_prefill_begins_again_where_its_kv_is_lost() -> None:
    bench = Bench(hardware=replace(QUIET, kv_blocks=10))
    job = bench.add(run(0, 9), 1_000)
    bench.worker._hardware = replace(QUIET, chunk_tokens=450)
    bench.start()
    bench.worker.finish()
    assert bench.worker.suspend() == [job] and job.done == 450
    bench.serve(run(50, 8))  # two of its four blocks go
    bench.worker.queue.append(job)
    bench.start()
    assert job.done == 200 and job.cached == 0
