"""Which workers are left alone for a while, for what they answered.

Two reasons, kept apart. A worker's circuit breaker opens when attempts fail one after the other, or
half of them for long enough: it gets nothing for ``open_s``, then one request at a time as a probe,
until enough of them came to a first token. Backpressure (429, 503) is no failure: the worker is
paused for as long as it asked, or for a time that grows while it goes on.

A breaker never leaves a request without a worker: where it would, it does not count, and that is
counted. A pause does count, for the request can wait for its end.

Nothing is asked of a clock: times run out in ``advance``. Every method is cheap while all is well.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vertumnus_router.core.config import BackoffConfig, BreakerConfig
from vertumnus_router.core.effects import BreakerChanged
from vertumnus_router.core.types import BreakerState, PoolId, RequestId, WorkerId
from vertumnus_router.core.workers import Candidate

#: Attempts that are remembered, and failures among them that open a breaker: so many times those
#: that open it in a row.
_REMEMBERED, _TOO_MANY = 4, 2


@dataclass(slots=True)
class _Record:
    """A worker that failed lately. ``failures``: when, and how many successes there were between
    the one before and this one; ``good``: those since the last. ``probe``: the request that a
    half-open breaker let through. ``paused_until_s``: None while it is not paused."""

    candidate: Candidate
    failures: deque[tuple[float, int]] = field(default_factory=deque)
    good: int = 0
    state: BreakerState = BreakerState.CLOSED
    reason: str = ""
    open_until_s: float = 0.0
    successes: int = 0
    probe: RequestId | None = None
    paused_until_s: float | None = None
    pauses: int = 0
    last_s: float = 0.0

    @property
    def shut(self) -> bool:
        """Whether the breaker lets nothing through at the moment."""
        if self.state is BreakerState.HALF_OPEN:
            return self.probe is not None
        return self.state is BreakerState.OPEN


class Breakers:
    """The breakers and pauses of all workers; only those that failed lately take any memory."""

    def __init__(self, breaker: BreakerConfig, backoff: BackoffConfig, seed: int) -> None:
        self._breaker = breaker
        self._backoff = backoff
        self._seed = seed
        self._records: dict[WorkerId, _Record] = {}
        #: how often a breaker opened, half-open ones included
        self.opened = 0
        #: how often a request went to a worker whose breaker was open, for want of another
        self.overridden = 0

    @property
    def quiet(self) -> bool:
        """Whether there is nobody to leave alone."""
        # Not a generator: this is asked for every request.
        for record in self._records.values():
            if record.state is not BreakerState.CLOSED or record.paused_until_s is not None:
                return False
        return True

    # -- questions -------------------------------------------------------------------------------

    def willing(self, positions: Sequence[int], each: Sequence[Candidate]) -> Sequence[int]:
        """Which of the candidates at ``positions`` may get a request: none that is paused, and
        none whose breaker is shut, unless all are."""
        if self.quiet:
            return positions
        found = [(at, self._of(each[at])) for at in positions]
        if not all(record is not None and record.shut for _, record in found):
            found = [(at, record) for at, record in found if record is None or not record.shut]
        return [at for at, record in found if record is None or record.paused_until_s is None]

    def refusal(self, candidate: Candidate) -> str | None:
        """Why the worker gets nothing at the moment, or None."""
        record = self._of(candidate)
        if record is None:
            return None
        if record.shut:
            return f"its circuit breaker is {record.state.value}: {record.reason}"
        return None if record.paused_until_s is None else record.reason

    def state(self, candidate: Candidate) -> BreakerState:
        record = self._of(candidate)
        return BreakerState.CLOSED if record is None else record.state

    def probes(self) -> Iterable[tuple[WorkerId, RequestId]]:
        """The requests that are probes, and of whom."""
        for worker, record in self._records.items():
            if record.probe is not None:
                yield worker, record.probe

    # -- what happens ----------------------------------------------------------------------------

    def sent(self, candidate: Candidate, request: RequestId) -> None:
        """The request goes to the worker."""
        record = self._of(candidate)
        if record is None:
            return
        if record.shut:
            self.overridden += 1
        elif record.state is BreakerState.HALF_OPEN:
            record.probe = request

    def left(self, worker: WorkerId, request: RequestId) -> None:
        """The prefill of the request is over, somehow; its outcome was told before."""
        record = self._records.get(worker)
        if record is not None and record.probe == request:
            record.probe = None

    def succeeded(self, candidate: Candidate, request: RequestId) -> list[BreakerChanged]:
        """The worker brought the request to its first token."""
        record = self._of(candidate)
        if record is None or record.state is BreakerState.OPEN:
            return []  # what was sent before it opened proves nothing
        if record.state is BreakerState.HALF_OPEN:
            if record.probe != request:
                return []
            record.successes += 1
            if record.successes < self._breaker.success_threshold:
                return []
            self._clear(record)
            reason = f"{record.successes} probe(s) in a row went well"
            return [BreakerChanged(candidate.id, BreakerState.CLOSED, reason)]
        record.good += 1
        if record.paused_until_s is None:
            record.pauses = 0
        if not record.failures or record.good >= self._remembered:
            self._clear(record)
        return []

    def failed(
        self,
        candidate: Candidate,
        request: RequestId,
        cause: str,
        now: float,
        *,
        answered: bool = False,
    ) -> list[BreakerChanged]:
        """The request failed at the worker, by no fault of its own and not for want of room.
        ``answered``: behind its first token, which counted as a success until now."""
        if not self._breaker.enabled:
            return []
        record = self._recall(candidate, now)
        if record.state is BreakerState.HALF_OPEN and record.probe == request:
            return [self._open(record, f"a probe failed: {cause}", now)]
        if record.state is not BreakerState.CLOSED:
            return []
        if answered:
            _take_back(record)
        record.failures.append((now, record.good))
        record.good = 0
        failures = self._forget_failures(record, now)
        row = _row(failures)
        if row >= self._breaker.failure_threshold:
            return [self._open(record, f"{row} failures in a row: {cause}", now)]
        if len(failures) >= _TOO_MANY * self._breaker.failure_threshold:
            reason = f"{len(failures)} of the last {_attempts(failures)} attempts failed: {cause}"
            return [self._open(record, reason, now)]
        return []

    def pressed(self, candidate: Candidate, retry_after_s: float | None, now: float) -> None:
        """The worker answered that it has no room, and to come back after so long if it said."""
        record = self._recall(candidate, now)
        longest_s = self._backoff.longest_s
        pause_s = retry_after_s
        if pause_s is None:
            growth = self._backoff.multiplier ** min(record.pauses, 64)
            pause_s = min(longest_s, self._backoff.initial_s * growth)
            pause_s *= 1 + self._backoff.jitter * self._draw(candidate.id, record.pauses)
        record.pauses += 1
        until_s = now + min(longest_s, pause_s)
        record.paused_until_s = max(until_s, record.paused_until_s or until_s)
        if record.state is BreakerState.CLOSED:
            record.reason = "it answered that it has no room"

    def advance(self, now: float) -> list[BreakerChanged]:
        """Let pauses end, let open breakers take a probe, forget what was long ago."""
        changes = []
        for worker, record in list(self._records.items()):
            if record.paused_until_s is not None and now >= record.paused_until_s:
                record.paused_until_s = None
            if record.state is BreakerState.OPEN and now >= record.open_until_s:
                record.state, record.successes = BreakerState.HALF_OPEN, 0
                changes.append(BreakerChanged(worker, record.state, record.reason))
            elif (
                record.paused_until_s is None
                and record.probe is None
                and record.state is not BreakerState.OPEN
                and now - max(record.last_s, record.open_until_s) > self._breaker.window_s
            ):
                # Half-open, and for so long nobody went there: mostly it is another life's.
                del self._records[worker]
                if record.state is BreakerState.HALF_OPEN:
                    reason = "nothing was sent there for long"
                    changes.append(BreakerChanged(worker, BreakerState.CLOSED, reason))
        return changes

    def forget(self, pool: PoolId) -> None:
        """The pool has left."""
        for worker, record in list(self._records.items()):
            if record.candidate.pool.pool == pool:
                del self._records[worker]

    @property
    def _remembered(self) -> int:
        return _REMEMBERED * self._breaker.failure_threshold

    def _forget_failures(self, record: _Record, now: float) -> deque[tuple[float, int]]:
        """The failures that still count."""
        failures = record.failures
        while now - failures[0][0] > self._breaker.window_s or (
            _attempts(failures) > self._remembered
        ):
            failures.popleft()
        return failures

    # -- records ---------------------------------------------------------------------------------

    def _of(self, candidate: Candidate) -> _Record | None:
        """What is known of the worker in its present life."""
        record = self._records.get(candidate.id)
        if record is None or record.candidate.lives != candidate.lives:
            return None
        return record

    def _recall(self, candidate: Candidate, now: float) -> _Record:
        record = self._of(candidate)
        if record is None:
            record = self._records[candidate.id] = _Record(candidate)
        record.last_s = now
        return record

    def _clear(self, record: _Record) -> None:
        """Nothing is held against the worker any more, but for a pause that it asked for."""
        if record.paused_until_s is None:
            del self._records[record.candidate.id]
        else:
            record.state, record.good = BreakerState.CLOSED, 0
            record.failures.clear()

    def _open(self, record: _Record, reason: str, now: float) -> BreakerChanged:
        record.state, record.reason = BreakerState.OPEN, reason
        record.open_until_s = now + self._breaker.open_s
        record.failures.clear()
        record.good, record.probe = 0, None
        self.opened += 1
        return BreakerChanged(record.candidate.id, record.state, reason)

    def _draw(self, worker: WorkerId, pauses: int) -> float:
        """Between 0 and 1, so that routers with other seeds do not come back together."""
        digest = hashlib.blake2b(f"{self._seed}/{worker}/{pauses}".encode(), digest_size=4)
        return int.from_bytes(digest.digest()) / 2**32


def _take_back(record: _Record) -> None:
    """One of the last successes was none."""
    if record.good:
        record.good -= 1
        return
    for at, (when, good) in reversed(list(enumerate(record.failures))):
        if good:
            record.failures[at] = (when, good - 1)
            return


def _attempts(failures: deque[tuple[float, int]]) -> int:
    """How many there were from the first of these failures to the last."""
    return len(failures) + sum(good for _, good in failures) - failures[0][1]


def _row(failures: deque[tuple[float, int]]) -> int:
    """How many of the last ones had no success between them."""
    row = 1
    for _, good in reversed(failures):
        if good:
            break
        row += 1
    return min(row, len(failures))
