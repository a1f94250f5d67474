"""What ranks, supervisor and front of one pool tell each other about moves.

Ranks push ``RankMessage``s to the supervisor on ``ports.control``; the front asks the
supervisor on ``ports.control + 1``. msgpack, on loopback, all processes of one launch. Times are
seconds of the machine's monotonic clock, which its processes share.
"""

import msgspec
from vertumnus_router.protocol import MoveReport, PoolComposition

#: A rank whose process runs says so this often, whatever its scheduler does.
ALIVE_S = 1.0
#: Silent for longer, it is stopped or starved, and its block cannot go on.
SILENT_S = 5.0


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """From a thread of its own: a long forward step does not look like a stopped process."""

    rank: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A leader holds: until COMMIT or ABANDON, or until it is forgotten (``hold.HOLD_S``), its
    block begins no prefill."""

    rank: int
    epoch: int
    at_s: float


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The rank has reached the COMMIT in its stream of requests."""

    rank: int
    epoch: int
    at_s: float


class Switched(msgspec.Struct, frozen=True, tag="switched"):
    """The rank serves in its block of the epoch."""

    rank: int
    epoch: int
    at_s: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The rank cannot prepare; nothing has changed on it."""

    rank: int
    epoch: int
    reason: str


RankMessage = Alive | Ready | Entered | Switched | Refused


class Move(msgspec.Struct, frozen=True, tag="move"):
    """Bring the pool to ``composition``. ``epoch`` is the one it starts from; None: whichever."""

    composition: str
    epoch: int | None = None


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Tell the composition and the last moves."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The move was not begun."""

    reason: str


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """The move ended, well or badly."""

    report: MoveReport


class Described(msgspec.Struct, frozen=True, tag="described"):
    composition: PoolComposition


FrontMessage = Move | Describe
SupervisorAnswer = Rejected | Moved | Described
