"""Which prefills a leader has running, and for how long they have computed."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from vertumnus_patches.engine import FinishedPrefill
from vertumnus_router.protocol import PrefillDone

#: Requests aborted between two chunks never finish their prefill; old ones make room.
MAX_TRACKED = 4096


class PrefillLog:
    """Adds up the compute time of each request over its chunks.

    Steps end in the order in which they began. With SGLang's overlap scheduler the next one
    begins, on the host, before the last one's results are there; it computes from then on.
    """

    def __init__(self) -> None:
        self._compute_s: OrderedDict[str, float] = OrderedDict()
        self._begun_s: deque[float] = deque()
        self._free_s = 0.0

    def begin(self, rids: Iterable[str], now_s: float) -> tuple[str, ...]:
        """A prefill step of ``rids`` begins; those whose first chunk this is."""
        self._begun_s.append(now_s)
        new = tuple(dict.fromkeys(rid for rid in rids if rid not in self._compute_s))
        for rid in new:
            self._compute_s[rid] = 0.0
        while len(self._compute_s) > MAX_TRACKED:
            self._compute_s.popitem(last=False)
        return new

    def end(
        self, rids: Iterable[str], now_s: float, finished: Sequence[FinishedPrefill]
    ) -> tuple[PrefillDone, ...]:
        """The oldest prefill step has ended: charge it to everyone in it; the reports of those
        that are done."""
        if not self._begun_s:
            return ()  # it began before this rank led
        step_s = now_s - max(self._begun_s.popleft(), self._free_s)
        self._free_s = now_s
        for rid in rids:
            if rid in self._compute_s:
                self._compute_s[rid] += step_s
        return tuple(
            PrefillDone(
                rid=prefill.rid,
                input_tokens=prefill.input_tokens,
                cached_tokens=prefill.cached_tokens,
                compute_s=compute_s,
            )
            for prefill in finished
            if (compute_s := self._compute_s.pop(prefill.rid, None)) is not None
        )

    def other_step_ended(self, now_s: float) -> None:
        """A step without prefills has ended."""
        self._free_s = now_s
