"""What the hooks of a rank do, with a fake runtime bound and SGLang's own messages."""

from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import zmq
from vertumnus_patches.block_events import Cleared, Removed, Stored
from vertumnus_patches.in_hand import MESSAGE
from vertumnus_patches.patches.batch_finished import batch_finished
from vertumnus_patches.patches.batch_started import batch_started
from vertumnus_patches.patches.block_events import tell_block
from vertumnus_patches.patches.control import follow_command
from vertumnus_patches.patches.cp_stream import without_cuda_stream
from vertumnus_patches.patches.events_published import tell_published
from vertumnus_patches.patches.home_output import stream_from_home
from vertumnus_patches.patches.least_capacity import as_the_least
from vertumnus_patches.patches.member_idle import sleep_if_allowed
from vertumnus_patches.patches.member_output import mute_others
from vertumnus_patches.patches.parallel_groups import build_lattice_groups
from vertumnus_patches.patches.request_mirror import mirror_requests
from vertumnus_patches.patches.request_source import remember_message
from vertumnus_patches.patches.token_sync import sync_with_leader
from vertumnus_patches.regroup_message import Phase, regroup_knobs

from tests.patches.conftest import Bound

io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang")
PAIRS = [(0, 2), (2, 2)]
BATCHES = sorted(io_struct.BaseBatchReq.__subclasses__(), key=lambda cls: cls.__name__)
MESSAGES = sorted(io_struct.BaseReq.__subclasses__(), key=lambda cls: cls.__name__)
#: Said once per block. Of the last two each of the scheduler's copies reaches the detokenizer.
FROM_ONE_RANK = {"AbortReq", "HealthCheckOutput", "ConfigureLoggingReq", "FreezeGCReq"}


def message(cls: Any) -> Any:
    """Some value of that type, whatever fields it needs."""
    return Mock(spec=cls)


# -- member_output --------------------------------------------------------------------------------


def sent(output: Any, about: Any = None) -> bool:
    original, sender = Mock(), object()
    mute_others(original, sender, output, about)
    if original.called:
        original.assert_called_once_with(sender, output, about)
    return bool(original.called)


@pytest.mark.parametrize("cls", BATCHES + MESSAGES, ids=lambda cls: cls.__name__)
def test_the_rank_that_answers_sends_everything(bound: Bound, cls: Any) -> None:
    bound.rank.answers.return_value = True
    assert sent(message(cls))


@pytest.mark.parametrize("cls", BATCHES + MESSAGES, ids=lambda cls: cls.__name__)
def test_others_send_what_is_awaited_from_every_rank(bound: Bound, cls: Any) -> None:
    """The front awaits as many answers to a control message as there are ranks; the batches of
    tokens that reach the sender are of this rank's own requests."""
    bound.rank.answers.return_value = False
    assert sent(message(cls)) == (cls.__name__ not in FROM_ONE_RANK)


@pytest.mark.parametrize("home", [None, 0, 3])
def test_the_home_of_the_request_decides_who_tells_its_end(bound: Bound, home: int | None) -> None:
    bound.rank.answers.side_effect = lambda asked: asked == home
    abort = io_struct.AbortReq(rid="r")
    assert sent(abort, SimpleNamespace(routed_dp_rank=home))
    assert not sent(abort, SimpleNamespace(routed_dp_rank=1))


def test_what_is_about_no_request_is_of_no_home(bound: Bound) -> None:
    assert sent(io_struct.FreezeGCReq())
    bound.rank.answers.assert_called_once_with(None)


def test_others_are_silent_through_the_real_sender(bound: Bound) -> None:
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

    with zmq.Context() as context, context.socket(zmq.PAIR) as out, context.socket(zmq.PAIR) as to:
        to.bind("inproc://front")
        out.connect("inproc://front")
        sender = SenderWrapper(out)
        bound.rank.answers.return_value = False
        for output in (io_struct.AbortReq(rid="r"), io_struct.FlushCacheReqOutput(success=True)):
            mute_others(SenderWrapper.send_output, sender, output)
        assert isinstance(io_struct.sock_recv(to, zmq.NOBLOCK), io_struct.FlushCacheReqOutput)
        with pytest.raises(zmq.Again):
            io_struct.sock_recv(to, zmq.NOBLOCK)


# -- home_output ----------------------------------------------------------------------------------


def of_home(home: int | None) -> Any:
    return SimpleNamespace(routed_dp_rank=home)


def test_only_requests_that_this_rank_answers_for_are_streamed(bound: Bound) -> None:
    bound.rank.answers.side_effect = lambda home: home in (None, 2)
    requests = [of_home(home) for home in (2, 3, None, 2)]
    original, streamer, skipped = Mock(), object(), object()
    stream_from_home(original, streamer, requests, True, skipped)
    ours = [requests[0], requests[2], requests[3]]
    original.assert_called_once_with(streamer, ours, True, skipped)


def test_a_rank_without_requests_of_its_own_streams_nothing(bound: Bound) -> None:
    bound.rank.answers.return_value = False
    original = Mock()
    stream_from_home(original, object(), [of_home(1)], False)
    assert not original.called


def test_an_idle_step_is_sglangs_business(bound: Bound) -> None:
    original, streamer = Mock(), object()
    stream_from_home(original, streamer, [], False)
    original.assert_called_once_with(streamer, [], False, None)


# -- request_source -------------------------------------------------------------------------------


def test_a_request_knows_the_message_that_it_was_made_from(bound: Bound) -> None:
    request, message = SimpleNamespace(), object()
    assert remember_message(request, object(), message, "rid", stream=True) is None  # type: ignore[func-returns-value]
    assert getattr(request, MESSAGE) is message


def test_sglangs_request_has_a_place_for_it() -> None:
    """And copies of it, which SGLang makes of requests, keep it."""
    import copy

    from sglang.srt.managers.schedule_batch import Req

    request = Req.__new__(Req)
    remember_message(request, object(), "message")
    assert getattr(copy.copy(request), MESSAGE) == "message"


# -- member_idle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("may_sleep", [True, False])
def test_sleep_only_when_the_runtime_says_so(bound: Bound, may_sleep: bool) -> None:
    bound.rank.sleep.side_effect = lambda sleep: sleep() if may_sleep else None
    original, scheduler = Mock(), object()
    sleep_if_allowed(original, scheduler)
    assert [call.args for call in original.call_args_list] == [(scheduler,)] * may_sleep


# -- block_events, events_published ---------------------------------------------------------------


def test_the_runtime_hears_of_blocks_with_their_namespace(bound: Bound) -> None:
    from sglang.srt.mem_cache.events import KvEventLoraNames
    from sglang.srt.mem_cache.rust_tree_core.adapter import _kv_event_from_tagged

    def hear(*event: Any) -> Any:
        made = _kv_event_from_tagged(event, KvEventLoraNames(), True)
        tell_block(made, event, KvEventLoraNames(), True)
        return bound.rank.on_block_event.call_args.args[0]

    pages = tuple(array("q", page).tobytes() for page in ([1, 2], [3, 4]))
    assert hear("block_stored", [7, 8], 5, [1, 2, 3, 4], 2, "GPU", "salt", None, "key") == Stored(
        (7, 8), 5, pages, ("key", "salt")
    )
    assert hear("block_removed", [7, 8], "GPU", "key") == Removed((7, 8))
    assert hear("all_blocks_cleared") == Cleared()


def test_the_runtime_hears_when_events_are_published(bound: Bound) -> None:
    tell_published(None, object())
    bound.rank.on_events_published.assert_called_once_with()


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


@pytest.mark.parametrize("phase", list(Phase))
def test_a_command_goes_to_the_runtime_and_gets_no_answer_of_sglangs(
    bound: Bound, phase: Phase
) -> None:
    """The rank answers its supervisor, and the front does not wait."""
    command = io_struct.SetInternalStateReq(server_args=regroup_knobs(phase, 3, PAIRS))
    original, scheduler = Mock(), object()
    assert follow_command(original, scheduler, command) is None
    bound.rank.follow.assert_called_once_with(scheduler, command.server_args)
    assert not original.called


def test_other_knobs_stay_sglangs(bound: Bound) -> None:
    command = io_struct.SetInternalStateReq(server_args={"pp_max_micro_batch_size": 8})
    original, scheduler = Mock(return_value="answer"), object()
    assert follow_command(original, scheduler, command) == "answer"
    original.assert_called_once_with(scheduler, command)
    assert not bound.rank.follow.called


def test_a_command_survives_sglangs_wire_format() -> None:
    command = io_struct.SetInternalStateReq(server_args=regroup_knobs(Phase.COMMIT, 3, PAIRS))
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


# -- least_capacity -------------------------------------------------------------------------------


def test_a_rank_sizes_its_pool_as_the_least_of_its_block_does(bound: Bound) -> None:
    bound.rank.least_capacity.side_effect = lambda tokens: tokens - 64
    configurator, original = object(), Mock(return_value=6400)
    assert as_the_least(original, configurator, 7000) == 6336
    original.assert_called_once_with(configurator, 7000)
