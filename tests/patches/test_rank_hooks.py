"""What the hooks of a rank do, with a fake runtime bound and SGLang's own messages."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import zmq
from vertumnus_patches.patches.batch_finished import batch_finished
from vertumnus_patches.patches.batch_started import batch_started
from vertumnus_patches.patches.control import reconfigure
from vertumnus_patches.patches.cp_stream import without_cuda_stream
from vertumnus_patches.patches.member_idle import sleep_if_allowed
from vertumnus_patches.patches.member_output import mute_member
from vertumnus_patches.patches.parallel_groups import build_lattice_groups
from vertumnus_patches.patches.request_mirror import mirror_requests
from vertumnus_patches.patches.token_sync import sync_with_leader
from vertumnus_patches.regroup_message import regroup_knobs

from tests.patches.conftest import Bound

io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang")
BATCHES = sorted(io_struct.BaseBatchReq.__subclasses__(), key=lambda cls: cls.__name__)
MESSAGES = sorted(io_struct.BaseReq.__subclasses__(), key=lambda cls: cls.__name__)
ABOUT_ONE_REQUEST = {"AbortReq", "HealthCheckOutput"}
#: The scheduler hands these on to the detokenizer; each of its copies must arrive once.
FOR_THE_DETOKENIZER = {"ConfigureLoggingReq", "FreezeGCReq"}
MUTED = ABOUT_ONE_REQUEST | FOR_THE_DETOKENIZER


def message(cls: Any) -> Any:
    """Some value of that type, whatever fields it needs."""
    return Mock(spec=cls)


# -- member_output --------------------------------------------------------------------------------


def sent(output: Any) -> bool:
    original, sender = Mock(), object()
    mute_member(original, sender, output, "recv_obj")
    if original.called:
        original.assert_called_once_with(sender, output, "recv_obj")
    return bool(original.called)


@pytest.mark.parametrize("cls", BATCHES + MESSAGES, ids=lambda cls: cls.__name__)
def test_a_leader_sends_everything(bound: Bound, cls: Any) -> None:
    bound.rank.is_member = False
    assert sent(message(cls))


@pytest.mark.parametrize("cls", BATCHES, ids=lambda cls: cls.__name__)
def test_a_member_sends_no_tokens(bound: Bound, cls: Any) -> None:
    bound.rank.is_member = True
    assert not sent(message(cls))


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_a_member_answers_control_and_nothing_about_one_request(bound: Bound, cls: Any) -> None:
    """The front awaits as many answers to a control message as there are ranks."""
    bound.rank.is_member = True
    assert sent(message(cls)) == (cls.__name__ not in MUTED)


def test_a_member_is_silent_through_the_real_sender(bound: Bound) -> None:
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

    with zmq.Context() as context, context.socket(zmq.PAIR) as out, context.socket(zmq.PAIR) as to:
        to.bind("inproc://front")
        out.connect("inproc://front")
        sender = SenderWrapper(out)
        bound.rank.is_member = True
        for output in (io_struct.AbortReq(rid="r"), io_struct.FlushCacheReqOutput(success=True)):
            mute_member(SenderWrapper.send_output, sender, output)
        assert isinstance(io_struct.sock_recv(to, zmq.NOBLOCK), io_struct.FlushCacheReqOutput)
        with pytest.raises(zmq.Again):
            io_struct.sock_recv(to, zmq.NOBLOCK)


# -- member_idle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("may_sleep", [True, False])
def test_sleep_only_when_the_runtime_says_so(bound: Bound, may_sleep: bool) -> None:
    bound.rank.may_sleep = may_sleep
    original, scheduler = Mock(), object()
    sleep_if_allowed(original, scheduler)
    assert [call.args for call in original.call_args_list] == [(scheduler,)] * may_sleep


# -- request_mirror -------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [None, [], ["request"]])
@pytest.mark.parametrize("step", [[], ["a", "b"]])
def test_a_step_is_what_the_block_agreed_on(
    bound: Bound, received: list[Any] | None, step: list[Any]
) -> None:
    """None would make SGLang's registry keep the original result; [] must not."""
    bound.rank.exchange_requests.return_value = step
    result = mirror_requests(received, object(), ["raw"], ["abort"])
    assert result is not None and result == step
    bound.rank.exchange_requests.assert_called_once_with(received)


def test_mirror_sees_what_the_real_receiver_returns(bound: Bound) -> None:
    """Local aborts ride on the leader's requests; a member that received nothing has None."""
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.runtime_context import get_parallel

    broadcast = SchedulerRequestReceiver._broadcast_reqs_across_ranks
    with get_parallel().override(attn_dp_enabled=False, tp_size=1):
        assert broadcast(object(), ["request"], ["abort"]) == ["request", "abort"]
        assert broadcast(object(), None, None) is None


# -- control --------------------------------------------------------------------------------------


@pytest.mark.parametrize("followed", [True, False])
def test_a_regroup_command_is_answered_by_the_runtime(bound: Bound, followed: bool) -> None:
    bound.rank.reconfigure.return_value = followed
    command = io_struct.SetInternalStateReq(server_args=regroup_knobs(3, [(0, 2), (2, 2)]))
    original, scheduler = Mock(), object()
    answer = reconfigure(original, scheduler, command)
    assert isinstance(answer, io_struct.SetInternalStateReqOutput) and answer.updated is followed
    bound.rank.reconfigure.assert_called_once_with(scheduler, command.server_args)
    assert not original.called


def test_other_knobs_stay_sglangs(bound: Bound) -> None:
    command = io_struct.SetInternalStateReq(server_args={"pp_max_micro_batch_size": 8})
    original, scheduler = Mock(return_value="answer"), object()
    assert reconfigure(original, scheduler, command) == "answer"
    original.assert_called_once_with(scheduler, command)
    assert not bound.rank.reconfigure.called


def test_a_command_survives_sglangs_wire_format() -> None:
    command = io_struct.SetInternalStateReq(server_args=regroup_knobs(3, [(0, 2), (2, 2)]))
    again = io_struct.msgpack_decode(io_struct.msgpack_encode(command))
    assert again.server_args == command.server_args


# -- token_sync -----------------------------------------------------------------------------------


def test_token_sync_hands_over_the_tensor_itself(bound: Bound) -> None:
    ids = object()
    assert sync_with_leader(None, object(), ids, object()) is None  # type: ignore[func-returns-value]
    (argument,) = bound.rank.sync_token_ids.call_args.args
    assert argument is ids, "it must be overwritten in place"


# -- batches and groups ---------------------------------------------------------------------------


def test_batches_are_reported_around_the_step(bound: Bound) -> None:
    scheduler, batch = object(), object()
    assert batch_started(scheduler, batch) is None, "a value would replace SGLang's arguments"  # type: ignore[func-returns-value]
    bound.rank.on_batch_started.assert_called_once_with(scheduler, batch)
    assert batch_finished(None, scheduler, batch, object()) is None  # type: ignore[func-returns-value]
    bound.rank.on_batch_finished.assert_called_once_with(scheduler, batch)


def test_groups_are_built_when_sglangs_own_exist(bound: Bound) -> None:
    build_lattice_groups(None, server_args=object(), device="cpu", dist_port=1)
    bound.rank.on_parallel_ready.assert_called_once_with()


# -- cp_stream ------------------------------------------------------------------------------------


class ModelError(Exception):
    pass


def run_model(fails: bool) -> Any:
    import torch

    def execute(runner: Any, forward_batch: Any, kwargs: Any) -> Any:
        assert torch.cuda.current_stream() is None
        if fails:
            raise ModelError
        return ("result", runner, forward_batch, kwargs)

    return execute


def test_the_stream_is_stubbed_while_the_model_runs_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    real = torch.cuda.current_stream
    result = without_cuda_stream(run_model(fails=False), "runner", "batch", {})
    assert result == ("result", "runner", "batch", {})
    assert torch.cuda.current_stream is real
    with pytest.raises(ModelError):
        without_cuda_stream(run_model(fails=True), "runner", "batch", {})
    assert torch.cuda.current_stream is real


def test_the_stream_is_real_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real = torch.cuda.current_stream
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: list[Any] = []

    def execute(runner: Any, forward_batch: Any, kwargs: Any) -> Any:
        seen.append(torch.cuda.current_stream)

    without_cuda_stream(execute, SimpleNamespace(), SimpleNamespace(), {})
    assert seen == [real]
