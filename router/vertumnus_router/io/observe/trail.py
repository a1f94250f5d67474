"""What became of one request, written down as it goes."""

from dataclasses import dataclass, field
from typing import Any

from vertumnus_router.core.effects import Dispatch
from vertumnus_router.core.events import Failure
from vertumnus_router.core.types import Request, RequestId, WorkerId
from vertumnus_router.io.ttft import PARTS, Marks
from vertumnus_router.protocol import PrefillDone


@dataclass(slots=True)
class Trail:
    """Times are seconds of the router's clock. None: it has not happened, or nobody told.

    ``client_id`` is what the client calls the request. ``request`` is there once the prompt has
    been read, at ``described_s``. ``dispatch`` and ``marks`` are of the last attempt, ``failures``
    of those before it and, if it failed, of that one too. ``prefill`` is the engine's own account,
    of a request of one prompt. ``streams``: the answer is a stream of events, so its first byte
    says something of the first token. ``span`` belongs to whoever traces.
    """

    id: RequestId
    client_id: bytes
    method: str
    endpoint: str
    arrived_s: float
    request: Request | None = None
    described_s: float | None = None
    dispatched_s: float | None = None
    dispatch: Dispatch | None = None
    marks: Marks | None = None
    failures: list[tuple[WorkerId | None, Failure]] = field(default_factory=list)
    prefill: PrefillDone | None = None
    first_byte_s: float | None = None
    streams: bool = False
    ended_s: float | None = None
    outcome: str | None = None
    status: int | None = None
    span: Any = None

    @property
    def attempts(self) -> int:
        return 0 if self.dispatch is None else self.dispatch.attempt

    @property
    def input_tokens(self) -> int | None:
        return None if self.request is None else self.request.input_tokens

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first byte of a stream of events."""
        if self.first_byte_s is None or not self.streams:
            return None
        return self.first_byte_s - self.arrived_s

    def split(self) -> dict[str, float] | None:
        """``ttft_s`` in parts that add up to it, seconds."""
        if self.ttft_s is None or self.marks is None or self.dispatch is None:
            return None
        assert self.first_byte_s is not None
        handed_over = self.dispatch.pair is not None
        parts = self.marks.split(self.arrived_s, self.first_byte_s, handed_over=handed_over)
        return dict(zip(PARTS, parts, strict=True))
