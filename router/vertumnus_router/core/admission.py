"""What is let in at all, before the queue: rates and a share of the waiting for each client.

Pure: the caller brings the time. Clients are names, of which there are few. A request counts as
waiting from ``admit`` to ``began``: until its prefill is over, as far as is told, or its first byte
is there, or it has ended.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vertumnus_router.core.config import ConfigError
from vertumnus_router.core.effects import Decision

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """For each client: ``requests_per_minute`` and prompt ``tokens_per_minute``, in bursts of up
    to a minute's worth, and ``waiting``, how many requests may wait for the end of their prefill;
    None is no limit. ``reject_late``: turn down at once what no worker is predicted to begin to
    answer within the deadline that the client names."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    waiting: int | None = None
    reject_late: bool = False

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "waiting"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < math.inf:
                raise ConfigError(f"admission.{name} {value}: must be 1 or more, and finite")


@dataclass(frozen=True, slots=True)
class Refusal:
    """``retry_s``: when it may work, None if waiting does not help."""

    code: str
    message: str
    retry_s: float | None


class Bucket:
    """Tokens that come at a steady rate, up to a minute's worth of them."""

    __slots__ = ("_at_s", "_level", "capacity")

    def __init__(self, per_minute: float, now: float) -> None:
        self.capacity = per_minute
        self._level = per_minute
        self._at_s = now

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` may be taken, 0 for now. What is more than the bucket holds
        may be taken when it is full, or it never could; the debt is paid off later."""
        self._fill(now)
        lacks = min(amount, self.capacity) - self._level
        return max(0.0, lacks * _MINUTE_S / self.capacity)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        gained = (now - self._at_s) * self.capacity / _MINUTE_S
        self._level = min(self.capacity, self._level + gained)
        self._at_s = now


class Admission:
    """Counts what each client has waiting and how much it has asked for."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._waiting: Counter[str] = Counter()

    def waiting(self) -> dict[str, int]:
        """How many requests of each client wait."""
        return dict(self._waiting)

    def expect(self, client: str, now: float) -> Refusal | None:
        """Why not even the smallest request of the client would be let in, or None."""
        return self._refusal(client, 1, 1, now)

    def admit(self, client: str, tokens: int, prompts: int, now: float) -> Refusal | None:
        """Take in ``prompts`` of together ``tokens`` as one request, or say why not; then nothing
        is counted. A batch counts as its prompts."""
        refusal = self._refusal(client, tokens, prompts, now)
        if refusal is None:
            for bucket, amount, _ in self._buckets(client, tokens, prompts, now):
                bucket.take(amount, now)
            self._waiting[client] += 1
        return refusal

    def _refusal(self, client: str, tokens: int, prompts: int, now: float) -> Refusal | None:
        most = self._config.waiting
        if most is not None and self._waiting[client] >= most:
            return Refusal(
                "too_many_waiting",
                f"{most} requests of this client wait for their answer to begin, and no more may; "
                f"try again when one has begun",
                retry_s=1.0,
            )
        for bucket, amount, unit in self._buckets(client, tokens, prompts, now):
            wait_s = bucket.wait_s(amount, now)
            if wait_s > 0:
                return Refusal(
                    "rate_limited",
                    f"this client may send {bucket.capacity:g} {unit} a minute; try again in "
                    f"{math.ceil(wait_s)} s",
                    retry_s=wait_s,
                )
        return None

    def _buckets(
        self, client: str, tokens: int, prompts: int, now: float
    ) -> Iterator[tuple[Bucket, int, str]]:
        """Each bucket with what the request takes of it."""
        config = self._config
        if (rate := config.requests_per_minute) is not None:
            yield self._requests.setdefault(client, Bucket(rate, now)), prompts, "requests"
        if (rate := config.tokens_per_minute) is not None:
            yield self._tokens.setdefault(client, Bucket(rate, now)), tokens, "prompt tokens"

    def began(self, client: str) -> None:
        """A request that was let in waits no longer: it is being answered, or over."""
        self._waiting[client] -= 1
        if self._waiting[client] <= 0:
            del self._waiting[client]


def lateness(decision: Decision, deadline_s: float) -> Refusal | None:
    """Why no worker can begin to answer within ``deadline_s`` from now, None if one is predicted
    to, or if there is no prediction because none serves: the queue deals with that."""
    if not decision.candidates:
        return None
    soonest = min(decision.candidates, key=lambda terms: terms.queue_s + terms.service_s)
    predicted_s = soonest.queue_s + soonest.service_s
    if predicted_s <= deadline_s:
        return None
    # Once the queue is worked off, if the prefill itself is fast enough.
    helps = soonest.service_s <= deadline_s
    return Refusal(
        "deadline_unmeetable",
        f"no worker is predicted to begin its answer within {deadline_s:g} s: the soonest needs "
        f"{predicted_s:.3g} s, {soonest.queue_s:.3g} s of them in the queue",
        retry_s=predicted_s - deadline_s if helps else None,
    )
