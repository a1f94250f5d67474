"""Algorithm 2 of the paper, the first half: which prefixes deserve to be copied or deleted.

A scan visits the whole index, a little at a time, and ranks what it finds. It works on *runs*:
consecutive blocks of one path that have the same holders and no counts between them are alike to
every rule, and are copied or deleted together.
"""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.membership import Membership, geometry
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.statistics import saved_s
from vertumnus_router.core.tally import NEGLIGIBLE
from vertumnus_router.core.trie import Node, PrefixIndex

T = TypeVar("T")

#: Candidates kept for each transfer that a scan may order: the first ones may turn out impossible.
SPARE = 4
#: Accesses per replica within this factor are alike.
SIMILAR = 1.25


class Best(Generic[T]):
    """The ``limit`` items of the highest rank; of equal ones, those offered first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[tuple[float, ...], int, T]] = []
        self._offered = 0

    def offer(self, rank: tuple[float, ...], item: T) -> None:
        self._offered += 1
        entry = (rank, -self._offered, item)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def items(self) -> list[T]:
        """Highest rank first."""
        return [item for _, _, item in sorted(self._heap, reverse=True)]


@dataclass(slots=True, eq=False)
class Run:
    """The blocks behind the first ``start`` ones of the path of ``tip``, which is ``end`` blocks
    long."""

    tip: Node
    start: int
    end: int
    above: "Run | None"
    #: what a rank holds below it, a mask
    below: int = 0
    #: by degree: [accesses, misses] of each of its blocks
    counts: dict[int, list[float]] = field(default_factory=dict)
    #: by degree that does not hold it: the blocks above that it does, and the seconds that the
    #: path from there to the tip would have saved
    missing: dict[int, tuple[int, float]] = field(default_factory=dict)

    def accesses(self, degree: int) -> float:
        counts = self.counts.get(degree)
        return 0.0 if counts is None else counts[0]

    def wanted(self, degree: int) -> float:
        """Accesses and misses: what was missed until it was copied is not to be deleted before
        anybody could find it there."""
        counts = self.counts.get(degree)
        return 0.0 if counts is None else counts[0] + max(0.0, counts[1])


@dataclass(frozen=True, slots=True)
class Wish:
    """A run that crossed a threshold at a degree. ``level`` is what ranks it: seconds per copied
    block, or accesses per replica."""

    run: Run
    degree: int
    level: float
    replicas: int
    missed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HotRun:
    """What a scan saw of a prefix: ``accesses`` and ``missed_s`` (of the path) by degree."""

    tip: Node
    blocks: int
    block_tokens: int
    accesses: Mapping[int, float]
    missed_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Holding:
    """A set of holders: how many workers of each degree it makes up, ``workers`` in all and
    whether ``others`` than the ranks of one worker are among them."""

    replicas: Mapping[int, int]
    block_tokens: int
    others: bool


class Scan:
    """One pass over the index: exhaust ``steps``, then read the lists."""

    def __init__(
        self, config: PrefixConfig, index: PrefixIndex, membership: Membership, model: PrefillModel
    ) -> None:
        self._config = config
        self._index = index
        self._membership = membership
        self._model = model
        limit = SPARE * config.per_scan
        self.inter: Best[Wish] = Best(limit)
        self.intra: Best[Wish] = Best(limit)
        self.reclaim: Best[Wish] = Best(limit)
        self.hot: Best[HotRun] = Best(config.hot)
        self._holdings: dict[int, Holding | None] = {}
        self._peers: object = None
        self._workers: dict[int, int] = {}  # serving workers that can copy, by degree
        self._ranks: dict[int, int] = {}  # and their ranks
        self.nodes = 0

    def steps(self) -> Iterator[int]:
        """The work, in pieces; each says what it has cost, in blocks."""
        for root in self._index.roots():
            if root.parent is not None:
                runs: list[Run] = []
                yield from self._collect(root, runs)
                yield from self._add_up(runs)
                yield from self._judge(runs)

    def _collect(self, root: Node, runs: list[Run]) -> Iterator[int]:
        """The runs of the tree below ``root``, each behind the one above it."""
        # Copies of the children yet to be visited, and the run above them; a copy because the
        # index goes on to change between the steps.
        stack: list[tuple[Iterator[Node], Run | None]] = [(iter((root,)), None)]
        spent = 0
        while stack:
            siblings, above = stack[-1]
            node = next(siblings, None)
            if node is None:
                stack.pop()
                continue
            if node.parent is None:
                continue  # it left the index meanwhile
            start = 0 if above is None else above.end
            end, holders = start + 1, node.holders
            if above is not None:
                above.below |= holders
            while True:
                child = node.children
                if not isinstance(child, Node):
                    break
                if child.holders != holders or node.tally is not None:
                    break
                node = child
                end += 1
            run = Run(node, start, end, above)
            spent += end - start + 8
            if node.children is None and node.tally is None:
                self._judge_run(run)  # nobody asked for it: there is nothing to add up
            else:
                runs.append(run)
                stack.append((iter(list(node.below())), run))
            if spent > 500:
                yield spent
                spent = 0
        yield spent

    def _add_up(self, runs: list[Run]) -> Iterator[int]:
        """What ends below a run counts for it."""
        spent = 0
        for run in reversed(runs):
            for degree, (accesses, misses) in self._index.tallies.read(run.tip).items():
                counts = run.counts.setdefault(degree, [0.0, 0.0])
                counts[0] += accesses
                counts[1] += misses
            if run.above is not None and run.counts:
                above = run.above.counts
                for degree, (accesses, misses) in run.counts.items():
                    counts = above.setdefault(degree, [0.0, 0.0])
                    counts[0] += accesses
                    counts[1] += misses
            spent += 4
            if spent > 500:
                yield spent
                spent = 0
        yield spent

    def _judge(self, runs: list[Run]) -> Iterator[int]:
        """Takes them off the list: to let go of all of them at once would take long."""
        spent = 0
        runs.reverse()
        while runs:
            run = runs.pop()
            if run.tip.parent is not None:
                self._judge_run(run)
            spent += 8
            if spent > 500:
                yield spent
                spent = 0
        yield spent

    def _judge_run(self, run: Run) -> None:
        holding = self._holding(run.tip.holders)
        if holding is None:
            return
        config, above = self._config, run.above
        tokens = holding.block_tokens
        for degree, (_, misses) in run.counts.items():
            replicas = holding.replicas.get(degree, 0)
            if replicas or degree not in self._workers:
                continue
            since, missed_s = run.start, 0.0
            if above is not None:
                since, missed_s = above.missing.get(degree, (since, missed_s))
            if misses > NEGLIGIBLE:
                each_s = saved_s(self._model, degree, run.start * tokens, run.end * tokens)
                missed_s += misses * each_s
            run.missing[degree] = since, missed_s
            if misses > NEGLIGIBLE and missed_s > config.theta_inter_s:
                level = missed_s / (run.end - since)
                self.inter.offer((level,), Wish(run, degree, level, 0, missed_s))
        for degree, replicas in holding.replicas.items():
            level = run.accesses(degree) / replicas
            if level > config.theta_intra:
                if replicas < self._workers[degree]:
                    likeness = math.floor(math.log(level, SIMILAR))
                    self.intra.offer((likeness, -run.end), Wish(run, degree, level, replicas))
                continue
            level = run.wanted(degree) / replicas
            if level < config.theta_reclaim and holding.others:
                last = replicas == 1 and level > NEGLIGIBLE
                if not last and self._ranks[degree] & run.tip.holders & ~run.below:
                    wish = Wish(run, degree, level, replicas)
                    self.reclaim.offer((-level, run.end - run.start), wish)
        total = sum(max(a, m) for a, m in run.counts.values())
        if total > NEGLIGIBLE:
            heat = HotRun(
                run.tip,
                run.end,
                tokens,
                {degree: a for degree, (a, _) in run.counts.items() if a > NEGLIGIBLE},
                {degree: seconds for degree, (_, seconds) in run.missing.items()},
            )
            self.hot.offer((total, run.end), heat)

    def replicas(self, holders: int, degree: int) -> int:
        """ReplicaCount(z, C): serving workers of the degree of which a rank is in ``holders``."""
        holding = self._holding(holders)
        return 0 if holding is None else holding.replicas.get(degree, 0)

    def _holding(self, holders: int) -> Holding | None:
        """None if no rank among the holders can copy."""
        if self._peers is not self._membership.peers:
            self._membership_changed()
        if holders not in self._holdings:
            self._holdings[holders] = self._look(holders)
        return self._holdings[holders]

    def _membership_changed(self) -> None:
        self._peers = self._membership.peers
        self._holdings.clear()
        self._workers.clear()
        self._ranks.clear()
        for candidate in self._membership.serving:
            if candidate.pool.kv_token_bytes:
                degree = candidate.degree
                self._workers[degree] = self._workers.get(degree, 0) + 1
                self._ranks[degree] = self._ranks.get(degree, 0) | candidate.ranks

    def _look(self, holders: int) -> Holding | None:
        peers = [p for slot, p in self._membership.peers.items() if holders >> slot & 1]
        if not peers:
            return None
        replicas: dict[int, int] = {}
        for candidate in self._membership.serving:
            if candidate.ranks & holders and geometry(candidate.pool) == peers[0].geometry:
                replicas[candidate.degree] = replicas.get(candidate.degree, 0) + 1
        others = len({peer.worker for peer in peers}) > 1
        return Holding(replicas, peers[0].pool.block_tokens, others)
