"""A workload that changes: phases with a rate and a mix of other workloads each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from vertumnus_sim.workloads.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Phase:
    """``mix``: of each workload how much, in any unit. Raises ``ValueError`` for what makes no
    sense."""

    seconds: float
    rate_per_s: float
    mix: Mapping[str, float]

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.rate_per_s > 0):
            raise ValueError("a phase has seconds and a rate above 0")
        if not self.mix or min(self.mix.values()) < 0 or not sum(self.mix.values()) > 0:
            raise ValueError("a phase has shares of 0 or more, and one above 0")

    @classmethod
    def parse(cls, text: str) -> "Phase":
        """``SECONDS:RATE:NAME=SHARE[,NAME=SHARE]``, as ``60:110:tool-agent=3,production=1``.

        Raises ``ValueError``.
        """
        try:
            seconds, rate, mix = text.split(":")
            shares = dict(part.split("=") for part in mix.split(","))
            phase = cls(float(seconds), float(rate), {n: float(s) for n, s in shares.items()})
        except ValueError as exc:
            raise ValueError(
                f"{text!r} is no phase ({exc}); one is SECONDS:RATE:NAME=SHARE[,NAME=SHARE]"
            ) from exc
        return phase


#: A surge of short tool calls, then longer prompts at a lower rate.
PHASES = (
    Phase(60, 52, {"tool-agent": 1.0}),
    Phase(60, 110, {"tool-agent": 1.0}),
    Phase(60, 40, {"tool-agent": 1.0, "production": 1.0}),
    Phase(60, 26, {"production": 3.0, "l-eval": 1.0}),
)


def time_varying(
    phases: Sequence[Phase], workloads: Mapping[str, Sequence[TraceRequest]], seed: int
) -> list[TraceRequest]:
    """Independent arrivals at the rate of each phase; what comes is the next request of a
    workload, drawn by the phase's mix. Different workloads share nothing.

    Raises ``ValueError`` when a workload is not there, has too few requests, or blocks of
    another size than the others.
    """
    named = {name for phase in phases for name, share in phase.mix.items() if share > 0}
    if unknown := sorted(named - workloads.keys()):
        raise ValueError(f"no workload {', '.join(unknown)}; there are {', '.join(workloads)}")
    if len({workloads[name][0].block_tokens for name in named}) > 1:
        raise ValueError("workloads with different block sizes cannot be mixed")
    source = Random(f"varying {seed}")
    apart = {name: iter(rows) for name, rows in _apart(workloads, sorted(named)).items()}
    found: list[TraceRequest] = []
    for at_s, phase in _arrivals(phases, source):
        (name,) = source.choices(list(phase.mix), list(phase.mix.values()))
        request = next(apart[name], None)
        if request is None:
            raise ValueError(
                f"{name} has {len(workloads[name])} requests, used up at {at_s:.0f} s; take "
                "shorter phases or lower rates"
            )
        found.append(replace(request, arrival_s=at_s))
    return found


def _arrivals(phases: Sequence[Phase], source: Random) -> Iterator[tuple[float, Phase]]:
    ends_s = list(accumulate(phase.seconds for phase in phases))
    for phase, end_s in zip(phases, ends_s, strict=True):
        # Independent arrivals have no memory: each phase can begin anew.
        at_s = end_s - phase.seconds
        while (at_s := at_s + source.expovariate(phase.rate_per_s)) < end_s:
            yield at_s, phase


def _apart(
    workloads: Mapping[str, Sequence[TraceRequest]], names: Sequence[str]
) -> dict[str, list[TraceRequest]]:
    """The workloads' requests with ids that no two workloads have in common."""
    first = 0
    found: dict[str, list[TraceRequest]] = {}
    for name in names:
        ids: dict[int, int] = {}
        found[name] = [
            replace(
                request,
                blocks=tuple(ids.setdefault(b, first + len(ids)) for b in request.blocks),
            )
            for request in workloads[name]
        ]
        first += len(ids)
    return found
