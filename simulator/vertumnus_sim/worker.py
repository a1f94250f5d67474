"""A simulated worker: the ranks of one block, which compute prefills in step.

First come, first served: a step takes what is at the head of the queue, whole prompts and the
chunk of one, up to ``chunk_tokens`` uncached tokens. Its time is the profile's for the sum of its
parts, ``d_C`` once. Each rank of the block that has a cache ends up with all KV of it: all of them
or, where KV is partitioned, the leader for all.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from vertumnus_router.core.events import BlocksRemoved, BlocksStored, Event
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.lattice import Block

from vertumnus_sim.cache import RankCache
from vertumnus_sim.jobs import Job
from vertumnus_sim.scenario import Hardware


class StepTime:
    """Seconds of a step at each degree, before noise: the profile's, for several prefills."""

    def __init__(self, profile: Profile, degree: int) -> None:
        at = profile.coefficients(degree)
        self._once_s = at.d_s
        self._uncached_s = at.a_s_per_token + profile.c_s_per_token / degree
        self._cached_s = profile.b_s_per_token
        self._pair_s = profile.alpha_s_per_pair / degree

    def seconds(self, parts: list[tuple[int, int]]) -> float:
        """Of (uncached tokens, tokens before them) each."""
        total_s = self._once_s
        for uncached, before in parts:
            pairs = uncached * (before + (uncached + 1) / 2)
            total_s += self._uncached_s * uncached + self._cached_s * before + self._pair_s * pairs
        return total_s


@dataclass(slots=True)
class Step:
    """What one step computes: tokens of each job; ``lacking`` tokens of KV that some ranks of the
    block copy from others first."""

    parts: list[tuple[Job, int]]
    begun: list[Job]
    seconds: float
    lacking: int


class Worker:
    """Holds the queue of its block. The caches are its ranks' own, and outlive it."""

    def __init__(
        self,
        pool: PoolId,
        block: Block,
        caches: dict[int, RankCache],
        step_time: StepTime,
        hardware: Hardware,
        block_tokens: int,
        source: Random,
        tell: Callable[[Event], None],
    ) -> None:
        self.block = block
        self.queue: deque[Job] = deque()
        self.step: Step | None = None
        #: whether it begins no further step
        self.draining = False
        self._caches = {rank: caches[rank] for rank in block.ranks if rank in caches}
        self._names = {rank: Rank(pool, rank) for rank in block.ranks}
        self._step_time = step_time
        self._hardware = hardware
        self._block_tokens = block_tokens
        self._source = source
        self._tell = tell

    def start(self) -> Step | None:
        """Begin the next step; None if there is nothing to do, or no memory for it yet."""
        parts: list[tuple[Job, int]] = []
        shapes: list[tuple[int, int]] = []
        begun: list[Job] = []
        budget, lacking = self._hardware.chunk_tokens, 0
        for job in self.queue:
            if budget <= 0:
                break
            if not job.begun:
                missing = self._begin(job)
                if missing is None:
                    break
                lacking += missing
                begun.append(job)
            tokens = min(job.left, budget)
            budget -= tokens
            parts.append((job, tokens))
            shapes.append((tokens, job.done))
        if not parts:
            return None
        noise = self._hardware.noise
        factor = math.exp(noise * self._source.gauss() - noise * noise / 2) if noise else 1.0
        seconds = self._step_time.seconds(shapes) * factor
        if lacking:
            size = lacking * self._hardware.kv_token_bytes
            seconds += self._hardware.copy_latency_s + size / self._hardware.local_bytes_per_s
        self.step = Step(parts, begun, seconds, lacking)
        return self.step

    def finish(self) -> list[Job]:
        """End the step; the jobs whose prefill is complete, which have left the queue."""
        step, self.step = self.step, None
        assert step is not None
        complete: list[Job] = []
        for job, tokens in step.parts:
            job.compute_s += step.seconds
            job.done += tokens
            self._store(job)
            if not job.left:
                complete.append(job)
                self.queue.remove(job)
        return complete

    def _begin(self, job: Job) -> int | None:
        """Pin what is cached of the prompt and reserve the rest, at every rank; the tokens that
        the rank with the least copies from others. None if it does not fit now."""
        blocks, size = job.request.blocks, self._block_tokens
        usable = min(len(blocks), (job.request.input_tokens - 1) // size)
        held = {rank: min(cache.held(blocks), usable) for rank, cache in self._caches.items()}
        needed = -(-job.request.input_tokens // size)
        for rank, cache in self._caches.items():
            pinned_anew = cache.unpinned(blocks[: held[rank]])
            if not cache.fits(pinned_anew + needed - held[rank]):
                return None
        longest = max(held.values())
        # A prefill that goes on in another worker has computed into the block behind.
        job.done = (
            job.done if longest == job.done // size and job.cached is not None else (longest * size)
        )
        if job.cached is None:
            job.cached = job.done
        for rank, cache in self._caches.items():
            cache.pin(blocks[: held[rank]], keep=self._keeps(rank, job))
            job.filled[rank], job.spare[rank] = held[rank], needed - held[rank]
            if gone := cache.reserve(needed - held[rank]):
                self._tell(BlocksRemoved(self._names[rank], tuple(gone)))
        job.begun = True
        return (longest - min(held.values())) * size

    def _keeps(self, rank: int, job: Job) -> bool:
        """Whether what the rank has of the prompt is more than surplus."""
        return rank == job.home or not self._hardware.keep_one

    def _store(self, job: Job) -> None:
        """What is computed by now is cached, at every rank."""
        blocks = job.request.blocks
        whole = min(job.done // self._block_tokens, len(blocks))
        for rank, cache in self._caches.items():
            filled = job.filled[rank]
            new = blocks[filled:whole]
            if not new:
                continue
            parent = blocks[filled - 1] if filled else None
            cache.fill(parent, new, keep=self._keeps(rank, job))
            job.filled[rank], job.spare[rank] = whole, job.spare[rank] - len(new)
            self._tell(BlocksStored(self._names[rank], parent, new))

    def forget(self, job: Job, ranks: list[int]) -> None:
        """The ranks have no more to do with the job; what they hold of it stays cached."""
        for rank in ranks:
            cache = self._caches[rank]
            cache.unpin(job.request.blocks[: job.filled.pop(rank)])
            cache.unreserve(job.spare.pop(rank))

    def suspend(self) -> list[Job]:
        """All jobs, those that have begun first, as they go on in another worker."""
        for job in self.queue:
            if job.begun:
                self.forget(job, list(job.filled))
                job.begun = False
        jobs = list(self.queue)
        self.queue.clear()
        return jobs
