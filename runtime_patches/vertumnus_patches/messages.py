"""SGLang's messages on their way to the ranks: read, checked, copied to members, refused."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Union

import msgspec

__all__ = [
    "NotMirrorable",
    "abort_undispatched",
    "decode_requests",
    "encode_requests",
    "hand_over",
    "normalised",
    "receive",
    "refuse_regroup",
    "refuse_session",
    "requests_in",
    "room_of",
    "send",
]

#: What msgspec and SGLang's hooks raise for a value that has no place in its field.
_UNREADABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class NotMirrorable(ValueError):
    """A message that a member of a block could not be told."""


def room_of(request: Any) -> int | None:
    """Where a decode server waits for the request's KV; None where none does."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return None if request.bootstrap_host == FAKE_BOOTSTRAP_HOST else request.bootstrap_room


def normalised(message: Any) -> Any:
    """``message`` as members will read it; a rank that leads must start from the same values.

    SGLang's front checks few types and pickles what it got: ``ignore_eos: 1`` or
    ``max_new_tokens: 5.0`` reach a scheduler as they are. Here they become ``True`` and 5.

    Raises:
        NotMirrorable: when a field has no value of its type.
    """
    try:
        (read,) = decode_requests(encode_requests([message]))
    except _UNREADABLE as exc:
        raise NotMirrorable(_with_field_names(message, str(exc))) from exc
    if hasattr(message, "time_stats"):
        read.time_stats = message.time_stats
    _refuse_what_cannot_be_shared(read)
    return read


def _refuse_what_cannot_be_shared(message: Any) -> None:
    """Each rank of a block would decide these by its own logits or its own clock; and what
    could not go on after its block merged."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    if (getattr(getattr(message, "sampling_params", None), "beam_width", None) or 1) > 1:
        raise NotMirrorable("sampling_params.beam_width: a pool does not serve beam search")
    if getattr(message, "input_embeds", None) is not None:
        raise NotMirrorable(
            "input_embeds: SGLang starts such a request again when it is retracted, and a merge "
            "of workers retracts; send input_ids"
        )
    if isinstance(message, FlushCacheReqInput):
        message.timeout_s = None  # flush now or say that it is not possible


def encode_requests(requests: Sequence[Any]) -> bytes:
    """SGLang's own msgpack form of a list of messages; b"" for none.

    Time stamps stay behind: SGLang pickles them, and only the leader reports times.
    """
    from sglang.srt.managers.io_struct import msgpack_encode

    def without_times(request: Any) -> Any:
        if getattr(request, "time_stats", None) is None:
            return request
        return msgspec.structs.replace(request, time_stats=None)

    if not requests:
        return b""
    return msgspec.msgpack.encode([msgpack_encode(without_times(r)) for r in requests])


def decode_requests(payload: bytes) -> list[Any]:
    """The inverse of ``encode_requests``, with values brought to the types of their fields."""
    if not payload:
        return []
    decoder = _lenient_decoder()
    return [decoder.decode(part) for part in msgspec.msgpack.decode(payload, type=list[bytes])]


@cache
def _lenient_decoder() -> Any:
    from sglang.srt.managers import io_struct

    return msgspec.msgpack.Decoder(
        Union[io_struct._all_types],  # noqa: UP007
        strict=False,
        dec_hook=io_struct.dec_hook,
        ext_hook=io_struct.ext_hook,
    )


def _with_field_names(message: Any, error: str) -> str:
    """msgspec names the fields of SGLang's messages by position, as in ``$[8][0]``."""
    what, _, path = error.partition(" - at ")
    names: list[str] = []
    for index in re.findall(r"\[(\d+)\]", path):
        if not hasattr(message, "__struct_fields__"):
            break
        tagged = type(message).__struct_config__.tag is not None
        names.append(message.__struct_fields__[int(index) - tagged])
        message = getattr(message, names[-1])
    return f"{'.'.join(names) or type(message).__name__}: {what}"


def receive(socket: Any) -> Any:
    """The next message in ``socket``, or None when it is empty."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    try:
        return sock_recv(socket, zmq.NOBLOCK)
    except zmq.Again:
        return None


def requests_in(message: Any) -> list[Any] | None:
    """The requests that a message to the controller carries; None for a control message."""
    from sglang.srt.managers.io_struct import (
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )

    if isinstance(message, (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)):
        return [message]
    if isinstance(message, (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)):
        return list(message)
    return None


def hand_over(socket: Any, request: Any) -> None:
    """Give a rank a request, with the time stamps of ``dispatching_with_trace``, which would send
    it to the rank that it names."""
    from sglang.srt.managers.io_struct import sock_send, unwrap_from_pickle, wrap_as_pickle
    from sglang.srt.observability.req_time_stats import DPControllerReqTimeStats

    times = DPControllerReqTimeStats.new_from_obj(unwrap_from_pickle(request.time_stats))
    times.set_dp_dispatch_time()
    request.time_stats = wrap_as_pickle(times)
    sock_send(socket, request)
    times.set_dp_dispatch_finish_time()


def send(socket: Any, message: Any) -> None:
    """Give a rank a control message, in order with its requests."""
    from sglang.srt.managers.io_struct import sock_send

    sock_send(socket, message)


def refuse_regroup(socket: Any, message: Any, *, ranks: int) -> None:
    """Answer a regroup command that came from outside, in the stead of all the ``ranks`` that
    the front waits for."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput, sock_send

    for _ in range(ranks):
        answer = SetInternalStateReqOutput(updated=False)
        answer.http_worker_ipc = message.http_worker_ipc
        sock_send(socket, answer)


def refuse_session(socket: Any, message: Any) -> bool:
    """Answer a request to open a session, which would expire by each rank's own clock; False
    for any other message."""
    from sglang.srt.managers.io_struct import (
        OpenSessionReqInput,
        OpenSessionReqOutput,
        sock_send,
    )

    if not isinstance(message, OpenSessionReqInput):
        return False
    answer = OpenSessionReqOutput(session_id=message.session_id, success=False)
    answer.http_worker_ipc = message.http_worker_ipc
    sock_send(socket, answer)
    return True


def abort_undispatched(socket: Any, request: Any, reason: str, *, status: int) -> None:
    """Tell the front that no rank will ever answer ``request``; ``status`` is HTTP's."""
    from sglang.srt.managers.io_struct import AbortReq, sock_send

    abort = AbortReq(
        rid=request.rid,
        abort_message=reason,
        finished_reason={"type": "abort", "message": reason, "status_code": status},
    )
    abort.http_worker_ipc = request.http_worker_ipc
    sock_send(socket, abort)
