"""What a rank of a pool computes on, in words that tell one kind of machine from another."""

import contextlib
from pathlib import Path

from sgl_vertumnus.config import PoolConfig


def device_name(config: PoolConfig) -> str:
    """``AMD EPYC 9654, 2 threads a rank``, or the name of the GPU."""
    if config.device == "cpu":
        threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
        return f"{_cpu_name()}, {threads} a rank"
    return _gpu_name() or config.device


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    return "CPU"


def _gpu_name() -> str | None:
    """As the driver calls the first one: torch would set up CUDA in this process for that."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return None
    return name.decode() if isinstance(name, bytes) else str(name)
