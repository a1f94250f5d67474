"""How the lattice's communicators are built; what they do once built is in ``test_links``."""

import logging
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vertumnus_router.lattice import Block

from sgl_vertumnus.worker import groups
from sgl_vertumnus.worker.groups import GPU_GROUP_TIMEOUT, GROUP_TIMEOUT, build_links
from tests.worker.configs import config_of

MIB = 2**20


class Device:
    """A GPU whose memory communicators take, and those communicators."""

    def __init__(self) -> None:
        self.free_bytes = 1000 * MIB
        self.steps: list[tuple[str, str]] = []
        self.timeouts: set[timedelta] = set()

    def group(self, *, name: str, size: int, timeout: timedelta, **_: Any) -> Any:
        self.steps.append(("created", name))
        self.timeouts.add(timeout)

        def warm_up() -> None:
            self.free_bytes -= 50 * size * MIB  # only the first use opens its buffers
            self.steps.append(("warmed", name))

        return SimpleNamespace(warm_up=warm_up)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(groups, "CpGroup", fake.group)
    monkeypatch.setattr(groups.BlockStream, "join", lambda *_: None)
    return fake


def built(device: Device, kind: str, **options: Any) -> list[Block]:
    config = config_of(4, (1, 2, 4), device=kind)
    store: Any = None
    return list(build_links(config, 3, store, torch.device(kind), **options))


def test_a_rank_builds_and_warms_the_blocks_that_it_is_in(device: Device) -> None:
    assert built(device, "cpu") == [Block(2, 2), Block(0, 4)]
    order = [(step, name.rpartition("/")[2]) for step, name in device.steps]
    assert order == [("created", "2x2"), ("warmed", "2x2"), ("created", "0x4"), ("warmed", "0x4")]
    assert device.timeouts == {GROUP_TIMEOUT}


def test_what_a_communicator_takes_of_a_gpu_is_told(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        built(device, "cuda", free_bytes=lambda: device.free_bytes)
    assert "2x2 (100 MiB of the device), 0x4 (200 MiB of the device)" in caplog.text
    assert device.timeouts == {GPU_GROUP_TIMEOUT}


def test_a_cpu_pool_has_no_device_memory_to_tell_of(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        built(device, "cpu")
    assert "2x2, 0x4" in caplog.text
