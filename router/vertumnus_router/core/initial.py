"""The composition that a pool starts with, from a historical workload and κ (section 6)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vertumnus_router.core.demand import ServiceTime, Window
from vertumnus_router.lattice import Block, format_composition


@dataclass(frozen=True, slots=True)
class PastRequest:
    """One request of the historical workload: R and P in tokens."""

    at_s: float
    uncached_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class InitialComposition:
    """``demand_s``: of the busiest window, ``capacity_s``: Σ κ_C of the workers, both in seconds
    a window at the smallest degree; at most ``upper`` of the capacity is to be used. ``rejected``
    are the compositions of more large workers that have too little, with their capacity."""

    composition: str
    demand_s: float
    capacity_s: float
    upper: float
    window_s: float
    windows: int
    rejected: tuple[tuple[str, float], ...]

    @property
    def suffices(self) -> bool:
        return self.demand_s <= self.upper * self.capacity_s

    def __str__(self) -> str:
        lines = [
            f"the busiest of {self.windows} windows of {self.window_s:g} s asks for "
            f"{self.demand_s:.2f} s of prefill at the smallest degree"
        ]
        for name, capacity_s in self.rejected:
            lines.append(f"{name}: {_use(self.demand_s, capacity_s)}, more than {self.upper:.0%}")
        use = _use(self.demand_s, self.capacity_s)
        last = "the most large workers that have the capacity"
        if not self.suffices:
            last = "no composition has the capacity, this one has the most"
        return "\n".join([*lines, f"{self.composition}: {use}; {last}"])


def initial_composition(
    size: int,
    degrees: Sequence[int],
    history: Sequence[PastRequest],
    service_s: ServiceTime,
    kappa: Mapping[int, float],
    *,
    window_s: float,
    upper: float,
) -> InitialComposition:
    """Of the compositions that keep the busiest window below ``upper`` of their capacity, the one
    of the most workers of the largest degree, then of the next smaller one, and so on; the one
    of the largest capacity if there is none.

    ``kappa`` is κ_C as profiles carry it: seconds of work Ê_C that a worker bears per second. The
    whole history says how many seconds at the smallest degree that is.

    Raises:
        ValueError: without a history, or without κ for a degree.
    """
    missing = sorted(set(degrees) - kappa.keys())
    if missing:
        raise ValueError(f"κ is not known for degree {', '.join(map(str, missing))}")
    if not history:
        raise ValueError("the history has no requests")
    windows = _windows(history, sorted(set(degrees)), service_s, window_s)
    demand_s = max(w.demand(window_s, w.start_s + window_s).seconds for w in windows)
    whole = Window(0.0, tuple(sorted(set(degrees))))
    for request in history:
        _add(whole, request, service_s)
    limits = whole.kappa(kappa, 0.0, window_s)
    rejected: list[tuple[str, float]] = []
    for blocks in compositions(size, degrees):
        name = format_composition(blocks)
        capacity_s = sum(limits[block.degree] for block in blocks)
        if demand_s <= upper * capacity_s:
            break
        rejected.append((name, capacity_s))
    else:
        if not rejected:
            raise ValueError(f"{size} ranks cannot be filled with these degrees")
        name, capacity_s = max(rejected, key=lambda one: one[1])
        rejected.remove((name, capacity_s))
    return InitialComposition(
        composition=name,
        demand_s=demand_s,
        capacity_s=capacity_s,
        upper=upper,
        window_s=window_s,
        windows=len(windows),
        rejected=tuple(rejected),
    )


def compositions(size: int, degrees: Sequence[int]) -> Iterator[tuple[Block, ...]]:
    """Every number of workers of each degree that fills ``size`` ranks, those with the most of the
    largest degree first. Large blocks come first in a pool, so that all are aligned."""
    return _fillings(0, size, sorted(set(degrees), reverse=True))


def _fillings(first: int, size: int, degrees: Sequence[int]) -> Iterator[tuple[Block, ...]]:
    if first == size:
        yield ()
        return
    if not degrees:
        return
    degree = degrees[0]
    for count in range((size - first) // degree, -1, -1):
        blocks = tuple(Block(first + i * degree, degree) for i in range(count))
        for rest in _fillings(first + count * degree, size, degrees[1:]):
            yield blocks + rest


def _windows(
    history: Sequence[PastRequest],
    ladder: Sequence[int],
    service_s: ServiceTime,
    window_s: float,
) -> list[Window]:
    """Those of ``window_s`` seconds in which anything arrived."""
    start_s = min(request.at_s for request in history)
    found: dict[int, Window] = {}
    for request in history:
        number = int((request.at_s - start_s) // window_s)
        window = found.setdefault(number, Window(start_s + number * window_s, tuple(ladder)))
        _add(window, request, service_s)
    return list(found.values())


def _add(window: Window, request: PastRequest, service_s: ServiceTime) -> None:
    window.add(service_s, request.uncached_tokens, request.cached_tokens, is_long=False)


def _use(demand_s: float, capacity_s: float) -> str:
    return f"{demand_s / capacity_s:.0%} of its capacity of {capacity_s:.2f} s"
