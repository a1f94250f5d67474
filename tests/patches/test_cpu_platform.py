"""The CPU platform: out of the way where there is a GPU, and a KV pool that costs what it holds."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vertumnus_patches.cpu_platform import activate

DEVICES = ("cuda", "xpu", "backends.mps")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for device in DEVICES:
        monkeypatch.setattr(f"torch.{device}.is_available", lambda: False)
    return monkeypatch


def test_active_without_an_accelerator(no_gpu: pytest.MonkeyPatch) -> None:
    assert activate() == "vertumnus_patches.cpu_device.CpuPlatform"


@pytest.mark.parametrize("device", DEVICES)
def test_inert_with_an_accelerator(no_gpu: pytest.MonkeyPatch, device: str) -> None:
    no_gpu.setattr(f"torch.{device}.is_available", lambda: True)
    assert activate() is None


def test_inert_when_the_operator_chose_sglangs_own_engine(no_gpu: pytest.MonkeyPatch) -> None:
    no_gpu.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


# -- the platform ---------------------------------------------------------------------------------


@pytest.fixture
def cpu_device() -> object:
    pytest.importorskip("sglang", reason="needs sglang")
    from vertumnus_patches import cpu_device

    return cpu_device


def test_the_platform_is_what_sglang_asks_for(cpu_device: SimpleNamespace) -> None:
    from sglang.srt.platforms.device_mixin import PlatformEnum

    platform = cpu_device.CpuPlatform()
    assert platform._enum is PlatformEnum.OOT and platform.is_out_of_tree()
    assert (platform.device_name, platform.device_type) == ("cpu", "cpu")
    assert platform.get_default_attention_backend() == "torch_native"
    assert not platform.is_pin_memory_available()
    assert platform.get_kv_pool_cls(kind="mla") is None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_untouched_memory_costs_nothing_until_it_is_written(cpu_device: SimpleNamespace) -> None:
    size = 512 << 20
    before = resident_bytes()
    tensor = cpu_device._untouched((size // 8, 4), torch.bfloat16)
    assert resident_bytes() - before < size // 16
    assert tensor.shape == (size // 8, 4) and tensor.dtype is torch.bfloat16
    assert not tensor[:1000].any() and not tensor[-1000:].any()
    tensor[: size // 16].fill_(1.0)
    assert size // 3 < resident_bytes() - before < size * 2 // 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lazy_pool_makes_the_buffers_that_upstream_makes(
    cpu_device: SimpleNamespace, dtype: torch.dtype
) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    lazy_pool = cpu_device.CpuPlatform().get_kv_pool_cls(kind="mha")
    assert issubclass(lazy_pool, MHATokenToKVPool)
    made = []
    for pool in (MHATokenToKVPool, lazy_pool):
        fields = SimpleNamespace(
            _kv_buffer_shapes=lambda: ((65, 2, 16), (65, 2, 8)),
            store_dtype=dtype,
            layer_num=3,
            device="cpu",
            kv_cache_layout="token",
            enable_custom_mem_pool=False,
            memory_saver_adapter=SimpleNamespace(region=lambda tag: nullcontext()),
        )
        pool._create_buffers_normal(fields)
        made.append((fields.k_buffer, fields.v_buffer))
    for upstreams, ours in zip(*made, strict=True):
        for expected, buffer in zip(upstreams, ours, strict=True):
            assert buffer.shape == expected.shape and buffer.dtype is expected.dtype
            assert torch.equal(buffer, expected) and buffer.is_contiguous()
        assert len({buffer.data_ptr() for buffer in ours}) == len(ours)
