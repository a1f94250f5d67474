"""Fluid composition: every block of the lattice is a candidate, each rank a timeline.

A request may want a block that does not serve. Once its ranks are idle the pool is moved there, by
the same moves that an operator or the controller makes, and the request binds when it serves. What
the moves take is part of the price.
"""

from vertumnus_router.core.config import FluidConfig
from vertumnus_router.core.effects import Effect
from vertumnus_router.core.events import PoolJoined, ReconfigureRequested
from vertumnus_router.core.lanes import Lane
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.moves import plan, surround
from vertumnus_router.core.regroups import Regroups
from vertumnus_router.core.types import PlanId
from vertumnus_router.core.workers import Worker
from vertumnus_router.lattice import Block

_Composition = tuple[Block, ...]


class FluidLanes:
    """A lane for every block that living ranks could serve in."""

    def __init__(
        self, config: FluidConfig, membership: Membership, ledger: Ledger, regroups: Regroups
    ) -> None:
        self._config = config
        self._membership = membership
        self._ledger = ledger
        self._regroups = regroups
        self._plans = 0
        self._targets: dict[tuple[_Composition, Block], tuple[_Composition, int]] = {}

    def now(self, now: float) -> list[Lane]:
        lanes: list[Lane] = []
        for pool in self._membership.pools:
            lanes += self._pool(pool, now)
        return lanes

    def form(self, lane: Lane, lanes: list[Lane], now: float) -> list[Effect]:
        pool, block = lane.candidate.pool, lane.candidate.block
        current = self._regroups.composition(pool)
        assert current is not None
        target, _ = self._target(pool, current, block)
        for other in lanes:
            if other.candidate.pool is pool:
                other.forms = False
        self._plans += 1
        order = ReconfigureRequested(PlanId(f"fluid-{self._plans}"), pool.pool, target)
        return self._regroups.request(order, now)

    def _pool(self, pool: PoolJoined, now: float) -> list[Lane]:
        """While the pool moves, what it moves to is there after a step, anything else one later."""
        step_s = self._config.step_s
        workers = self._membership.workers_of(pool.pool)
        at = {rank: w for w in workers if w.formed for rank in w.candidate.block.ranks}
        destination = self._regroups.destination(pool.pool)
        current = None if destination else self._regroups.composition(pool)
        rests = now < self._regroups.failed_s(pool.pool) + self._config.rest_s
        settled = current is not None and not rests
        lanes: list[Lane] = []
        for candidate in self._membership.lattice(pool.pool):
            block = candidate.block
            here = list(dict.fromkeys(at[rank] for rank in block.ranks if rank in at))
            queue_s = max((self._ledger.queue_s(worker.id, now) for worker in here), default=0.0)
            names = tuple(worker.id for worker in here)
            if len(here) == 1 and here[0].candidate.block == block and here[0].serving:
                serving = here[0].candidate
                lanes.append(Lane(serving, queue_s, *self._ledger.load(serving.id), names))
                continue
            steps = 1
            if current is not None:
                _, steps = self._target(pool, current, block)
            switch_s = 0.0 if destination and block in destination else steps * step_s
            wait_s = step_s if destination else 0.0
            forms = settled and all(self._idle(worker) for worker in here)
            lane = Lane(candidate, queue_s + wait_s + switch_s, 0, 0, names, switch_s, False, forms)
            lanes.append(lane)
        for lane in lanes:
            ranks = lane.candidate.ranks
            lane.rivals = [o for o in lanes if o is not lane and o.candidate.ranks & ranks]
        return lanes

    def _idle(self, worker: Worker) -> bool:
        return worker.serving and not self._ledger.reserved(worker.id)

    def _target(
        self, pool: PoolJoined, current: _Composition, block: Block
    ) -> tuple[_Composition, int]:
        """The composition nearest to ``current`` that has ``block``, and the moves to it."""
        found = self._targets.get((current, block))
        if found is None:
            target = surround(current, block, pool.degrees)
            found = target, len(plan(current, target, pool.degrees))
            self._targets[current, block] = found
        return found
