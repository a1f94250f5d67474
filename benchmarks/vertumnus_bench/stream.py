"""What a client saw of one streamed answer, and whether it ended exactly once and whole.

SGLang's ``/generate`` streams the whole output so far in every event (unless the server runs
with ``--incremental-streaming-output``), so each must begin with the one before.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import orjson

from vertumnus_bench.workload import Ask

#: Enough to see what happened; a pool that is broken would fill pages.
_CAUSES = 20


class Fault(Enum):
    LOST = "lost"
    HUNG = "hung"
    DUPLICATED = "duplicated"
    WRONG = "wrong"


@dataclass(slots=True)
class Stream:
    """Fed with the data of the events as they come; ``faults`` says what was not right.

    Seconds count from the sending; ``first_s`` is None before the first token.
    """

    ask: Ask
    output: list[int] = field(default_factory=list)
    faults: list[tuple[Fault, str]] = field(default_factory=list)
    events: int = 0
    sent_at_s: float = 0.0
    first_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    left: bool = False
    worker: str = ""
    #: an event said why there is no more
    broke_off: bool = False
    _finished: bool = False
    _done: bool = False

    def event(self, data: bytes) -> None:
        """One event of the stream, without ``data:``."""
        self.events += 1
        if data == b"[DONE]":
            if self._done:
                self._fault(Fault.DUPLICATED, "the stream ended twice")
            self._done = True
            return
        if self._done or self._finished:
            self._fault(Fault.DUPLICATED, "an event came after the end")
        event = orjson.loads(data)
        if "error" in event:
            self.broke_off = True
            self._fault(Fault.LOST, f"the stream broke off: {event['error']}")
            return
        self._tokens(event["output_ids"])
        meta = event["meta_info"]
        if self.events == 1:
            self.prompt_tokens = meta["prompt_tokens"]
            self.cached_tokens = meta["cached_tokens"]
        if (reason := meta["finish_reason"]) is not None:
            self._finish(reason, meta["completion_tokens"])

    def close(self, cause: str | None = None) -> None:
        """The connection is over; ``cause``: refused or broken. Leaving is nobody's fault."""
        if self.left or any(fault in (Fault.LOST, Fault.HUNG) for fault, _ in self.faults):
            return
        if cause is not None:
            self._fault(Fault.LOST, cause)
        elif not (self._finished and self._done):
            self._fault(Fault.LOST, f"the stream stopped after {len(self.output)} tokens")

    def hang(self, cause: str) -> None:
        """Nothing comes any more, and the connection stays open."""
        self._fault(Fault.HUNG, cause)

    def differs(self, position: int, expected: int) -> None:
        """The reference has the token ``expected`` at ``position`` of the output."""
        got = self.output[position]
        self._fault(Fault.WRONG, f"token {position} is {got}, not {expected}")

    def _tokens(self, ids: list[int]) -> None:
        if ids[: len(self.output)] != self.output:
            self._fault(Fault.WRONG, "tokens were taken back")
        if len(ids) > self.ask.new_tokens:
            self._fault(Fault.DUPLICATED, f"{len(ids)} tokens instead of {self.ask.new_tokens}")
        self.output = ids

    def _finish(self, reason: dict[str, object], completion_tokens: int) -> None:
        self._finished = True
        if reason["type"] != "length":
            self._fault(Fault.LOST, f"ended by {reason}")
        elif len(self.output) < self.ask.new_tokens:
            self._fault(Fault.LOST, f"{len(self.output)} tokens of {self.ask.new_tokens}")
        elif len(self.output) != completion_tokens:
            told = f"{len(self.output)} tokens, and the engine counts {completion_tokens}"
            more = completion_tokens > len(self.output)
            self._fault(Fault.LOST if more else Fault.DUPLICATED, told)

    def _fault(self, fault: Fault, what: str) -> None:
        self.faults.append((fault, what))


def tally(streams: Iterable[Stream]) -> dict[str, int]:
    """How many streams were lost, hung, duplicated, wrong; one stream may be several of them."""
    kinds = Counter(kind for s in streams for kind in {fault for fault, _ in s.faults})
    return {kind.value: kinds[kind] for kind in Fault}


def causes(streams: Iterable[Stream]) -> dict[str, int]:
    """What was not right and how often: the most frequent, first."""
    found = Counter(f"{fault.value}: {what}" for s in streams for fault, what in s.faults)
    return dict(found.most_common(_CAUSES))


def hit_rate(streams: Iterable[Stream]) -> float:
    """Cached over all prompt tokens of the streams that began; 0 when none did."""
    began = [s for s in streams if s.output]
    asked = sum(s.prompt_tokens for s in began)
    return sum(s.cached_tokens for s in began) / asked if asked else 0.0
