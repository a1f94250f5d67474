"""What the runtime asks of SGLang's own objects."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vertumnus_patches import engine

from sgl_vertumnus.profiling.live_pool import UNPAIRED

pytest.importorskip("sglang", reason="needs sglang")


def request(rid: str, *, tokens: int = 0, finished: bool = False) -> Any:
    return SimpleNamespace(
        rid=rid,
        output_ids=[1] * tokens,
        finished=lambda: finished,
        origin_input_ids=[0] * 9,
        cached_tokens=4,
    )


def test_a_request_that_goes_on_is_in_no_prefill() -> None:
    """It was retracted; its first token has been told long ago."""
    batch = SimpleNamespace(reqs=[request("new"), request("resumed", tokens=3)])
    assert engine.prefilling(batch) == ["new"]


def test_a_prefill_has_ended_with_its_first_token_or_its_request() -> None:
    batch = SimpleNamespace(
        reqs=[request("chunk"), request("done", tokens=1), request("aborted", finished=True)]
    )
    assert [(p.rid, p.input_tokens, p.cached_tokens) for p in engine.prefilled(batch)] == [
        ("done", 9, 4),
        ("aborted", 9, 4),
    ]


def test_waiting_for_a_message_ends_when_one_comes() -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as to:
        ours.bind("inproc://requests")
        to.connect("inproc://requests")
        scheduler = SimpleNamespace(ipc_channels=SimpleNamespace(recv_from_tokenizer=ours))
        engine.await_message(scheduler, 0)
        to.send(b"request")
        engine.await_message(scheduler, 60_000)
        assert ours.recv(zmq.NOBLOCK) == b"request", "it is still to be received"


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


def test_the_profiler_asks_a_prefill_pool_in_sglangs_words() -> None:
    """It must not import sglang, which takes longer than a quick profile."""
    assert engine.unpaired_fields() == UNPAIRED
