"""GPUs and their connections, from matrices in the forms that drivers print."""

import logging
from collections.abc import Sequence

import pytest
from vertumnus_router.lattice import Block

from sgl_vertumnus.errors import ConfigurationError, UnsupportedFeature
from sgl_vertumnus.gpu_topology import Topology, UnknownTopology, devices_of, judge
from sgl_vertumnus.gpus import check_gpus, nvidia_smi
from tests.worker.configs import config_of

#: An HGX H100: NVSwitch connects all.
H100 = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    NV18    NV18    0-47,96-143     0               N/A
GPU1    NV18     X      NV18    NV18    0-47,96-143     0               N/A
GPU2    NV18    NV18     X      NV18    48-95,144-191   1               N/A
GPU3    NV18    NV18    NV18     X      48-95,144-191   1               N/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""
#: Bridges between pairs, tabs and the underline of newer drivers, a NIC among the columns.
PAIRS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
#: PCIe only, two processors.
PCIE = """
        GPU0    GPU1    GPU2    GPU3    mlx4_0  CPU Affinity
GPU0     X      PIX     SYS     SYS     PHB     0-9,20-29
GPU1    PIX      X      SYS     SYS     PHB     0-9,20-29
GPU2    SYS     SYS      X      PHB     SYS     10-19,30-39
GPU3    SYS     SYS     PHB      X      SYS     10-19,30-39
mlx4_0  PHB     PHB     SYS     SYS      X
"""
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
UUIDS = [f"GPU-{n}{n}{n}{n}-0" for n in range(4)]


@pytest.mark.parametrize(
    ("text", "first_row"),
    [
        (H100, ("X", "NV18", "NV18", "NV18")),
        (PAIRS, ("X", "NV4", "SYS", "SYS")),
        (PCIE, ("X", "PIX", "SYS", "SYS")),
        (ONE, ("X",)),
    ],
)
def test_the_matrix_of_a_machine(text: str, first_row: tuple[str, ...]) -> None:
    topology = Topology.parse(text)
    assert topology.links[0] == first_row
    assert len(topology.links) == len(first_row)


@pytest.mark.parametrize("text", ["", "No devices were found", H100.replace("\nGPU3", "\nNIC3")])
def test_what_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(UnknownTopology):
        Topology.parse(text)


def test_every_block_is_fine_where_all_are_connected() -> None:
    verdict = judge(Topology.parse(H100), (1, 2, 4))
    assert not verdict.refusals and not verdict.warnings


def test_a_block_that_leaves_nvlink_is_refused() -> None:
    topology = Topology.parse(PAIRS)
    assert topology.leaves_nvlink(Block(0, 4)) and not topology.leaves_nvlink(Block(2, 2))
    (why,) = judge(topology, (1, 2, 4)).refusals
    assert "block 0-3" in why and "--cp-degrees 1,2" in why
    assert not judge(topology, (1, 2)).refusals


def test_devices_in_an_order_that_tears_the_pairs() -> None:
    (why,) = judge(Topology.parse(PAIRS).of([0, 2, 1, 3]), (1, 2)).refusals
    assert "blocks 0-1, 2-3" in why and "--cp-degrees 1," in why and "CUDA_VISIBLE_DEVICES" in why


def test_a_ring_of_links_does_not_connect_all() -> None:
    """Neighbours reach each other; the first and the third do not."""
    ring = (
        ("X", "NV1", "SYS", "NV1"),
        ("NV1", "X", "NV1", "SYS"),
        ("SYS", "NV1", "X", "NV1"),
        ("NV1", "SYS", "NV1", "X"),
    )
    (why,) = judge(Topology(ring), (1, 2, 4)).refusals
    assert "block 0-3" in why


def test_without_nvlink_the_distance_is_told() -> None:
    verdict = judge(Topology.parse(PCIE), (1, 2, 4))
    assert not verdict.refusals
    (warning,) = verdict.warnings
    assert "block 0-3" in warning and "NUMA" in warning
    assert not judge(Topology.parse(PCIE), (1, 2)).warnings


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, [0, 1]), ("3,1,0", [3, 1]), (f"{UUIDS[2]}, {UUIDS[0]}", [2, 0]), ("GPU-3,1", [3, 1])],
)
def test_ranks_compute_on_the_devices_that_are_visible(
    visible: str | None, devices: list[int]
) -> None:
    assert devices_of(visible, UUIDS, 2) == devices


@pytest.mark.parametrize(
    ("visible", "reason"),
    [("1", "1 is visible"), ("", "0 are visible"), ("0,7", "names 7"), ("0,GPU-x", "names GPU-x")],
)
def test_a_rank_without_a_device_is_refused(visible: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        devices_of(visible, UUIDS, 2)


# -- at start -------------------------------------------------------------------------------------


class Driver:
    def __init__(self, topology: str) -> None:
        self.topology = topology

    def __call__(self, arguments: Sequence[str]) -> str:
        return self.topology if arguments[0] == "topo" else "\n".join(UUIDS) + "\n"


CONFIG = config_of(4, (1, 2, 4), device="cuda")


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_pool_fits_its_machine(caplog: pytest.LogCaptureFixture) -> None:
    check_gpus(CONFIG, Driver(H100))
    assert not caplog.records


def test_a_pool_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedFeature, match="NVLink"):
        check_gpus(CONFIG, Driver(PAIRS))
    check_gpus(config_of(4, (1,), device="cuda"), Driver(PAIRS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UnsupportedFeature, match="a GPU of its own"):
        check_gpus(CONFIG, Driver(H100))


@pytest.mark.parametrize(("text", "word"), [(PCIE, "NUMA"), ("?", "not known")])
def test_what_is_only_slow_or_unknown_is_said(
    text: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_gpus(CONFIG, Driver(text))
    assert word in caplog.text


def test_a_machine_without_the_drivers_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="nvidia-smi topo -m"):
        nvidia_smi(["topo", "-m"])
