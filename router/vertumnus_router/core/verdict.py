"""What the controller is shown of the pools, and what it says after each window."""

from dataclasses import dataclass
from enum import Enum

from vertumnus_router.core.moves import Move, PricedMove
from vertumnus_router.core.types import PoolId
from vertumnus_router.lattice import Block


class Action(Enum):
    KEEP = "keep"
    SPLIT = "split"
    MERGE = "merge"


class Reason(Enum):
    """Why a verdict is what it is. The first four move the composition, the others keep it."""

    OVERLOAD = "overload"  # demand above the upper threshold for long enough
    UNDERLOAD = "underload"  # below the lower one
    LONG_RISE = "long_rise"  # in between, and the fraction of long requests has risen
    LONG_FALL = "long_fall"  # … or fallen
    IN_BAND = "in_band"
    NOT_YET = "not_yet"  # outside the band, for too few windows
    NO_MOVE = "no_move"  # a move is wanted, and none is eligible
    COOL_DOWN = "cool_down"  # too soon after the last change of the composition
    CHANGED = "changed"  # somebody else changed the composition in this window
    UNSETTLED = "unsettled"  # a pool is in the middle of a move, or its ranks do not agree
    IDLE = "idle"  # nothing arrived
    NO_WORKER = "no_worker"  # no block serves that the profile can price


@dataclass(frozen=True, slots=True)
class MoveOption:
    """One adjacent move that a pool could make now, and what it would cost."""

    pool: PoolId
    priced: PricedMove

    @property
    def move(self) -> Move:
        return self.priced.move

    @property
    def action(self) -> Action:
        return Action.MERGE if self.move.merges else Action.SPLIT

    @property
    def preference(self) -> tuple[float, int, int, PoolId]:
        """Lowest first: predicted drain, tokens to reconcile, rank; the pool for a total order."""
        first = min(block.first for block in self.move.leaving)
        return self.priced.drain_s, self.priced.reconcile_tokens, first, self.pool


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool at the end of a window. ``blocks`` is its composition, blocks that have failed
    included, ``serving`` the part that takes requests. ``unsettled`` says why ``blocks`` cannot be
    relied on now, None if they can."""

    pool: PoolId
    blocks: tuple[Block, ...]
    serving: tuple[Block, ...]
    unsettled: str | None = None
    options: tuple[MoveOption, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A move in the wanted direction, and where it would lead.

    ``capacity_s``, ``utilisation`` and ``peak`` as in ``Verdict``, after the move; None where the
    profile cannot price a degree. ``excluded`` says why it is not eligible.
    """

    option: MoveOption
    capacity_s: float | None
    utilisation: float | None
    peak: float | None
    excluded: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the controller concluded from one window, with everything that led to it.

    ``demand_s``: D(k), Σ Ê of the arrivals at ``reference_degree``, per nominal window.
    ``capacity_s``: Σ κ of the serving workers, ``kappa_s`` by degree. ``utilisation``: D over
    capacity; ``mean`` and ``peak``: of the windows that the decision rests on, and what the next
    one stays below. ``windows_above`` and ``windows_below``: how long the demand has been outside
    the band; a split needs ``persistence`` of them, a merge ``patience``. ``long_before``: the
    fraction of long requests that the composition was chosen at, ``long_now``: that of the last
    windows; None while unknown. ``wanted``: what the demand calls for; ``action``: the same, or
    KEEP where that cannot be done.
    """

    window: int
    at_s: float
    mode: str
    action: Action
    wanted: Action
    reason: Reason
    detail: str
    requests: int
    reference_degree: int | None
    demand_s: float
    capacity_s: float | None
    utilisation: float | None
    mean: float | None
    peak: float | None
    kappa_s: tuple[tuple[int, float], ...]
    lower: float
    upper: float
    persistence: int
    patience: int
    windows_above: int
    windows_below: int
    long_before: float | None
    long_now: float | None
    candidates: tuple[Candidate, ...] = ()
    chosen: MoveOption | None = None

    @property
    def command(self) -> MoveOption | None:
        """The move to make: the chosen one, if the controller may act."""
        return self.chosen if self.mode == "on" else None
