"""The GPUs of this machine, as the driver's tool tells of them; sets up no CUDA here."""

import logging
import subprocess
from collections.abc import Callable, Sequence

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.environment import visible_gpus
from sgl_vertumnus.errors import ConfigurationError, UnsupportedFeature
from sgl_vertumnus.gpu_topology import Topology, UnknownTopology, devices_of, judge

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60
Tool = Callable[[Sequence[str]], str]


def nvidia_smi(arguments: Sequence[str]) -> str:
    """What the tool prints. Raises ``ConfigurationError`` where it does not run."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigurationError(f"nvidia-smi {' '.join(arguments)}: {exc}") from exc
    if done.returncode:
        raise ConfigurationError(f"nvidia-smi {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def check_gpus(config: PoolConfig, tool: Tool = nvidia_smi) -> None:
    """Whether every rank of the pool has a GPU of its own, and blocks suit their connections.

    Raises:
        UnsupportedFeature: when they do not.
        ConfigurationError: when the tool does not run.
    """
    uuids = tool(["--query-gpu=uuid", "--format=csv,noheader"]).split()
    try:
        devices = devices_of(visible_gpus(), uuids, config.size)
    except ValueError as exc:
        raise UnsupportedFeature([str(exc)]) from exc
    if config.degrees[-1] == 1:
        return
    try:
        topology = Topology.parse(tool(["topo", "-m"]))
    except UnknownTopology as exc:
        logger.warning("the connections of the GPUs are not known (%s)", exc)
        return
    verdict = judge(topology.of(devices), config.degrees)
    for warning in verdict.warnings:
        logger.warning("%s", warning)
    if verdict.refusals:
        raise UnsupportedFeature(list(verdict.refusals))
