"""Bytes between ranks: flows share the links that they cross evenly."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vertumnus_sim.timeline import Timeline


@dataclass(slots=True, eq=False)
class Link:
    """One direction of what connects a rank to others, in bytes per second."""

    bytes_per_s: float
    flows: dict["Flow", None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over ``links``; ``left`` of them at ``as_of_s``."""

    links: tuple[Link, ...]
    left: float
    done: Callable[[], None]
    as_of_s: float
    bytes_per_s: float = 0.0
    version: int = 0


class Network:
    """A flow gets, of every link that it crosses, the same share as the others there, and goes
    at the pace of the smallest. What others leave of a share is not handed out again."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def send(self, size: float, links: tuple[Link, ...], done: Callable[[], None]) -> None:
        """Call ``done`` when ``size`` bytes have crossed the links."""
        flow = Flow(links, size, done, self._timeline.now)
        for link in links:
            link.flows[flow] = None
        self._share(flow)

    def _share(self, cause: Flow) -> None:
        """Give every flow on the links of ``cause`` its share anew."""
        now = self._timeline.now
        touched = {flow: None for link in cause.links for flow in link.flows}
        for flow in touched:
            pace = min(link.bytes_per_s / len(link.flows) for link in flow.links)
            if pace == flow.bytes_per_s:
                continue
            flow.left -= flow.bytes_per_s * (now - flow.as_of_s)
            flow.as_of_s, flow.bytes_per_s = now, pace
            flow.version += 1
            self._timeline.after(max(0.0, flow.left) / pace, self._arrive, flow, flow.version)

    def _arrive(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return  # its pace has changed since
        for link in flow.links:
            del link.flows[flow]
        self._share(flow)
        flow.done()
