"""The copies and deletions that were ordered and have not ended, and how fast copies go."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vertumnus_router.core.chains import shared_depth
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Cause, Copy, Life, Reclaim
from vertumnus_router.core.events import CopyEnded, ReclaimEnded, TransferOutcome
from vertumnus_router.core.membership import Membership, Peer
from vertumnus_router.core.types import BlockHash, PoolId, TransferId

#: So many copies from one pool to another that failed in a row say that those cannot copy at all:
#: no common key, no Mooncake, a firewall. Then one is tried after ``retry_s``, twice as long, ...
_IN_VAIN = 3
_MOST_DOUBLINGS = 6


@dataclass(slots=True)
class Link:
    """Copies within a pool, or between pools: a copy of n bytes takes latency_s + n/bytes_per_s.

    Moving averages over ``copies`` reports.
    """

    latency_s: float
    bytes_per_s: float
    copies: int = 0

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s

    def observe(self, event: CopyEnded, gain: float) -> None:
        if event.bytes <= 0 or event.transfer_s <= 0:
            return
        self.latency_s += gain * (max(0.0, event.seconds - event.transfer_s) - self.latency_s)
        # Of seconds per byte, which is what is added up, and not of its inverse.
        pace = (1 - gain) / self.bytes_per_s + gain * event.transfer_s / event.bytes
        self.bytes_per_s = 1 / pace
        self.copies += 1


@dataclass(frozen=True, slots=True)
class Pending:
    """One transfer: the slot that it reads (None: it deletes), the slot that it changes."""

    effect: Copy | Reclaim
    source: int | None
    target: int
    since_s: float

    @property
    def depth(self) -> int:
        return len(self.effect.blocks)

    def lives(self) -> Iterator[tuple[int, Life]]:
        """The ranks that it concerns, by slot."""
        match self.effect:
            case Copy(source=source, destination=destination):
                if self.source is not None:
                    yield self.source, source
                yield self.target, destination
            case Reclaim(holder=holder):
                yield self.target, holder

    def has(self, depth: int, block: BlockHash) -> bool:
        """Whether ``block``, the ``depth``-th of its path, is one that it copies or deletes."""
        blocks = self.effect.blocks
        keep = self.effect.keep if isinstance(self.effect, Reclaim) else 0
        return keep < depth <= len(blocks) and blocks[depth - 1] == block


class Transfers:
    """What is in flight. It lasts until it is told to have ended, for ``timeout_s``, or as long
    as the lives that it concerns."""

    def __init__(self, config: PrefixConfig, membership: Membership) -> None:
        self._config = config
        self._membership = membership
        self._pending: dict[TransferId, Pending] = {}
        self._failed_s: dict[tuple[Life, Life], float] = {}
        #: by source and destination, pools: how many in a row failed, and when the last did
        self._in_vain: dict[tuple[PoolId, PoolId], tuple[int, float]] = {}
        self._count = 0
        self.local = Link(config.latency_s, config.local_bytes_per_s)
        self.remote = Link(config.latency_s, config.remote_bytes_per_s)

    @property
    def pending(self) -> Mapping[TransferId, Pending]:
        """By id, oldest first."""
        return self._pending

    def _copies(self) -> Iterator[Pending]:
        return (one for one in self._pending.values() if one.source is not None)

    def link(self, source: PoolId, destination: PoolId) -> Link:
        return self.local if source == destination else self.remote

    def new_id(self) -> TransferId:
        self._count += 1
        return TransferId(f"prefix-{self._count}")

    # -- what is in flight ----------------------------------------------------------------------

    def incoming(self, blocks: Sequence[BlockHash]) -> Mapping[int, int]:
        """How many blocks of the chain a rank will hold when its copies are done, by slot; without
        the ranks that no copy brings any to."""
        depths: dict[int, int] = {}
        if not self._pending:
            return depths
        for copy in self._copies():
            depth = shared_depth(copy.effect.blocks, blocks)
            if depth:
                depths[copy.target] = max(depth, depths.get(copy.target, 0))
        return depths

    def brings(self, ranks: int, depth: int, block: BlockHash) -> bool:
        """Whether a copy to a rank in the mask has ``block``, the ``depth``-th of its path."""
        return any(ranks >> c.target & 1 and c.has(depth, block) for c in self._copies())

    def bringing(self, ranks: int, depth: int, blocks: Sequence[BlockHash]) -> Copy | None:
        """Of the copies to a rank in the mask that have the ``depth``-th block of the chain, the
        one with the most of the chain."""
        copies = (
            copy.effect
            for copy in self._copies()
            if ranks >> copy.target & 1 and copy.has(depth, blocks[depth - 1])
        )
        found = max(copies, key=lambda copy: shared_depth(copy.blocks, blocks), default=None)
        return found if isinstance(found, Copy) else None

    def touches(self, ranks: int, depth: int, block: BlockHash) -> bool:
        """Whether anything in flight reads, brings or deletes the block at a rank in the mask."""
        return any(
            one.has(depth, block)
            for one in self._pending.values()
            if ranks >> one.target & 1 or (one.source is not None and ranks >> one.source & 1)
        )

    def reclaiming(self, depth: int, block: BlockHash) -> int:
        """The ranks that are about to delete the block, a mask."""
        mask = 0
        for one in self._pending.values():
            if one.source is None and one.has(depth, block):
                mask |= 1 << one.target
        return mask

    def giving(self) -> Mapping[int, int]:
        """How many copies read from a rank, by slot; without those that none reads from."""
        given: dict[int, int] = {}
        for copy in self._copies():
            if copy.source is not None:
                given[copy.source] = given.get(copy.source, 0) + 1
        return given

    def taking(self) -> Mapping[int, int]:
        """The same for the ranks that they go to."""
        taken: dict[int, int] = {}
        for copy in self._copies():
            taken[copy.target] = taken.get(copy.target, 0) + 1
        return taken

    @property
    def any_failed(self) -> bool:
        """Whether a copy has failed lately."""
        return bool(self._failed_s or self._in_vain)

    def failed(self, source: Peer, destination: Peer, now: float) -> bool:
        """Whether the last copy between the two ranks failed so lately that none may follow, or
        all between their pools."""
        if not self.any_failed:
            return False
        count, last_s = self._in_vain.get((source.rank.pool, destination.rank.pool), (0, 0.0))
        if count >= _IN_VAIN:
            rest_s = self._config.retry_s * 2.0 ** min(count - _IN_VAIN, _MOST_DOUBLINGS)
            if now - last_s < rest_s:
                return True
        failed_s = self._failed_s.get((source.life, destination.life))
        return failed_s is not None and now - failed_s < self._config.retry_s

    def copy_fault(self, source: Peer, destination: Peer, now: float) -> str | None:
        """Why no copy but a pull may go between the two ranks now, or None."""
        busy = self.busy(source, destination)
        if busy is not None:
            return busy
        if self.failed(source, destination, now):
            return f"the last copy from {source.rank} to {destination.rank} failed"
        return None

    def busy(self, source: Peer, destination: Peer) -> str | None:
        """Which copies in flight keep another one between the two ranks waiting, or None. A pull,
        for which a request waits, has limits of its own."""
        copies = list(self._copies())
        if len(copies) >= self._config.copies_in_flight:
            return f"{len(copies)} copies are in flight"
        if any(copy.source == source.slot for copy in copies):
            return f"{source.rank} gives as many as it may"
        if any(copy.target == destination.slot for copy in copies):
            return f"{destination.rank} takes as many as it may"
        return None

    # -- beginning and end ----------------------------------------------------------------------

    def begin_copy(
        self,
        transfer: TransferId,
        source: Peer,
        destination: Peer,
        blocks: tuple[BlockHash, ...],
        cause: Cause,
        now: float,
    ) -> Copy:
        copy = Copy(transfer, source.life, destination.life, blocks, cause)
        self._pending[transfer] = Pending(copy, source.slot, destination.slot, now)
        return copy

    def begin_reclaim(
        self,
        transfer: TransferId,
        holder: Peer,
        blocks: tuple[BlockHash, ...],
        keep: int,
        cause: Cause,
        now: float,
    ) -> Reclaim:
        reclaim = Reclaim(transfer, holder.life, blocks, keep, cause)
        self._pending[transfer] = Pending(reclaim, None, holder.slot, now)
        return reclaim

    def ended(self, event: CopyEnded | ReclaimEnded, now: float) -> None:
        """One that is not known (any more) is no news."""
        one = self._pending.get(event.transfer)
        if one is None or isinstance(one.effect, Copy) != isinstance(event, CopyEnded):
            return
        del self._pending[event.transfer]
        if isinstance(one.effect, Copy) and isinstance(event, CopyEnded):
            source, destination = one.effect.source, one.effect.destination
            if event.outcome is TransferOutcome.DONE:
                link = self.link(source.rank.pool, destination.rank.pool)
                link.observe(event, self._config.gain)
                self._in_vain.pop((source.rank.pool, destination.rank.pool), None)
            else:
                self._fail(source, destination, now)

    def expire(self, now: float) -> None:
        """Give up what has not ended in time."""
        timeout_s, retry_s = self._config.timeout_s, self._config.retry_s
        for transfer, one in list(self._pending.items()):
            if now - one.since_s >= timeout_s:
                del self._pending[transfer]
                if isinstance(one.effect, Copy):
                    self._fail(one.effect.source, one.effect.destination, now)
        for pair, failed_s in list(self._failed_s.items()):
            if now - failed_s >= retry_s:
                del self._failed_s[pair]

    def _fail(self, source: Life, destination: Life, now: float) -> None:
        self._failed_s[source, destination] = now
        pools = source.rank.pool, destination.rank.pool
        if pools[0] != pools[1]:
            self._in_vain[pools] = self._in_vain.get(pools, (0, 0.0))[0] + 1, now

    def follow(self) -> None:
        """Forget what concerns a life that is over, or a rank that is out."""
        for pools in list(self._in_vain):
            if None in map(self._membership.pool, pools):
                del self._in_vain[pools]
        peers = self._membership.peers
        for transfer, one in list(self._pending.items()):
            for slot, life in one.lives():
                peer = peers.get(slot)
                if peer is None or peer.life != life:
                    self._pending.pop(transfer, None)

    def clear(self) -> None:
        self._pending.clear()
