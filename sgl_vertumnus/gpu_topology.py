"""How the GPUs of a machine reach each other, and which blocks of ranks that suits. Pure.

The ranks of a block gather new KV in every layer. Over NVLink that is a fraction of the layer's
time; over PCIe and the link between processors it may be most of it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vertumnus_router.lattice import Block, lattice

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+$")
_NVLINK = re.compile(r"NV\d+$")
#: Through the link between NUMA nodes, in nvidia-smi's words.
_ACROSS_NUMA = "SYS"


class UnknownTopology(ValueError):
    """The text is not what ``nvidia-smi topo -m`` prints."""


@dataclass(frozen=True, slots=True)
class Topology:
    """``links[a][b]``: how device a reaches device b, in nvidia-smi's words (NV18, PIX, …, SYS)."""

    links: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """The matrix that ``nvidia-smi topo -m`` prints, its GPUs only.

        Raises:
            UnknownTopology: when there is no such matrix in ``text``.
        """
        lines = [line.split() for line in _ANSI.sub("", text).splitlines()]
        count = next(
            (len(gpus) for words in lines if (gpus := [w for w in words if _GPU.match(w)])), 0
        )
        rows = [
            tuple(words[1 : count + 1])
            for words in lines
            if words and _GPU.match(words[0]) and "X" in words[1 : count + 1]
        ]
        if not rows or len(rows) != count or any(len(row) != count for row in rows):
            raise UnknownTopology("no square matrix of GPUs, as nvidia-smi topo -m prints it")
        return cls(tuple(rows))

    def of(self, devices: Sequence[int]) -> "Topology":
        """That of ``devices`` only, in their order. Raises IndexError for one that is not there."""
        return Topology(tuple(tuple(self.links[a][b] for b in devices) for a in devices))

    @property
    def has_nvlink(self) -> bool:
        return any(_NVLINK.match(link) for row in self.links for link in row)

    def leaves_nvlink(self, block: Block) -> bool:
        """Whether two ranks of the block reach each other by something else than NVLink."""
        return any(not _NVLINK.match(link) for link in self._pairs(block))

    def leaves_numa(self, block: Block) -> bool:
        """Whether two ranks of the block reach each other through the link between NUMA nodes."""
        return any(link == _ACROSS_NUMA for link in self._pairs(block))

    def _pairs(self, block: Block) -> Iterator[str]:
        return (self.links[a][b] for a in block.ranks for b in block.ranks if a != b)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the lattice of a pool makes of a topology: ``refusals`` stop it, ``warnings`` do not."""

    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def judge(topology: Topology, degrees: Sequence[int]) -> Verdict:
    """Look at every block that a pool of one rank a device could form.

    Where there is NVLink, a block that leaves it is refused: it would be slower than smaller ones.
    Where there is none, all blocks share that fate, and the widest distance is only told.
    """
    size = len(topology.links)
    blocks = [block for block in lattice(size, degrees) if block.degree > 1]
    if topology.has_nvlink:
        torn = [block for block in blocks if topology.leaves_nvlink(block)]
        return Verdict(refusals=(_torn(torn, blocks),)) if torn else Verdict()
    far = [block for block in blocks if topology.leaves_numa(block)]
    if not far:
        return Verdict()
    return Verdict(
        warnings=(
            f"the ranks of {_named(far)} are on different NUMA nodes and have no NVLink: every "
            f"layer gathers KV through the link between processors. Leave out of --cp-degrees "
            f"what the profile of this pool shows to be no faster",
        )
    )


def _torn(torn: Sequence[Block], blocks: Sequence[Block]) -> str:
    bad = {block.degree for block in torn}
    whole = sorted({block.degree for block in blocks} - bad)
    smaller = ",".join(map(str, [1, *whole]))
    return (
        f"the ranks of {_named(torn)} are not all connected by NVLink: use --cp-degrees {smaller}, "
        f"or order the devices in CUDA_VISIBLE_DEVICES so that those that are stand side by side"
    )


def _named(blocks: Sequence[Block]) -> str:
    names = [f"{block.first}-{block.ranks[-1]}" for block in blocks]
    return f"block{'s' if len(names) > 1 else ''} {', '.join(names)}"


def devices_of(visible: str | None, uuids: Sequence[str], size: int) -> list[int]:
    """The device of every rank, as the driver numbers them: rank r computes on the r-th that
    is visible.

    ``visible`` is CUDA_VISIBLE_DEVICES, ``uuids`` are those of all devices, in the driver's order.

    Raises:
        ValueError: naming what is missing or not understood.
    """
    if visible is None:
        devices = list(range(len(uuids)))
    else:
        devices = [_device(word.strip(), uuids) for word in visible.split(",") if word.strip()]
    if len(devices) < size:
        raise ValueError(
            f"--pool-size {size}: every rank needs a GPU of its own, and {len(devices)} "
            f"{'is' if len(devices) == 1 else 'are'} visible"
        )
    return devices[:size]


def _device(word: str, uuids: Sequence[str]) -> int:
    if word.isdecimal() and int(word) < len(uuids):
        return int(word)
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(word)]
    if not word.isdecimal() and len(found) == 1:
        return found[0]
    raise ValueError(f"CUDA_VISIBLE_DEVICES names {word}, and this machine has no such GPU")
