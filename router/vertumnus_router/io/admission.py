"""Carries out what ``core.admission`` decides: the door that inference requests pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from vertumnus_router.clock import Clock
from vertumnus_router.core.admission import Admission, AdmissionConfig, Refusal, lateness
from vertumnus_router.core.effects import Decision
from vertumnus_router.core.types import Request
from vertumnus_router.io.access import Asker
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.asgi import Scope, header
from vertumnus_router.io.metrics import RouterMetrics

DEADLINE_HEADER = b"x-request-deadline-ms"
_MOST_RETRY_S = 86_400


@dataclass(slots=True)
class Ticket:
    """One request that was let in. ``began`` may be told more than once."""

    client: str
    admission: Admission
    waits: bool = True

    def began(self) -> None:
        """Its answer begins, or there will be none."""
        if self.waits:
            self.waits = False
            self.admission.began(self.client)


class Door:
    """Lets requests in, at the priority that their sender may ask for."""

    def __init__(
        self,
        config: AdmissionConfig,
        explain: Callable[[Request, float], Decision],
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        """``explain``: where a request would go now, and at what price."""
        self.admission = Admission(config)
        self._rejects_late = config.reject_late
        self._explain = explain
        self._metrics = metrics
        self._clock = clock

    def expect(self, asker: Asker) -> None:
        """``ApiError`` 429 for who may send nothing now, before work is put into the request."""
        if asker.limited:
            self._check(asker, self.admission.expect(asker.name, self._clock.now()))

    def enter(
        self, asker: Asker, request: Request, scope: Scope, arrived_s: float
    ) -> tuple[Request, Ticket]:
        """The request as it may enter the queue. ``ApiError`` 429 over the limits, or if it cannot
        meet its deadline; 400 for a deadline that is none."""
        request = msgspec.structs.replace(request, client=asker.name)
        if asker.max_priority is not None and request.priority > asker.max_priority:
            request = msgspec.structs.replace(request, priority=asker.max_priority)
        now = self._clock.now()
        if self._rejects_late and (deadline_s := _deadline_s(scope)) is not None:
            left_s = deadline_s - (now - arrived_s)
            self._check(asker, lateness(self._explain(request, now), left_s))
        if asker.limited:
            tokens, prompts = request.input_tokens, request.prompts
            self._check(asker, self.admission.admit(asker.name, tokens, prompts, now))
        self._metrics.admitted(asker.name, request.input_tokens)
        return request, Ticket(asker.name, self.admission, waits=asker.limited)

    def _check(self, asker: Asker, refusal: Refusal | None) -> None:
        if refusal is None:
            return
        self._metrics.refused(asker.name, refusal.code)
        headers = [] if refusal.retry_s is None else [retry_after(refusal.retry_s)]
        raise ApiError(429, refusal.code, refusal.message, headers=headers)


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """The header, in whole seconds: at least one, and a day at most."""
    return b"retry-after", str(min(_MOST_RETRY_S, max(1, math.ceil(seconds)))).encode()


def _deadline_s(scope: Scope) -> float | None:
    """The client's deadline for the first byte, in seconds from its arrival here."""
    given = header(scope, DEADLINE_HEADER)
    if given is None:
        return None
    if not given.isdigit() or not 0 < int(given[:12]) <= 86_400_000 or len(given) > 12:
        name = DEADLINE_HEADER.decode()
        raise ApiError(
            400,
            "invalid_deadline",
            f"{name} must be the milliseconds that the first byte may take, 1 to 86400000",
            param=name,
        )
    return int(given) / 1000
