"""Which prefills a leader has running, and for how long they have computed."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vertumnus_patches.engine import FinishedPrefill
from vertumnus_router.protocol import PrefillDone

#: Requests aborted between two chunks never finish their prefill; old ones make room.
MAX_TRACKED = 4096


class PrefillLog:
    """Adds up the compute time of each request over its chunks."""

    def __init__(self) -> None:
        self._compute_s: OrderedDict[str, float] = OrderedDict()

    def begin(self, rids: Iterable[str]) -> tuple[str, ...]:
        """Those of ``rids`` whose first chunk this is."""
        new = tuple(rid for rid in rids if rid not in self._compute_s)
        for rid in new:
            self._compute_s[rid] = 0.0
        while len(self._compute_s) > MAX_TRACKED:
            self._compute_s.popitem(last=False)
        return new

    def end(
        self, rids: Iterable[str], step_s: float, finished: Sequence[FinishedPrefill]
    ) -> tuple[PrefillDone, ...]:
        """Charge a step to everyone in it; the reports of those that are done."""
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
