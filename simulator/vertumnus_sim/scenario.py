"""What is simulated: the ranks, what connects them, and how long things take."""

import math
from dataclasses import dataclass
from typing import Self

from vertumnus_router.lattice import Block, CompositionError, check_degrees


class ScenarioError(ValueError):
    """A cluster that cannot be; the message says what could."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its links, and how workers keep their KV.

    ``kv_blocks`` of the trace's size fit a rank, a token has ``kv_token_bytes``; a step computes
    up to ``chunk_tokens`` uncached ones and takes ``noise`` (the standard deviation of its
    logarithm) more or less than the profile says; and longer by ``contention``, of itself, when
    all other ranks of the node compute as it begins. ``local_bytes_per_s`` is a rank's share of
    what connects a node, ``remote_bytes_per_s`` of what connects nodes, and prefill with decode;
    in each direction.

    Every rank holds all KV of its worker, as SGLang's ranks do, and each its own cache. With
    ``keep_one`` the copies beyond one go first; else each rank lets go of what it has used least
    recently. ``kv_partitioned``: the ranks of a worker share its KV out evenly instead, and a
    worker of degree C has one cache of C times as many blocks and C links. Such workers last.
    """

    kv_blocks: int = 1_100
    kv_token_bytes: int = 98_304
    chunk_tokens: int = 16_384
    noise: float = 0.08
    contention: float = 0.0
    local_bytes_per_s: float = 20e9
    remote_bytes_per_s: float = 20e9
    copy_latency_s: float = 0.002
    keep_one: bool = True
    kv_partitioned: bool = False

    def __post_init__(self) -> None:
        for name in (
            "kv_blocks",
            "kv_token_bytes",
            "chunk_tokens",
            "local_bytes_per_s",
            "remote_bytes_per_s",
        ):
            if not getattr(self, name) > 0:
                raise ScenarioError(f"{name} {getattr(self, name)}: must be above 0")
        for name in ("noise", "contention", "copy_latency_s"):
            if not getattr(self, name) >= 0:
                raise ScenarioError(f"{name} {getattr(self, name)}: must be 0 or more")


@dataclass(frozen=True, slots=True)
class Delays:
    """What lies between the router and the ranks, in seconds: from a dispatch until the rank has
    the request, from an event at a rank until the router has it, and how long ranks need to vote
    and to switch once they stand still. The router's timer runs every ``tick_s``, during a scan
    of its index every ``scan_tick_s``."""

    dispatch_s: float = 0.001
    report_s: float = 0.001
    vote_s: float = 0.002
    switch_s: float = 0.015
    tick_s: float = 0.1
    scan_tick_s: float = 0.01

    def __post_init__(self) -> None:
        for name in ("dispatch_s", "report_s", "vote_s", "switch_s"):
            if not getattr(self, name) >= 0:
                raise ScenarioError(f"{name} {getattr(self, name)}: must be 0 or more")
        for name in ("tick_s", "scan_tick_s"):
            if not getattr(self, name) > 0:
                raise ScenarioError(f"{name} {getattr(self, name)}: must be above 0")


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that dies, with all it holds, and does not come back."""

    at_s: float
    node: int
    rank: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``SECONDS:NODE/RANK``. Raises ``ValueError``."""
        seconds, _, place = text.partition(":")
        node, _, rank = place.partition("/")
        try:
            death = cls(float(seconds), int(node), int(rank))
        except ValueError:
            death = None
        if death is None or not 0 <= death.at_s < math.inf or death.node < 0 or death.rank < 0:
            raise ValueError(f"{text!r} is not SECONDS:NODE/RANK, as in 120:0/3")
        return death


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal size, each a prefill pool; decode is elsewhere and never short of room.

    ``composition`` are the blocks of each node. Build one with ``cluster``.
    """

    node_gpus: int
    degrees: tuple[int, ...]
    compositions: tuple[tuple[Block, ...], ...]
    hardware: Hardware = Hardware()
    delays: Delays = Delays()
    deaths: tuple[Death, ...] = ()

    def __post_init__(self) -> None:
        for death in self.deaths:
            if death.node >= len(self.compositions) or death.rank >= self.node_gpus:
                raise ScenarioError(
                    f"no rank {death.node}/{death.rank} to die: there are "
                    f"{len(self.compositions)} nodes of {self.node_gpus}, counted from 0"
                )

    @property
    def gpus(self) -> int:
        return self.node_gpus * len(self.compositions)


def lay_out(
    composition: str, gpus: int, node_gpus: int, degrees: tuple[int, ...]
) -> tuple[tuple[Block, ...], ...]:
    """The blocks of each node for a composition of the whole cluster, such as ``16x1,12x2``.

    The workers of each degree are dealt out to the nodes in turn, the largest degree first, so
    every node has about the same mix. Raises ``ScenarioError``.
    """
    if node_gpus < 1 or node_gpus & (node_gpus - 1):
        raise ScenarioError(f"a node of {node_gpus} GPUs: nodes have a power of two of them")
    if gpus < 1 or gpus % node_gpus:
        raise ScenarioError(f"{gpus} GPUs are no whole number of nodes of {node_gpus}")
    try:
        check_degrees(node_gpus, degrees)
    except CompositionError as exc:
        raise ScenarioError(f"degrees {degrees}: {exc}") from exc
    wanted = _counts(composition, degrees)
    total = sum(count * degree for degree, count in wanted.items())
    if total != gpus:
        raise ScenarioError(f"composition {composition!r} has {total} GPUs, not {gpus}")
    nodes: list[list[Block]] = [[] for _ in range(gpus // node_gpus)]
    for degree, count in sorted(wanted.items(), reverse=True):
        for _ in range(count):
            # Larger ones lie before it, so the next free rank is aligned.
            used = [sum(block.degree for block in node) for node in nodes]
            at = min(range(len(nodes)), key=used.__getitem__)
            if used[at] + degree > node_gpus:
                raise ScenarioError(
                    f"composition {composition!r}: no node has {degree} GPUs left for a worker"
                )
            nodes[at].append(Block(used[at], degree))
    return tuple(map(tuple, nodes))


def _counts(composition: str, degrees: tuple[int, ...]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for term in composition.split(","):
        count, _, degree = term.strip().lower().partition("x")
        if not (count.isdecimal() and degree.isdecimal() and int(degree) in degrees):
            raise ScenarioError(
                f"composition {composition!r}: {term.strip()!r} is not COUNTxDEGREE with a degree "
                f"of {', '.join(map(str, degrees))}"
            )
        counts[int(degree)] = counts.get(int(degree), 0) + int(count)
    return counts
