"""The prefix manager: what to copy and delete, by scans (Algorithm 2) and for operators.

A scan begins every so often and goes on with each tick. When it has seen the index, its lists are
gone through from the top: each wish is checked against what is true by then, gets its ranks, and
becomes a ``Copy`` or a ``Reclaim``, or a decision that says why not. A copy whose ranks are busy
waits for them, until the next scan at most.
"""

from collections import deque
from collections.abc import Iterator

from vertumnus_router.core.choice import Busy, Choice, Refused
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Cause, Copy, Effect, Reclaim
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.requests import RequestTable
from vertumnus_router.core.scan import HotRun, Scan, Wish
from vertumnus_router.core.snapshot import PrefixDecision
from vertumnus_router.core.transfers import Transfers
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import Rank, TransferId


class PrefixManager:
    """Scans, decides and, in mode ``on``, orders."""

    def __init__(
        self,
        config: PrefixConfig,
        model: PrefillModel,
        index: PrefixIndex,
        membership: Membership,
        ledger: Ledger,
        table: RequestTable,
        transfers: Transfers,
    ) -> None:
        self._config = config
        self._model = model
        self._index = index
        self._membership = membership
        # What only would have been ordered does not stand in anybody's way.
        self._shadow = config.mode != "on"
        self._transfers = Transfers(config, membership) if self._shadow else transfers
        self._choice = Choice(config, index, membership, ledger, table, self._transfers)
        self._begun_s: float | None = None
        self._steps: Iterator[int] | None = None
        self._now = 0.0
        self._effects: list[Effect] = []
        self._room: dict[Cause, int] = {}  # what may still be ordered since the last scan
        self._waiting: list[tuple[Cause, Wish]] = []
        self._granted: deque[PrefixDecision] = deque(maxlen=config.remember)
        self._refused: deque[PrefixDecision] = deque(maxlen=config.remember)
        #: what the last scan saw, hottest first
        self.hot: list[HotRun] = []

    @property
    def scanning(self) -> bool:
        """A scan is going on: tick again soon."""
        return self._steps is not None

    @property
    def decisions(self) -> tuple[PrefixDecision, ...]:
        """The last ones of each kind, granted and refused, oldest first."""
        return tuple(sorted([*self._granted, *self._refused], key=lambda one: one.at_s))

    def tick(self, now: float) -> list[Effect]:
        """Go on with the scan, or begin one when it is time."""
        if self._config.mode == "off":
            return []
        if self._begun_s is None:
            self._begun_s = now
        if self._steps is None and now - self._begun_s >= self._config.scan_s:
            self._begun_s, self._steps = now, self._scan()
        self._now, self._effects = now, []
        spent = 0
        while self._steps is not None and spent < self._config.slice_blocks:
            cost = next(self._steps, None)
            if cost is None:
                self._steps = None
                break
            spent += cost
        if self._steps is None:
            self._try_again()
        return self._effects

    def _scan(self) -> Iterator[int]:
        scan = Scan(self._config, self._index, self._membership, self._model)
        yield from scan.steps()
        self.hot = scan.hot.items()
        if self._shadow:
            self._transfers.clear()
        lists = (
            (Cause.INTER_DEGREE, scan.inter),
            (Cause.INTRA_DEGREE, scan.intra),
            (Cause.RECLAIM, scan.reclaim),
        )
        self._waiting.clear()
        for cause, best in lists:
            self._room[cause] = self._config.per_scan
            for wish in best.items():
                if not self._room[cause]:
                    break
                try:
                    self._grant(scan, wish, cause)
                except Refused as refusal:
                    self._note(wish, cause, reason=str(refusal))
                    if isinstance(refusal, Busy) and not self._shadow:
                        self._waiting.append((cause, wish))
                # Its path is walked, and every rank is looked at.
                yield 2 * wish.run.end + 20 * len(self._membership.peers)
        self._index.tallies.scans += 1

    def _try_again(self) -> None:
        """Order the copies whose ranks were busy, in the order in which they were wished for."""
        waiting, self._waiting = self._waiting, []
        for cause, wish in waiting:
            if not self._room[cause]:
                continue
            try:
                self._copy(wish, cause)
            except Busy:
                self._waiting.append((cause, wish))
            except Refused as refusal:
                self._note(wish, cause, reason=str(refusal))
            else:
                self._room[cause] -= 1

    def _grant(self, scan: Scan, wish: Wish, cause: Cause) -> None:
        """Order what is wished for. Raises ``Refused``."""
        if cause is Cause.RECLAIM:
            self._reclaim(scan, wish)
        else:
            self._copy(wish, cause)
        self._room[cause] -= 1

    def _copy(self, wish: Wish, cause: Cause) -> None:
        plan, transfers = self._choice.copy(wish, cause, self._now), self._transfers
        source, destination = plan.source, plan.destination
        transfer = transfers.new_id()
        self._order(
            transfers.begin_copy(transfer, source, destination, plan.blocks, cause, self._now)
        )
        missing = len(plan.blocks) - plan.retained
        self._note(wish, cause, missing, source.rank, destination.rank, transfer)

    def _reclaim(self, scan: Scan, wish: Wish) -> None:
        plan, cause = self._choice.reclaim(wish, scan), Cause.RECLAIM
        for holder in plan.holders:
            transfer = self._transfers.new_id()
            self._order(
                self._transfers.begin_reclaim(
                    transfer, holder, plan.blocks, plan.keep, cause, self._now
                )
            )
            blocks = len(plan.blocks) - plan.keep
            self._note(wish, cause, blocks, target=holder.rank, transfer=transfer)

    def _order(self, effect: Copy | Reclaim) -> None:
        if not self._shadow:
            self._effects.append(effect)

    def _note(
        self,
        wish: Wish,
        cause: Cause,
        blocks: int = 0,
        source: Rank | None = None,
        target: Rank | None = None,
        transfer: TransferId | None = None,
        reason: str | None = None,
    ) -> None:
        decisions = self._granted if reason is None else self._refused
        decisions.append(
            PrefixDecision(
                at_s=self._now,
                cause=cause,
                degree=wish.degree,
                tip=wish.run.tip.block,
                depth=wish.run.end,
                level=wish.level,
                replicas=wish.replicas,
                missed_s=wish.missed_s,
                blocks=blocks,
                source=source,
                target=target,
                transfer=None if self._shadow else transfer,
                reason=reason,
            )
        )
