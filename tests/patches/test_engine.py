"""What the runtime asks of SGLang's own objects."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from vertumnus_patches import engine

pytest.importorskip("sglang", reason="needs sglang")


def test_a_flush_is_the_schedulers_own_and_keeps_device_memory() -> None:
    """Freed memory would come back at a cost in every regroup."""
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = create_autospec(Scheduler, instance=True)
    engine.flush(scheduler)
    scheduler.flush_cache.assert_called_once_with(empty_cache=False)


def test_a_loss_before_the_first_request_counts_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS

    send: Callable[[Any], None] = lambda _: None  # noqa: E731
    communicators = {
        f"{spec[0]}_communicator": FanOutCommunicator(send, 4) for spec in _COMMUNICATOR_SPECS
    }
    manager = SimpleNamespace(event_loop=None, **communicators)
    monkeypatch.setattr(
        http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager)
    )
    engine.expect_control_answers(3)
    assert {communicator._fan_out for communicator in communicators.values()} == {3}
