"""Where prefixes are and where they should be: the parts of it, put together (section 7)."""

from vertumnus_router.core.choice import Choice
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Copy, Effect
from vertumnus_router.core.events import (
    CopyEnded,
    ReclaimEnded,
    ReclaimRequested,
    ReplicateRequested,
)
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.operators import Operators
from vertumnus_router.core.prefix_manager import PrefixManager
from vertumnus_router.core.pulls import Pulls
from vertumnus_router.core.requests import RequestTable
from vertumnus_router.core.scan import HotRun
from vertumnus_router.core.snapshot import (
    HotPrefix,
    LinkSnapshot,
    PrefixesSnapshot,
    TransferSnapshot,
)
from vertumnus_router.core.statistics import PrefixStatistics
from vertumnus_router.core.transfers import Link, Pending, Transfers
from vertumnus_router.core.trie import PrefixIndex


class Prefixes:
    """Statistics, scans, pulls, operators and what is in flight of all of them."""

    def __init__(
        self,
        config: PrefixConfig,
        model: PrefillModel,
        index: PrefixIndex,
        membership: Membership,
        ledger: Ledger,
        table: RequestTable,
    ) -> None:
        self._config = config
        self._index = index
        self._membership = membership
        self.transfers = Transfers(config, membership)
        self.pulls = Pulls(config, membership, ledger, self.transfers)
        #: None when nobody would read them
        self.statistics: PrefixStatistics | None = None
        if config.mode != "off":
            self.statistics = PrefixStatistics(index, membership)
        self._manager = PrefixManager(
            config, model, index, membership, ledger, table, self.transfers
        )
        choice = Choice(config, index, membership, ledger, table, self.transfers)
        self._operators = Operators(config, index, membership, self.transfers, choice)

    @property
    def scanning(self) -> bool:
        return self._manager.scanning

    def tick(self, now: float) -> list[Effect]:
        self.transfers.expire(now)
        return self._manager.tick(now)

    def follow(self) -> None:
        """The ranks have changed."""
        self.transfers.follow()

    def ended(self, event: CopyEnded | ReclaimEnded, now: float) -> None:
        self.transfers.ended(event, now)

    def asked(self, event: ReplicateRequested | ReclaimRequested, now: float) -> list[Effect]:
        if isinstance(event, ReplicateRequested):
            return self._operators.replicate(event, now)
        return self._operators.reclaim(event, now)

    # -- queries --------------------------------------------------------------------------------

    def snapshot(self, now: float) -> PrefixesSnapshot:
        return PrefixesSnapshot(
            mode=self._config.mode,
            pull=self._config.pull,
            scans=self._index.tallies.scans,
            scanning=self.scanning,
            hot=tuple(self._hot(run) for run in self._manager.hot if run.tip.parent is not None),
            transfers=tuple(self._transfer(p, now) for p in self.transfers.pending.values()),
            decisions=self._manager.decisions,
            local=_link(self.transfers.local),
            remote=_link(self.transfers.remote),
            index_blocks=len(self._index),
            index_bytes=self._index.bytes,
        )

    def _hot(self, run: HotRun) -> HotPrefix:
        holders = run.tip.holders
        peers = sorted(self._membership.peers.items())
        serving = self._membership.serving
        return HotPrefix(
            tip=run.tip.block,
            tokens=run.blocks * run.block_tokens,
            ranks=tuple(peer.rank for slot, peer in peers if holders >> slot & 1),
            workers=tuple(c.id for c in serving if c.ranks & holders),
            accesses=run.accesses,
            missed_s=run.missed_s,
        )

    def _transfer(self, one: Pending, now: float) -> TransferSnapshot:
        effect = one.effect
        return TransferSnapshot(
            transfer=effect.transfer,
            cause=effect.cause,
            source=effect.source.rank if isinstance(effect, Copy) else None,
            target=(effect.destination if isinstance(effect, Copy) else effect.holder).rank,
            tip=effect.blocks[-1],
            blocks=len(effect.blocks) - (0 if isinstance(effect, Copy) else effect.keep),
            age_s=now - one.since_s,
        )

    def violations(self) -> list[str]:
        """Every broken invariant, for tests."""
        found = []
        peers = self._membership.peers
        for transfer, one in self.transfers.pending.items():
            effect = one.effect
            if effect.transfer != transfer or not effect.blocks:
                found.append(f"{transfer} is {effect}")
            if one.source == one.target:
                found.append(f"{transfer} copies from {one.target} to itself")
            for slot, life in one.lives():
                peer = peers.get(slot)
                if peer is None or peer.life != life:
                    found.append(f"{transfer} concerns {life}, which is over")
        return found


def _link(link: Link) -> LinkSnapshot:
    return LinkSnapshot(link.latency_s, link.bytes_per_s, link.copies)
