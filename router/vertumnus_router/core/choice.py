"""Algorithm 2 of the paper, the second half: from where to where, and whether it may be.

Asking changes nothing. What cannot be done raises ``Refused`` with the reason.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Cause
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership, Peer
from vertumnus_router.core.requests import RequestTable
from vertumnus_router.core.scan import Run, Scan, Wish
from vertumnus_router.core.tally import NEGLIGIBLE
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import PrefixIndex, PrefixMatch
from vertumnus_router.core.types import BlockHash
from vertumnus_router.core.workers import Candidate


class Refused(Exception):
    """The transfer cannot be made now; the message says why."""


class Busy(Refused):
    """It could be made, once copies in flight have ended."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """``blocks`` from the root, of which the destination has the first ``retained``."""

    source: Peer
    destination: Peer
    blocks: tuple[BlockHash, ...]
    retained: int


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """``holders``, ranks of one worker, delete ``blocks[keep:]``."""

    holders: tuple[Peer, ...]
    blocks: tuple[BlockHash, ...]
    keep: int


@dataclass(frozen=True, slots=True)
class _Destination:
    """A worker, its rank that would fetch, and the order of preference, lowest first."""

    preference: tuple[int, bool, float, int]
    candidate: Candidate
    peer: Peer
    retained: int


class Choice:
    """Finds the ranks for a copy or a deletion."""

    def __init__(
        self,
        config: PrefixConfig,
        index: PrefixIndex,
        membership: Membership,
        ledger: Ledger,
        table: RequestTable,
        transfers: Transfers,
    ) -> None:
        self._theta_reclaim = config.theta_reclaim
        self._index = index
        self._membership = membership
        self._ledger = ledger
        self._table = table
        self._transfers = transfers

    def _path(self, run: Run) -> tuple[BlockHash, ...]:
        blocks = self._index.path(run.tip)
        if len(blocks) != run.end:
            raise Refused("it has left the index since the scan saw it")
        return blocks

    # -- copies ---------------------------------------------------------------------------------

    def copy(self, wish: Wish, cause: Cause, now: float) -> CopyPlan:
        """A copy of the wish's path to a worker of its degree that does not hold it."""
        blocks = self._path(wish.run)
        at_degree = [c for c in self._membership.serving if c.degree == wish.degree]
        since = wish.run.missing[wish.degree][0] if cause is Cause.INTER_DEGREE else len(blocks) - 1
        ranks = sum(candidate.ranks for candidate in at_degree)
        if self._transfers.brings(ranks, since + 1, blocks[since]):
            raise Refused("a copy to that degree is on its way with it, or with a part of it")
        match = self._index.match(blocks)
        if cause is Cause.INTER_DEGREE and match.longest(ranks) == len(blocks):
            raise Refused("a worker of that degree holds it by now")
        return self.copy_to(at_degree, blocks, match, now)

    def copy_to(
        self,
        candidates: Iterable[Candidate],
        blocks: tuple[BlockHash, ...],
        match: PrefixMatch,
        now: float,
    ) -> CopyPlan:
        """A copy of ``blocks`` to the best of the candidates that do not hold them.

        Destination: longest retained path, room, least load. Source: least load.
        """
        found = [d for c in candidates for d in self._destinations(c, blocks, match, now)]
        fault = Refused("no worker could take it: each holds it or cannot copy")
        for destination in sorted(found, key=lambda one: one.preference):
            peer = destination.peer
            holding = match.holding(len(blocks), self._alike(peer))
            holding &= ~destination.candidate.ranks & ~self._transfers.reclaiming(
                len(blocks), blocks[-1]
            )
            sources = sorted(self._peers(holding), key=lambda source: self._load(source, now))
            if not sources:
                fault = Refused("no living rank holds all of it in a form that can be copied")
            for source in sources:
                reason = self._transfers.copy_fault(source, peer, now)
                if reason is None:
                    return CopyPlan(source, peer, blocks, destination.retained)
                waits = self._transfers.busy(source, peer) is not None
                fault = Busy(reason) if waits else Refused(reason)
        raise fault

    def _destinations(
        self,
        candidate: Candidate,
        blocks: tuple[BlockHash, ...],
        match: PrefixMatch,
        now: float,
    ) -> Iterator[_Destination]:
        """The ranks of the worker that have most of the path. None where the worker holds all of
        it, cannot copy, or is too small for it."""
        pool = candidate.pool
        retained = match.longest(candidate.ranks)
        if retained == len(blocks) or len(blocks) * pool.block_tokens > pool.kv_capacity_tokens:
            return
        needed = (len(blocks) - retained) * pool.block_tokens
        queue_s = self._ledger.queue_s(candidate.id, now)
        for peer in self._peers(candidate.ranks):
            if match.longest(1 << peer.slot) == retained:
                preference = -retained, self._free(peer) < needed, queue_s, peer.slot
                yield _Destination(preference, candidate, peer, retained)

    def _free(self, peer: Peer) -> int:
        """Tokens of the rank's KV pool that hold nothing, cached prefixes included."""
        report = self._membership.last_report(peer.rank)
        used = 0 if report is None else report.kv_used_tokens
        return peer.pool.kv_capacity_tokens - used

    def _load(self, peer: Peer, now: float) -> tuple[float, int, int]:
        queue_s = self._ledger.queue_s(peer.worker, now)
        return queue_s, self._transfers.giving().get(peer.slot, 0), peer.slot

    def _alike(self, peer: Peer) -> int:
        """The ranks whose KV is laid out as the peer's, a mask."""
        peers = self._membership.peers.values()
        return sum(1 << other.slot for other in peers if other.geometry == peer.geometry)

    def _peers(self, ranks: int) -> list[Peer]:
        """The ranks of a mask that can copy, by slot."""
        return [peer for slot, peer in sorted(self._membership.peers.items()) if ranks >> slot & 1]

    # -- deletions ------------------------------------------------------------------------------

    def reclaim(self, wish: Wish, scan: Scan) -> ReclaimPlan:
        """A deletion of the wish's run, and of what is as cold above it, at the fullest worker of
        the degree that may lose it."""
        blocks = self._path(wish.run)
        fault = "no worker of the degree holds it"
        for candidate in sorted(self._membership.serving, key=self._fullness):
            if candidate.degree != wish.degree or not candidate.ranks & wish.run.tip.holders:
                continue
            reason = self._needs(candidate, wish.run, wish, scan, blocks, None)
            if reason is not None:
                fault = reason
                continue
            top = wish.run
            while top.above is not None and (
                self._needs(candidate, top.above, wish, scan, blocks, top) is None
            ):
                top = top.above
            holders = self._peers(candidate.ranks & wish.run.tip.holders)
            return ReclaimPlan(tuple(holders), blocks, top.start)
        raise Refused(fault)

    def _fullness(self, candidate: Candidate) -> tuple[int, str]:
        free = (self._free(peer) for peer in self._peers(candidate.ranks))
        return min(free, default=0), candidate.id

    def _needs(
        self,
        candidate: Candidate,
        run: Run,
        wish: Wish,
        scan: Scan,
        blocks: tuple[BlockHash, ...],
        gone: Run | None,
    ) -> str | None:
        """Why the worker must keep the run, or None. ``gone``: the run below is deleted too."""
        degree, tip, ranks = wish.degree, run.tip, candidate.ranks
        if tip.parent is None or not tip.holders & ranks:
            return "it is held there no more"
        doomed = self._transfers.reclaiming(run.end, tip.block)
        replicas = scan.replicas(tip.holders & ~doomed, degree)
        wanted = run.wanted(degree)
        if wanted >= replicas * self._theta_reclaim:
            return "it is used"
        if replicas <= 1 and wanted > NEGLIGIBLE:
            return "it is the last one of its degree, which uses it"
        if not self._peers(tip.holders & ~ranks & ~doomed):
            return "it is the last one"
        first = blocks[run.start]
        if self._transfers.touches(ranks, run.start + 1, first):
            return "it is being copied or deleted"
        if self._is_used(candidate, run.start + 1, first):
            return "a request uses it"
        for child in tip.below():
            if child.holders & ranks and (gone is None or child.block != blocks[gone.start]):
                return "there is more below it"
        return None

    def _is_used(self, candidate: Candidate, depth: int, block: BlockHash) -> bool:
        """Whether the prompt of a request at the worker has the block, the ``depth``-th of its
        path."""
        return any(
            len(entry.request.blocks) >= depth and entry.request.blocks[depth - 1] == block
            for entry in self._table.assigned(candidate.id)
        )
