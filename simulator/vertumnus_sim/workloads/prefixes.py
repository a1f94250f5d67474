"""Who shares which prefix: prompts of applications that are continued as conversations.

The lengths of the requests are given; what is decided here is which of their blocks others
have, too.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from vertumnus_sim.workloads.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Application:
    """Its requests begin with the same ``prefix_blocks``; ``weight``: how many there are."""

    weight: float
    prefix_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """``continued``: the share of requests that go on with an open conversation, the one that
    fits best of ``tries`` at random. One is open from ``think_s`` after its last request until
    ``forget_s`` after it."""

    applications: Sequence[Application]
    continued: float
    tries: int = 8
    think_s: float = 10.0
    forget_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A request whose blocks are not known yet."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


def share_prefixes(shapes: Sequence[Shape], sharing: Sharing, source: Random) -> list[TraceRequest]:
    """The same requests with blocks of ``BLOCK_TOKENS``; ``shapes`` are ordered by arrival."""
    fresh = count()
    prefixes = [_new(fresh, application.prefix_blocks) for application in sharing.applications]
    weights = [application.weight for application in sharing.applications]
    conversations = _Conversations(sharing)
    found: list[TraceRequest] = []
    for shape in shapes:
        prefix: tuple[int, ...] | None = None
        if source.random() < sharing.continued:
            prefix = conversations.take(shape, source)
        if prefix is None:
            (prefix,) = source.choices(prefixes, weights)
        blocks = _prompt(prefix, shape.input_tokens, fresh)
        found.append(
            TraceRequest(
                shape.arrival_s, shape.input_tokens, shape.output_tokens, blocks, BLOCK_TOKENS
            )
        )
        conversations.opened(found[-1])
    return found


class _Conversations:
    """The last request of each, oldest first."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._last: list[TraceRequest] = []

    def opened(self, request: TraceRequest) -> None:
        self._last.append(request)

    def take(self, shape: Shape, source: Random) -> tuple[int, ...] | None:
        """The whole blocks of the conversation that ``shape`` goes on with, which is no longer
        open; None when there is none."""
        horizon_s = shape.arrival_s - self._sharing.forget_s
        forgotten = 0
        while forgotten < len(self._last) and self._last[forgotten].arrival_s < horizon_s:
            forgotten += 1
        del self._last[:forgotten]
        thought_s = shape.arrival_s - self._sharing.think_s
        ready = _ready(self._last, thought_s)
        if not ready:
            return None
        candidates = {source.randrange(ready) for _ in range(self._sharing.tries)}
        fitting = [n for n in candidates if self._last[n].input_tokens < shape.input_tokens]
        if not fitting:
            return None
        chosen = max(fitting, key=lambda n: (self._last[n].input_tokens, n))
        parent = self._last.pop(chosen)
        return parent.blocks[: parent.input_tokens // BLOCK_TOKENS]


def _ready(ordered: Sequence[TraceRequest], until_s: float) -> int:
    """How many arrived before ``until_s``."""
    return bisect_left(ordered, until_s, key=lambda request: request.arrival_s)


def _prompt(prefix: tuple[int, ...], tokens: int, fresh: Iterator[int]) -> tuple[int, ...]:
    """Whole blocks of ``prefix`` as far as they go, new ones behind them."""
    shared = prefix[: tokens // BLOCK_TOKENS]
    return (*shared, *_new(fresh, -(-tokens // BLOCK_TOKENS) - len(shared)))


def _new(fresh: Iterator[int], blocks: int) -> tuple[int, ...]:
    return tuple(islice(fresh, blocks))
