"""The platform class behind ``cpu_platform``; imported by SGLang only, on CPU machines only."""

import math
from typing import Any

import numpy as np
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Plain torch on CPU cores: torch_native attention, gloo, no graphs, no pinned memory."""

    # OOT, not CPU: SGLang takes CPU to mean its own engine with sgl_kernel's CPU operators.
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        return _lazy_kv_pool() if kind == "mha" else None

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def _lazy_kv_pool() -> type:
    """SGLang's KV pool on pages that exist once they are written.

    Upstream fills the pool with zeros, which costs every rank its whole pool in memory, and
    seconds of page faults at start.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class LazyKVPool(MHATokenToKVPool):  # type: ignore[misc]
        def _create_buffers_normal(self) -> None:
            k_shape, v_shape = self._kv_buffer_shapes()
            self.k_buffer = [_untouched(k_shape, self.store_dtype) for _ in range(self.layer_num)]
            self.v_buffer = [_untouched(v_shape, self.store_dtype) for _ in range(self.layer_num)]

    return LazyKVPool


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of ``shape`` that the kernel provides on first touch (calloc, not memset)."""
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
