"""Attempts of which nothing has been heard for too long.

Looked for all together, about once a second: a timer of its own for every piece of every stream
would cost more than forwarding the piece.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.io.config import Limits

_LOOK_S = 1.0


class Attempting(Protocol):
    """A request that may be waiting for a worker."""

    def give_up_if_stalled(self, now: float, limits: Limits) -> None: ...


async def look_for_stalls(
    live: Callable[[], Iterable[Attempting]], limits: Limits, clock: Clock
) -> None:
    """Never returns. When the router itself stood still, what workers have sent meanwhile has yet
    to be read: then nobody is to blame before the next look."""
    every_s = min(_LOOK_S, limits.answer_s / 4, limits.stream_idle_s / 4)
    looked_s = clock.now()
    while True:
        await clock.sleep(every_s)
        now = clock.now()
        stood_still = now - looked_s > 2 * every_s
        looked_s = now
        if not stood_still:
            for one in list(live()):
                one.give_up_if_stalled(now, limits)
