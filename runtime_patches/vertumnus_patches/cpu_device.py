"""The platform class behind ``cpu_platform``; imported by SGLang only, on CPU machines only."""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Plain torch on CPU cores: torch_native attention, gloo, no graphs, no pinned memory."""

    # OOT, not CPU: SGLang takes CPU to mean its own engine with sgl_kernel's CPU operators.
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
