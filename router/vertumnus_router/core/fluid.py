"""Fluid composition: every block of the lattice is a candidate, each rank a timeline.

A request may want a block that does not serve. Once its ranks are idle the pool is moved there, by
the same moves that an operator or the controller makes, and the request binds when it serves. What
the moves take, and what ranks wait for each other, is part of the price.
"""

from dataclasses import dataclass
from itertools import repeat

from vertumnus_router.core.config import FluidConfig
from vertumnus_router.core.effects import Effect, PlanEnded
from vertumnus_router.core.events import PoolJoined, ReconfigureRequested
from vertumnus_router.core.lanes import Lanes
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.moves import plan, surround
from vertumnus_router.core.policy import FluidPolicy
from vertumnus_router.core.regroups import Regroups
from vertumnus_router.core.types import PlanId, PoolId, WorkerId
from vertumnus_router.core.workers import Candidates
from vertumnus_router.lattice import Block

_Composition = tuple[Block, ...]
#: The composition nearest to another one that has a certain block, and the moves to it.
_Way = tuple[_Composition, int]
PLAN_PREFIX = "fluid-"
#: Behind everything that could come, and still a number.
_NEVER_S = 1e6
#: A pool that refuses every move is asked ever less often.
_MOST_DOUBLINGS = 10


class Shape:
    """What of the lanes of a lattice stays as long as its ranks do.

    By lane: the places of its ranks among those of all pools, one pool after the other, and its
    rivals, the lanes that share a rank with it.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        first_of: dict[PoolId, int] = {}
        self.ranks = 0
        for pool in candidates.pools:
            first_of[pool.pool] = self.ranks
            self.ranks += pool.size
        self.places: list[slice] = []
        for one in candidates.each:
            first = first_of[one.pool.pool] + one.block.first
            self.places.append(slice(first, first + one.degree))
        self.rivals = tuple(
            tuple(r for r, theirs in enumerate(candidates.ranks) if r != at and theirs & ranks)
            for at, ranks in enumerate(candidates.ranks)
        )
        self.by_pool: dict[PoolId, list[int]] = {}
        for at, candidate in enumerate(candidates.each):
            self.by_pool.setdefault(candidate.pool.pool, []).append(at)


@dataclass(slots=True)
class BlockLanes(Lanes):
    """Lanes that share ranks.

    ``free_s`` by place is when the rank is free, ``wait_s`` of a lane when its pool can be moved;
    then the moves that lead to it take ``switch_s``, ``step_s`` each.
    ``open`` and ``formable`` are ``serves`` and ``forms`` by lane.
    """

    shape: Shape
    step_s: float
    free_s: list[float]
    wait_s: list[float]
    switch_s: list[float]
    idle_s: list[float]
    open: list[bool]
    formable: list[bool]

    @property
    def idle_gpu_s(self) -> list[float] | None:
        return self.idle_s

    def serves(self, at: int) -> bool:
        return self.open[at]

    def forms(self, at: int) -> bool:
        return self.formable[at]

    def sharing(self, worker: WorkerId) -> tuple[int, ...]:
        at = self.candidates.at_worker.get(worker)
        return () if at is None else (at, *self.shape.rivals[at])

    def plan(self, at: int, service_s: float, uncached_tokens: int, binds: bool) -> None:
        Lanes.plan(self, at, service_s, uncached_tokens, binds)
        end_s = self.queue_s[at]
        places = self.shape.places[at]
        self.free_s[places] = repeat(end_s, self.candidates.each[at].degree)
        self.wait_s[at] = self.switch_s[at] = self.idle_s[at] = 0.0  # borne by the first
        for rival in self.shape.rivals[at]:
            if self.open[rival]:
                self.switch_s[rival] = self.step_s
            # Its ranks are promised: whoever went there first would keep this one waiting.
            self.open[rival] = self.formable[rival] = False
            self.settle(rival)

    def settle(self, at: int) -> None:
        """Let begin and idle time of a lane follow from when its ranks are free."""
        free_s = self.free_s[self.shape.places[at]]
        begin_s, switch_s = max(free_s), self.switch_s[at]
        self.queue_s[at] = max(begin_s, self.wait_s[at]) + switch_s
        # The way there, and somebody's way back.
        self.idle_s[at] = len(free_s) * (begin_s + 2 * switch_s) - sum(free_s)


class FluidLanes:
    """A lane for every block that living ranks could serve in."""

    def __init__(
        self,
        config: FluidConfig,
        policy: FluidPolicy,
        membership: Membership,
        ledger: Ledger,
        regroups: Regroups,
    ) -> None:
        self._config = config
        self._policy = policy
        self._membership = membership
        self._ledger = ledger
        self._regroups = regroups
        self._shape: Shape | None = None
        self._plans = 0
        #: by composition and ladder
        self._ways: dict[tuple[_Composition, tuple[int, ...]], dict[Block, _Way]] = {}

    def now(self, now: float) -> BlockLanes:
        candidates = self._membership.lattice
        if self._shape is None or self._shape.candidates is not candidates:
            self._shape = Shape(candidates)
        count = len(candidates)
        ids = candidates.ids
        lanes = BlockLanes(
            candidates,
            self._ledger.queues_s(ids, now),
            self._ledger.loads(ids),
            self._shape,
            self._config.step_s if self._regroups.step_s is None else self._regroups.step_s,
            [0.0] * self._shape.ranks,
            [0.0] * count,
            [0.0] * count,
            [0.0] * count,
            [False] * count,
            [False] * count,
        )
        for pool in self._membership.pools:
            self._lay_out(lanes, pool, now)
        serving = self._membership.serving
        busy = sum(one.degree for one in serving if self._ledger.load(one.id)[0])
        self._policy.look(busy / max(1, self._membership.serving_ranks))
        return lanes

    def form(self, lanes: Lanes, at: int, now: float) -> list[Effect]:
        assert isinstance(lanes, BlockLanes)
        candidate = lanes.candidates.each[at]
        pool = candidate.pool
        for other in lanes.shape.by_pool[pool.pool]:
            lanes.formable[other] = False
        current = self._regroups.composition(pool)
        assert current is not None
        target, _ = self._way(current, candidate.block, pool)
        self._plans += 1
        order = ReconfigureRequested(PlanId(f"{PLAN_PREFIX}{self._plans}"), pool.pool, target)
        effects = self._regroups.request(order, now)
        for effect in effects:
            if isinstance(effect, PlanEnded):
                self._regroups.note(pool.pool, effect.reason, now)
        return effects

    def _lay_out(self, lanes: BlockLanes, pool: PoolJoined, now: float) -> None:
        """While the pool moves, what it moves to is there after a step, all else later."""
        mine = lanes.shape.by_pool.get(pool.pool)
        if mine is None:
            return
        at_worker, busy = lanes.candidates.at_worker, set()
        for worker in self._membership.workers_of(pool.pool):
            at = at_worker.get(worker.id)
            if at is None or not worker.formed:
                continue
            lanes.open[at] = worker.serving
            if not worker.serving or lanes.loads[at][0]:
                busy.add(at)
            places = lanes.shape.places[at]
            lanes.free_s[places] = repeat(lanes.queue_s[at], worker.candidate.degree)
        destination = self._regroups.destination(pool.pool)
        current = None if destination is not None else self._regroups.composition(pool)
        if current is not None and not self._membership.movable(pool):
            current = None
        ways = {} if current is None else self._ways_from(current, pool)
        rest_s = self._rest_s(pool.pool, now)
        step_s = lanes.step_s
        for at in mine:
            if lanes.open[at]:
                continue
            block = lanes.candidates.each[at].block
            if destination is not None:
                lanes.wait_s[at] = step_s
                lanes.switch_s[at] = 0.0 if block in destination else step_s
            elif current is None:
                lanes.wait_s[at] = _NEVER_S
            else:
                lanes.wait_s[at] = rest_s
                way = ways.get(block) or self._way(current, block, pool)
                lanes.switch_s[at] = way[1] * step_s
                lanes.formable[at] = not rest_s and busy.isdisjoint(lanes.shape.rivals[at])
            lanes.settle(at)

    def _rest_s(self, pool: PoolId, now: float) -> float:
        """How long the pool is not to be moved, after plans that stopped short."""
        count, last_s = self._regroups.failures(pool)
        if not count:
            return 0.0
        rest_s = self._config.rest_s * 2.0 ** min(count - 1, _MOST_DOUBLINGS)
        return max(0.0, last_s + rest_s - now)

    def _way(self, current: _Composition, block: Block, pool: PoolJoined) -> _Way:
        """The composition nearest to ``current`` that has ``block``, and the moves to it."""
        ways = self._ways_from(current, pool)
        found = ways.get(block)
        if found is None:
            target = surround(current, block, pool.degrees)
            found = ways[block] = target, len(plan(current, target, pool.degrees))
        return found

    def _ways_from(self, current: _Composition, pool: PoolJoined) -> dict[Block, _Way]:
        """Those that are known."""
        return self._ways.setdefault((current, pool.degrees), {})
