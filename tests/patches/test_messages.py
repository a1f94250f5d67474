"""SGLang's messages on their way to the ranks, with SGLang's own types and sockets."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches import messages
from vertumnus_patches.messages import NotMirrorable, decode_requests, encode_requests, normalised
from vertumnus_patches.regroup_message import Phase, regroup_message

from tests.patches.sglang_requests import generate_request

io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang")


NESTED: dict[str, Any] = {}
for _ in range(5000):
    NESTED = {"a": NESTED}


def times() -> Any:
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    return APIServerReqTimeStats()


def copies(*requests: Any) -> list[Any]:
    return decode_requests(encode_requests(list(requests)))


# -- to the members -------------------------------------------------------------------------------


def test_nothing_is_nothing() -> None:
    assert encode_requests([]) == b""
    assert decode_requests(b"") == []


@given(
    rids=st.lists(st.text(max_size=8), max_size=4),
    input_ids=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.none() | st.integers(0, 10**6),
            "temperature": st.floats(0, 2),
            "stop": st.none() | st.text(max_size=4) | st.lists(st.text(max_size=4), max_size=3),
            "stop_token_ids": st.none() | st.sets(st.integers(0, 10**5), max_size=4),
            "json_schema": st.none() | st.text(max_size=8),
            "custom_params": st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 99)),
            "logit_bias": st.none() | st.dictionaries(st.just("5"), st.floats(-1, 1)),
        },
    ),
)
def test_requests_arrive_as_they_were_sent(
    rids: list[str], input_ids: list[int], sampling: dict[str, Any]
) -> None:
    sent = [generate_request(rid, input_ids, sampling=sampling, cache_salt="s") for rid in rids]
    assert copies(*sent) == sent


def test_time_stamps_stay_with_the_leader() -> None:
    sent = generate_request(time_stats=times())
    (arrived,) = copies(sent)
    assert arrived.time_stats is None and sent.time_stats is not None
    arrived.time_stats = sent.time_stats
    assert arrived == sent


def test_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickled")

    monkeypatch.setattr(pickle, "dumps", forbidden)
    monkeypatch.setattr(pickle, "loads", forbidden)
    wrapped = io_struct.PickleWrapper(b"cos\nsystem\n(S'true'\ntR.")
    assert copies(generate_request(time_stats=times()), wrapped)[1] == wrapped


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(lambda: io_struct.AbortReq(rid="r1"), id="abort"),
        pytest.param(lambda: io_struct.AbortReq(abort_all=True), id="abort-all"),
        pytest.param(lambda: io_struct.FlushCacheReqInput(), id="flush"),
        pytest.param(lambda: io_struct.GetInternalStateReq(), id="state"),
        pytest.param(
            lambda: io_struct.SetInternalStateReq(server_args={"a": 1, "b": 0.5}), id="set"
        ),
        pytest.param(lambda: io_struct.PauseGenerationReqInput(mode="abort"), id="pause"),
        pytest.param(
            lambda: io_struct.ProfileReq(req_type=io_struct.ProfileReqType(1)), id="profile"
        ),
        pytest.param(lambda: io_struct.ConfigureLoggingReq(), id="logging"),
        pytest.param(lambda: io_struct.FreezeGCReq(), id="freeze"),
    ],
)
def test_control_messages_arrive_in_order_with_requests(message: Any) -> None:
    first, control, last = generate_request("1"), message(), generate_request("2")
    assert copies(first, control, last) == [first, control, last]
    assert normalised(control) == control


# -- what the front does not check ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "field", "value"),
    [
        ({"ignore_eos": 1}, "ignore_eos", True),
        ({"ignore_eos": "false"}, "ignore_eos", False),
        ({"max_new_tokens": 5.0}, "max_new_tokens", 5),
        ({"stop_token_ids": [7, 8]}, "stop_token_ids", {7, 8}),
        ({"top_k": 3.0}, "top_k", 3),
    ],
)
def test_loose_values_become_what_their_field_holds(
    sampling: dict[str, Any], field: str, value: Any
) -> None:
    read = normalised(generate_request(sampling=sampling)).sampling_params
    assert getattr(read, field) == value and type(getattr(read, field)) is type(value)


@pytest.mark.parametrize(
    ("sampling", "fields", "reason"),
    [
        ({"max_new_tokens": 5.5}, {}, "sampling_params.max_new_tokens: .*int"),
        ({"json_schema": {"a": 1}}, {}, "sampling_params.json_schema: .*str"),
        ({"custom_params": {"seed": 2**70}}, {}, "TokenizedGenerateReqInput: .*2"),
        ({"custom_params": NESTED}, {}, "TokenizedGenerateReqInput: .*recursion"),
        ({"logit_bias": {5: 1.0}}, {}, "sampling_params.logit_bias: .*str"),
        ({}, {"top_logprobs_num": "many"}, "top_logprobs_num: .*int"),
        ({}, {"cache_salt": object()}, "TokenizedGenerateReqInput: "),
    ],
)
def test_what_no_member_can_read_is_named(
    sampling: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotMirrorable, match=reason):
        normalised(generate_request(sampling=sampling, **fields))


@given(
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.sampled_from([1, 2.0, 2.5, None, "3", [1], True]),
            "ignore_eos": st.sampled_from([True, 0, 1, 2, "true", "no", None]),
            "stop": st.sampled_from([None, "a", ["a"], ("a",), [1], {"a": 1}]),
            "custom_params": st.dictionaries(
                st.text(max_size=2), st.integers() | st.floats() | st.none() | st.binary()
            ),
        },
    )
)
def test_leader_and_member_read_the_same_or_the_request_is_refused(
    sampling: dict[str, Any],
) -> None:
    try:
        led = normalised(generate_request(sampling=sampling, time_stats=times()))
    except NotMirrorable:
        return
    (followed,) = copies(led)
    assert repr(followed.sampling_params) == repr(led.sampling_params)  # NaN is not itself
    assert followed.input_ids == led.input_ids


def test_normalising_keeps_the_time_stamps() -> None:
    sent = generate_request(time_stats=times())
    assert normalised(sent).time_stats is sent.time_stats


@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search_is_refused_by_name(beams: int) -> None:
    with pytest.raises(NotMirrorable, match=r"sampling_params\.beam_width: .* beam search"):
        normalised(generate_request(sampling={"beam_width": beams}))


def test_embeddings_instead_of_tokens_are_refused_by_name() -> None:
    """Refused here, because SGLang would tell the client the same tokens again after a merge."""
    request = generate_request()
    request.input_embeds = [[0.5, 1.5]]
    with pytest.raises(NotMirrorable, match=r"input_embeds: .* send input_ids"):
        normalised(request)


def test_one_beam_is_no_search() -> None:
    assert normalised(generate_request(sampling={"beam_width": 1})).sampling_params.beam_width == 1


def test_a_flush_waits_by_no_ranks_own_clock() -> None:
    assert normalised(io_struct.FlushCacheReqInput(timeout_s=5.0)).timeout_s is None


# -- at the controller ----------------------------------------------------------------------------


def test_requests_in_a_message() -> None:
    one, two = generate_request("1"), generate_request("2")
    assert messages.requests_in(one) == [one]
    assert messages.requests_in(io_struct.BatchTokenizedGenerateReqInput(batch=[one, two])) == [
        one,
        two,
    ]
    assert messages.requests_in(io_struct.AbortReq(rid="1")) is None
    assert messages.requests_in(io_struct.FlushCacheReqInput()) is None


Sockets = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as to:
        to.bind("inproc://messages")
        out.connect("inproc://messages")
        yield out, to


def test_receive_is_empty_handed_when_the_socket_is(sockets: Sockets) -> None:
    out, to = sockets
    assert messages.receive(to) is None
    io_struct.sock_send(out, io_struct.FlushCacheReqInput())
    assert messages.receive(to) == io_struct.FlushCacheReqInput()
    assert messages.receive(to) is None


@pytest.mark.parametrize("with_times", [False, True])
def test_a_request_is_handed_over_as_sglang_would(sockets: Sockets, with_times: bool) -> None:
    from sglang.srt.managers.data_parallel_controller import (
        DataParallelController,
        LoadBalanceMethod,
    )

    out, to = sockets
    controller = object.__new__(DataParallelController)
    controller.load_balance_method = LoadBalanceMethod.ROUND_ROBIN
    controller.dispatching = controller.round_robin_scheduler
    controller.refresh_load_budget_on_dispatch = False
    controller._active_workers, controller.workers = [0], [out]

    def request() -> Any:
        stats = io_struct.wrap_as_pickle(times()) if with_times else None
        return generate_request("r", routed_dp_rank=0, time_stats=stats)

    controller.dispatching_with_trace(request())
    messages.hand_over(out, request())
    theirs, ours = messages.receive(to), messages.receive(to)
    stamps = [io_struct.unwrap_from_pickle(one.time_stats) for one in (theirs, ours)]
    assert type(stamps[0]) is type(stamps[1])
    assert stamps[0].__getstate__().keys() == stamps[1].__getstate__().keys()
    ours.time_stats = theirs.time_stats
    assert ours == theirs


def test_a_request_goes_where_it_is_handed_with_the_rank_it_names(sockets: Sockets) -> None:
    out, to = sockets
    messages.hand_over(out, generate_request("r", routed_dp_rank=7))
    assert messages.receive(to).routed_dp_rank == 7


def test_a_regroup_command_is_refused_for_every_rank(sockets: Sockets) -> None:
    out, to = sockets
    command = regroup_message(Phase.COMMIT, 1, [(0, 4)])
    command.http_worker_ipc = "ipc://worker"
    messages.refuse_regroup(out, command, ranks=3)
    for _ in range(3):
        answer = messages.receive(to)
        assert isinstance(answer, io_struct.SetInternalStateReqOutput)
        assert (answer.updated, answer.http_worker_ipc) == (False, "ipc://worker")
    assert messages.receive(to) is None
    messages.send(out, command)
    assert messages.receive(to) == command


def test_only_sessions_are_refused_at_once(sockets: Sockets) -> None:
    out, to = sockets
    assert not messages.refuse_session(out, io_struct.CloseSessionReqInput(session_id="s"))
    assert not messages.refuse_session(out, generate_request())
    assert messages.receive(to) is None
    opening = io_struct.OpenSessionReqInput(capacity_of_str_len=9, session_id="s")
    assert messages.refuse_session(out, opening)
    assert messages.receive(to) == io_struct.OpenSessionReqOutput(session_id="s", success=False)


def test_the_front_learns_of_a_request_that_was_not_dispatched(sockets: Sockets) -> None:
    out, to = sockets
    request = generate_request("r7", http_worker_ipc="ipc://worker")
    messages.abort_undispatched(out, request, "all gone", status=503)
    abort = messages.receive(to)
    assert isinstance(abort, io_struct.AbortReq)
    assert (abort.rid, abort.http_worker_ipc) == ("r7", "ipc://worker")
    assert abort.finished_reason["type"] == "abort"
    assert abort.finished_reason["status_code"] == 503
    assert abort.finished_reason["message"] == abort.abort_message == "all gone"
