"""A simulated prefill pool: one node's ranks, the workers that they make up, and its moves."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from vertumnus_router.core.effects import Copy, Dispatch, Reclaim, Regroup
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    CopyEnded,
    Event,
    Failure,
    MoveOutcome,
    PoolJoined,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    RankReported,
    ReclaimEnded,
    RegroupEnded,
    RequestFailed,
    RequestFinished,
    TransferOutcome,
)
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.types import PoolId, Rank, Request, RequestId
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import Stages

from vertumnus_sim.cache import RankCache
from vertumnus_sim.jobs import Job
from vertumnus_sim.network import Link, Network
from vertumnus_sim.scenario import Cluster, Hardware
from vertumnus_sim.timeline import Timeline
from vertumnus_sim.worker import Step, StepTime, Worker

MANIFEST = "simulated"


class Observer(Protocol):
    """Who is told what happens in the pools, as it happens."""

    def stepped(self, degree: int, seconds: float) -> None:
        """A worker was busy for so long."""

    def first_token(self, job: Job, degree: int) -> None:
        """The client has it."""


@dataclass(slots=True)
class _Moving:
    order: Regroup
    began_s: float
    stands_s: float | None = None


class _Links:
    """What a rank sends and receives through, within its node and beyond."""

    def __init__(self, hardware: Hardware, ranks: int = 1) -> None:
        """Of several ranks that each carry the same part of all that goes over them."""
        local_bytes_per_s = ranks * hardware.local_bytes_per_s
        remote_bytes_per_s = ranks * hardware.remote_bytes_per_s
        self.local_out, self.local_in = Link(local_bytes_per_s), Link(local_bytes_per_s)
        self.remote_out, self.remote_in = Link(remote_bytes_per_s), Link(remote_bytes_per_s)


class Pool:
    """Carries out what the router wants of this node, and tells it what came of it."""

    def __init__(
        self,
        number: int,
        cluster: Cluster,
        block_tokens: int,
        profile: Profile,
        seed: int,
        timeline: Timeline,
        network: Network,
        tell: Callable[[Event], None],
        observer: Observer,
    ) -> None:
        self.id = PoolId(f"node-{number}")
        self._cluster = cluster
        self._hardware, self._delays = cluster.hardware, cluster.delays
        self._block_tokens = block_tokens
        self._timeline, self._network = timeline, network
        self._tell, self._observer = tell, observer
        self._step_times = {degree: StepTime(profile, degree) for degree in cluster.degrees}
        self._source = Random(f"{seed} {self.id}")
        self._epoch = 0
        self._dead: set[int] = set()
        self._moving: _Moving | None = None
        self._count = 0
        self._handing_over: dict[RequestId, Job] = {}
        hardware = self._hardware
        # By the rank that has the KV, for how many: of partitioned KV the leader, for its worker.
        sharing = dict.fromkeys(range(cluster.node_gpus), 1)
        if hardware.kv_partitioned:
            sharing = {block.leader: block.degree for block in cluster.compositions[number]}
        self.caches = {r: RankCache(hardware.kv_blocks * n) for r, n in sharing.items()}
        self.links = {r: _Links(hardware, n) for r, n in sharing.items()}
        self._workers: dict[int, Worker] = {}  # by rank
        for block in cluster.compositions[number]:
            self._form(block)

    # -- what the router is told of it ------------------------------------------------------------

    def describe(self) -> PoolJoined:
        hardware, cluster = self._hardware, self._cluster
        # The router knows one number for all workers of a pool: that of the smallest.
        tokens = min(cache.capacity for cache in self.caches.values()) * self._block_tokens
        return PoolJoined(
            pool=self.id,
            size=cluster.node_gpus,
            degrees=cluster.degrees,
            block_tokens=self._block_tokens,
            context_tokens=tokens,
            kv_capacity_tokens=tokens,
            chunk_tokens=hardware.chunk_tokens,
            manifest=MANIFEST,
            prefill_only=True,
            kv_token_bytes=hardware.kv_token_bytes,
        )

    def report(self) -> None:
        """Every living rank says what it serves in."""
        for rank, worker in self._workers.items():
            if rank not in self._dead:
                name = Rank(self.id, rank)
                self._tell(RankReported(name, "1", self._epoch, worker.block, MANIFEST))

    # -- prefills -----------------------------------------------------------------------------

    def submit(self, order: Dispatch, request: Request) -> None:
        """A request reaches the pool, and goes to whatever block contains its home."""
        worker = self._workers[order.home.index]
        self._count += 1
        home = self._holder(order.home.index)
        job = Job(request, home, order.worker, order.attempt, self._count)
        if order.home.index in self._dead or self._is_dead(worker):
            self._fail(job)
            return
        worker.queue.append(job)
        self._go_on(worker)

    def _go_on(self, worker: Worker) -> None:
        if worker.step is not None or worker.draining or self._is_dead(worker):
            return
        step = worker.start()
        if step is None:
            return
        for job in step.begun:
            if job.began_s is None:
                job.began_s = self._timeline.now
                self._tell(PrefillStarted(job.request.id, job.worker, job.attempt))
        if self._hardware.contention:
            step.seconds *= 1 + self._hardware.contention * self._busy_beside(worker)
        self._timeline.after(step.seconds, self._stepped, worker, step)

    def _busy_beside(self, worker: Worker) -> float:
        """Which part of the node's other ranks compute."""
        busy = sum(
            other.block.degree
            for other in self._living()
            if other is not worker and other.step is not None
        )
        return busy / max(1, self._cluster.node_gpus - worker.block.degree)

    def _stepped(self, worker: Worker, step: Step) -> None:
        if worker.step is not step:
            return  # it has died
        degree = worker.block.degree
        self._observer.stepped(degree, step.seconds)
        parts = dict(step.parts)
        for job in worker.finish():
            self._tell(
                PrefillFinished(
                    job.request.id, job.worker, job.cached, job.compute_s, attempt=job.attempt
                )
            )
            # The home alone has to do with the request from here on.
            worker.forget(job, [rank for rank in job.filled if rank != job.home])
            self._hand_over(job, degree, parts[job])
        if worker.draining:
            self._stand()
        self._go_on(worker)

    def _hand_over(self, job: Job, degree: int, last_tokens: int) -> None:
        """What was computed before the last step, or cached, has been on its way meanwhile."""
        hardware = self._hardware
        assert job.began_s is not None
        self._handing_over[job.request.id] = job
        waited_s = self._timeline.now - job.began_s
        size = job.request.input_tokens * hardware.kv_token_bytes
        link = self.links[job.home].remote_out
        left = max(last_tokens * hardware.kv_token_bytes, size - waited_s * link.bytes_per_s)
        self._network.send(left, (link,), lambda: self._handed_over(job, degree))

    def _handed_over(self, job: Job, degree: int) -> None:
        if self._handing_over.get(job.request.id) is not job:
            return  # its home has died, and another attempt may be on its way
        del self._handing_over[job.request.id]
        cache = self.caches[job.home]
        cache.unpin(job.request.blocks[: job.filled.pop(job.home)])
        cache.unreserve(job.spare.pop(job.home))
        self._observer.first_token(job, degree)
        self._tell(RequestFinished(job.request.id))
        self._go_on(self._workers[job.home])

    # -- moves ----------------------------------------------------------------------------------

    def regroup(self, order: Regroup) -> None:
        """Move to another composition, as soon as the blocks that end stand at a step's end."""
        if self._hardware.kv_partitioned:
            reason = "workers that partition their KV are not regrouped in simulations"
            self._tell(RegroupEnded(order.plan, self.id, MoveOutcome.REFUSED, reason=reason))
            return
        leaving = [w for w in self._living() if w.block not in order.after]
        stale = order.epoch != self._epoch or self._moving is not None
        if stale or any(self._is_dead(worker) for worker in leaving):
            ended = RegroupEnded(order.plan, self.id, MoveOutcome.REFUSED, reason="not as it is")
            self._tell(ended)
            return
        self._moving = _Moving(order, self._timeline.now)
        for worker in leaving:
            worker.draining = True
        self._stand()

    def _stand(self) -> None:
        """Once no block that ends computes any more, they vote and switch."""
        moving = self._moving
        if moving is None or moving.stands_s is not None:
            return
        if any(worker.draining and worker.step is not None for worker in self._living()):
            return
        moving.stands_s = self._timeline.now
        delay_s = self._delays.vote_s + self._delays.switch_s
        self._timeline.after(delay_s, self._switch, moving)

    def _switch(self, moving: _Moving) -> None:
        if self._moving is not moving:
            return  # a rank has died meanwhile
        self._moving = None
        order, stands_s = moving.order, moving.stands_s
        assert stands_s is not None
        left = [worker for worker in self._living() if worker.draining]
        jobs = [job for worker in left for job in worker.suspend()]
        jobs.sort(key=lambda job: (job.began_s is None, job.sequence))
        self._epoch += 1
        for block in order.after:
            if block not in order.before:
                self._form(block)
        for job in jobs:
            self._workers[job.home].queue.append(job)
        self.report()
        stages = Stages(
            drain=(stands_s - moving.began_s) * 1000,
            vote=self._delays.vote_s * 1000,
            switch=self._delays.switch_s * 1000,
            publish=0.0,
        )
        self._tell(
            RegroupEnded(
                order.plan, self.id, MoveOutcome.COMMITTED, epoch=self._epoch, stages=stages
            )
        )
        for worker in self._living():
            self._go_on(worker)

    def _form(self, block: Block) -> None:
        worker = Worker(
            self.id,
            block,
            self.caches,
            self._step_times[block.degree],
            self._hardware,
            self._block_tokens,
            self._source,
            self._tell,
        )
        for rank in block.ranks:
            self._workers[rank] = worker

    def _holder(self, rank: int) -> int:
        """The rank whose cache has what the router says is at ``rank``."""
        return self._workers[rank].block.leader if self._hardware.kv_partitioned else rank

    def _living(self) -> list[Worker]:
        return list(dict.fromkeys(self._workers.values()))

    # -- deaths ---------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """A rank dies, and its block with it; the block's other ranks are ended."""
        worker = self._workers[rank]
        lost = list(worker.queue)
        lost += [job for job in self._handing_over.values() if job.home in worker.block]
        worker.step = None
        worker.queue.clear()
        self._dead |= set(worker.block.ranks)
        if self._moving is not None and worker.draining:
            order, self._moving = self._moving.order, None
            for other in self._living():
                other.draining = False
            reason = f"rank {rank} died"
            self._tell(RegroupEnded(order.plan, self.id, MoveOutcome.ABANDONED, reason=reason))
        for member in worker.block.ranks:
            self._tell(RankLost(Rank(self.id, member), f"rank {rank} died", "1"))
        for job in lost:
            self._handing_over.pop(job.request.id, None)
            self._fail(job)
        for other in self._living():
            self._go_on(other)

    def _is_dead(self, worker: Worker) -> bool:
        return worker.block.leader in self._dead

    def _fail(self, job: Job) -> None:
        cause = f"rank {job.home} died"
        self._tell(
            RequestFailed(
                job.request.id,
                Failure.WORKER_LOST,
                cause,
                worker=job.worker,
                attempt=job.attempt,
            )
        )

    # -- copies ---------------------------------------------------------------------------------

    def copy(self, order: Copy, source: "Pool") -> None:
        """Bring a rank of this pool what it lacks of a prefix, from a rank of ``source``."""
        blocks = order.blocks
        to = self._holder(order.destination.rank.index)
        at = order.source.rank.index
        destination = Rank(self.id, to)
        there, here = source.caches[at], self.caches[to]
        held = here.held(blocks)
        missing = len(blocks) - held
        began_s = self._timeline.now
        pinned_anew = here.unpinned(blocks[:held])
        fault = None
        if to in self._dead or at in source._dead:
            fault = "a rank died"
        elif there.held(blocks) < len(blocks):
            fault = "the source holds less by now"
        elif not here.fits(pinned_anew + missing):
            fault = "no memory for it"
        if fault is not None:
            self._tell(CopyEnded(order.transfer, TransferOutcome.REFUSED, reason=fault))
            return
        here.pin(blocks[:held], keep=False)
        gone = here.reserve(missing)
        if gone:
            self._tell(BlocksRemoved(destination, tuple(gone)))
        there.pin(blocks, keep=False)
        size = missing * self._block_tokens * self._hardware.kv_token_bytes

        def arrive() -> None:
            there.unpin(blocks)
            if to in self._dead or at in source._dead:
                here.unpin(blocks[:held])
                here.unreserve(missing)
                self._tell(CopyEnded(order.transfer, TransferOutcome.FAILED, reason="a rank died"))
                self._go_on(self._workers[to])
                source._go_on(source._workers[at])
                return
            parent = blocks[held - 1] if held else None
            here.fill(parent, blocks[held:], keep=not self._hardware.keep_one)
            here.unpin(blocks)
            if missing:
                self._tell(BlocksStored(destination, parent, blocks[held:]))
            seconds = self._timeline.now - began_s
            transfer_s = seconds - self._hardware.copy_latency_s
            self._tell(
                CopyEnded(
                    order.transfer,
                    TransferOutcome.DONE,
                    blocks=missing,
                    bytes=size,
                    seconds=seconds,
                    transfer_s=transfer_s,
                )
            )
            self._go_on(self._workers[to])
            source._go_on(source._workers[at])

        if source is self:
            links = (self.links[at].local_out, self.links[to].local_in)
        else:
            links = (source.links[at].remote_out, self.links[to].remote_in)
        send = self._network.send
        self._timeline.after(self._hardware.copy_latency_s, send, float(size), links, arrive)

    def reclaim(self, order: Reclaim) -> None:
        """Delete copies that are not used."""
        cache, blocks = self.caches[order.holder.rank.index], order.blocks[order.keep :]
        if not cache.drop(blocks):
            ended = ReclaimEnded(
                order.transfer, TransferOutcome.REFUSED, reason="in use or not as it was"
            )
            self._tell(ended)
            return
        self._tell(BlocksRemoved(order.holder.rank, blocks))
        self._tell(ReclaimEnded(order.transfer, TransferOutcome.DONE, blocks=len(blocks)))
