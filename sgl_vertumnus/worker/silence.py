"""Who has not been heard for too long. Pure."""

from collections.abc import Iterable

from sgl_vertumnus.worker.control import ALIVE_S, SILENT_S

#: The listener looks up every second; this late, it was itself not running.
STOOD_STILL_S = 2.5 * ALIVE_S


class Silence:
    """All ``ranks`` are running at ``now``, whether or not they have been heard yet: one that
    stops before its first word is silent, too. Once it was, a rank counts from its next word on.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._heard_s = dict.fromkeys(ranks, now)
        self._asked_s = now

    def hear(self, rank: int, now: float) -> None:
        self._heard_s[rank] = now

    def overdue(self, now: float) -> list[int]:
        """Ranks that have just been silent for too long, each once.

        When the listener stood still, everybody was silent to it: then they get a new chance.
        """
        stood_still = now - self._asked_s > STOOD_STILL_S
        self._asked_s = now
        if stood_still:
            self._heard_s = dict.fromkeys(self._heard_s, now)
        late = [rank for rank, heard_s in self._heard_s.items() if now - heard_s > SILENT_S]
        for rank in late:
            del self._heard_s[rank]
        return late
