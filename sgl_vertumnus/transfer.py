"""What sending KV to decode servers needs of this machine."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sgl_vertumnus.errors import UnsupportedFeature

_RDMA_DEVICES = Path("/sys/class/infiniband")
_IMPORT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Engine:
    """A transfer engine: the module that SGLang imports, and how to get what it needs."""

    module: str
    package: str
    libraries: str


_MOONCAKE = Engine(
    module="mooncake.engine",
    package="pip install 'sgl-vertumnus[pd]' (on a machine with GPUs: mooncake-transfer-engine)",
    libraries="apt-get install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200",
)
_NIXL = Engine(
    module="nixl._api",
    package="pip install nixl, and exactly one of nixl-cu12 and nixl-cu13",
    libraries="reinstall nixl for the CUDA of this machine",
)
_ENGINES = {"mooncake": _MOONCAKE, "mooncake_tcp": _MOONCAKE, "nixl": _NIXL}


def transfer_backend(asked: str, *, device: str, rdma_devices: Path = _RDMA_DEVICES) -> str:
    """SGLang's ``--disaggregation-transfer-backend`` for what the operator asked for: Mooncake
    goes over TCP where there is no RDMA device.

    Raises:
        UnsupportedFeature: when the engine cannot run here; it says what to install.
    """
    flag = f"--disaggregation-transfer-backend {asked}"
    engine = _ENGINES.get(asked)
    if engine is None:
        raise UnsupportedFeature([f"{flag}: use one of {', '.join(_ENGINES)}"])
    if engine is _NIXL and device == "cpu":
        raise UnsupportedFeature(
            [f"{flag}: SGLang registers GPU memory with NIXL; use mooncake_tcp on a CPU"]
        )
    if (reason := _why_not(engine)) is not None:
        raise UnsupportedFeature([f"{flag}: {reason}"])
    if asked == "mooncake" and not _has_entries(rdma_devices):
        return "mooncake_tcp"
    return asked


def _why_not(engine: Engine) -> str | None:
    """In a process of its own: a broken library can take its process along."""
    command = [sys.executable, "-c", f"import {engine.module}"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing {engine.module} takes more than {_IMPORT_TIMEOUT_S:.0f} s"
    if found.returncode == 0:
        return None
    last = found.stderr.strip().rpartition("\n")[2] or f"exit status {found.returncode}"
    remedy = engine.package if "ModuleNotFoundError" in last else engine.libraries
    return f"{last}; {remedy}"


def _has_entries(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())
