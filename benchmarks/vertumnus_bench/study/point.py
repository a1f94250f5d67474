"""One simulation of the study: all that decides what comes of it."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import msgspec
from vertumnus_sim.metrics import Row

#: The cluster of the paper: 40 GPUs.
GPUS = 40
NODE_GPUS = 8
DEGREES = (1, 2, 4)


class StudyError(ValueError):
    """The study cannot be made as asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all simulations share: the folder of the public traces, the prefill-time profile."""

    traces: Path
    profile: str


@dataclass(frozen=True, slots=True)
class Point:
    """``policy`` with ``settings`` (pairs, by name; ``hardware.`` and ``delays.`` too) on
    ``composition`` under the first ``requests`` (None: all) of ``workload``, at ``rate`` requests
    per second (None: as it comes). ``phase_share``: how long the phases of a varying workload
    are, of what they usually are. ``over_time``: TTFT over time is wanted too."""

    workload: str
    rate: float | None
    requests: int | None
    seed: int
    policy: str
    composition: str
    settings: tuple[tuple[str, str], ...] = ()
    phase_share: float = 1.0
    over_time: bool = False

    @classmethod
    def of(
        cls, workload: str, rate: float | None, settings: Mapping[str, object], **rest: object
    ) -> Self:
        """With settings as a mapping, in any order and of any type."""
        pairs = tuple(sorted((name, str(value)) for name, value in settings.items()))
        return cls(workload=workload, rate=rate, settings=pairs, **rest)  # type: ignore[arg-type]

    def digest(self, setup: Setup) -> str:
        """A name for its result, the same wherever the traces lie. What is in the traces and in
        the profile is the store's to know."""
        what = (asdict(self), setup.profile, GPUS, NODE_GPUS, DEGREES)
        return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:24]

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" {self.rate:g}/s"
        return f"{self.workload}{rate}, {self.policy} on {self.composition}, seed {self.seed}"


class Bin(msgspec.Struct, frozen=True):
    """Requests that arrived within ``seconds`` from ``start_s`` on, and Σ of their TTFT."""

    start_s: float
    seconds: float
    requests: int
    total_s: float


class Result(msgspec.Struct, frozen=True):
    """What came of a point; ``bins`` in order of time, None unless asked for."""

    row: Row
    bins: list[Bin] | None = None
