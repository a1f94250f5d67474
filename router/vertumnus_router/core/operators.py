"""What operators ask of the prefix manager by hand: copy this there, delete that."""

from vertumnus_router.core.choice import Choice, Refused
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Cause, Effect, TransferRefused
from vertumnus_router.core.events import ReclaimRequested, ReplicateRequested
from vertumnus_router.core.membership import Membership, Peer
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import Node, PrefixIndex
from vertumnus_router.core.types import BlockHash, TransferId, WorkerId
from vertumnus_router.core.workers import Candidate

#: Ends of paths that one request may delete.
MAX_BRANCHES = 256


class Operators:
    """Turns requests into ``Copy`` and ``Reclaim``, or refuses them. In every mode but off."""

    def __init__(
        self,
        config: PrefixConfig,
        index: PrefixIndex,
        membership: Membership,
        transfers: Transfers,
        choice: Choice,
    ) -> None:
        self._enabled = config.mode != "off"
        self._index = index
        self._membership = membership
        self._transfers = transfers
        self._choice = choice

    def replicate(self, event: ReplicateRequested, now: float) -> list[Effect]:
        """One copy with the id of the request."""
        try:
            node, candidate = self._find(event.transfer, event.tip, event.worker)
            blocks = self._index.path(node)
            match = self._index.match(blocks)
            if match.longest(candidate.ranks) == len(blocks):
                raise Refused(f"worker {candidate.id} holds it already")
            plan = self._choice.copy_to((candidate,), blocks, match, now)
        except Refused as refusal:
            return [TransferRefused(event.transfer, str(refusal))]
        return [
            self._transfers.begin_copy(
                event.transfer, plan.source, plan.destination, blocks, Cause.OPERATOR, now
            )
        ]

    def reclaim(self, event: ReclaimRequested, now: float) -> list[Effect]:
        """One deletion for each end of a path at each rank, to be carried out in this order: those
        of shared blocks are with the last path that has them. The first has the request's id."""
        try:
            node, candidate = self._find(event.transfer, event.tip, event.worker)
            holders = [p for p in self._peers(candidate) if node.holders >> p.slot & 1]
            if not holders:
                raise Refused(f"worker {candidate.id} does not hold it")
            keep = len(self._index.path(node)) - 1
            orders: list[tuple[Peer, tuple[BlockHash, ...], int]] = []
            for holder in holders:
                orders += self._branches(holder, node, keep)
            if len(orders) > MAX_BRANCHES:
                raise Refused(f"{len(orders)} paths end below it: delete them first, or in parts")
            for holder, blocks, _ in orders:
                if self._transfers.touches(1 << holder.slot, keep + 1, blocks[keep]):
                    raise Refused("a copy or deletion of it is in flight: try again later")
        except Refused as refusal:
            return [TransferRefused(event.transfer, str(refusal))]
        ids = [event.transfer, *(self._transfers.new_id() for _ in orders[1:])]
        return [
            self._transfers.begin_reclaim(transfer, holder, blocks, start, Cause.OPERATOR, now)
            for transfer, (holder, blocks, start) in zip(ids, orders, strict=True)
        ]

    def _find(
        self, transfer: TransferId, tip: BlockHash, worker: WorkerId
    ) -> tuple[Node, Candidate]:
        if not self._enabled:
            raise Refused(
                "the prefix manager is off: start the router with --prefix-manager observe or on"
            )
        if transfer in self._transfers.pending:
            raise Refused(f"a transfer with the id {transfer} is in flight")
        known = {found.id: found for found in self._membership.workers}.get(worker)
        if known is None:
            raise Refused(f"there is no worker {worker}")
        if not known.serving:
            raise Refused(f"worker {worker} does not serve: {known.reason}")
        if not self._peers(known.candidate):
            raise Refused(f"the ranks of worker {worker} cannot copy or delete prefixes")
        node = self._index.find(tip)
        if node is None:
            raise Refused(f"no rank holds a block {tip}")
        return node, known.candidate

    def _peers(self, candidate: Candidate) -> list[Peer]:
        peers = sorted(self._membership.peers.items())
        return [peer for slot, peer in peers if candidate.ranks >> slot & 1]

    def _branches(
        self, holder: Peer, node: Node, keep: int
    ) -> list[tuple[Peer, tuple[BlockHash, ...], int]]:
        """What the rank holds at and below the node as chains, each without the blocks that the
        chains before it have deleted or those behind it will."""
        ranks = 1 << holder.slot
        held = [node, *self._index.held_below(node, ranks)]
        inner = {one.parent for one in held[1:]}
        tips = [one for one in held if one not in inner]
        left = {}  # held nodes by how many held children are yet to be deleted
        for one in held:
            left[one] = sum(1 for child in one.below() if child.holders & ranks)
        chains = []
        for tip in tips:
            blocks = self._index.path(tip)
            start, at = len(blocks), tip
            while start > keep and left.get(at, 1) == 0:
                start -= 1
                assert at.parent is not None
                at = at.parent
                if at in left:
                    left[at] -= 1
            chains.append((holder, blocks, start))
        return chains
