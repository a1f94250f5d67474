"""The requests that a rank has in hand, and what becomes of them when its block changes.

To be called at a step boundary only: no forward step is running and the last one's results have
been handed out.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from vertumnus_patches import transfers
from vertumnus_patches.messages import decode_requests, encode_requests

__all__ = [
    "InHand",
    "Ticket",
    "decode_tickets",
    "encode_tickets",
    "home_of",
    "keep",
    "resume",
    "suspend",
]

#: Attribute of SGLang's request object: the message that it was made from.
MESSAGE = "vertumnus_message"


class Ticket(msgspec.Struct, frozen=True):
    """A request on its way to ranks that do not know it yet.

    ``message`` is SGLang's message of the request, ``output_ids`` the tokens that it has so
    far. ``started``: it held KV, which is now in the tree of every rank that knew it.
    ``compiling``: it waits for its grammar; ``bootstrapping``: its decode server has not yet said
    where its KV goes.
    """

    rid: str
    message: bytes
    output_ids: list[int]
    started: bool
    compiling: bool = False
    bootstrapping: bool = False


class InHand:
    """Suspended requests, in the order in which they are to go on."""

    def __init__(
        self,
        started: Sequence[Any],
        waiting: Sequence[Any],
        bootstrapping: Sequence[Any],
        compiling: Sequence[Any],
    ) -> None:
        self._started = started
        self._waiting = waiting
        self._bootstrapping = bootstrapping
        self._compiling = compiling

    def tickets(self) -> list[Ticket]:
        return [
            *(_ticket(request, started=True) for request in self._started),
            # Some of these had begun, too, and were retracted when memory ran out.
            *(_ticket(request, started=bool(request.output_ids)) for request in self._waiting),
            *(_ticket(request, bootstrapping=True) for request in self._bootstrapping),
            *(_ticket(request, compiling=True) for request in self._compiling),
        ]

    def known(self) -> dict[str, Any]:
        everyone = (*self._started, *self._waiting, *self._bootstrapping, *self._compiling)
        return {request.rid: request for request in everyone}


def encode_tickets(tickets: Sequence[Ticket]) -> bytes:
    """msgpack."""
    return msgspec.msgpack.encode(tickets)


def decode_tickets(payload: bytes) -> list[Ticket]:
    """The inverse of ``encode_tickets``; none for b""."""
    return msgspec.msgpack.decode(payload, type=list[Ticket]) if payload else []


def home_of(request: Any) -> int | None:
    """The rank that a request belongs to: it names one all its life."""
    home = request.routed_dp_rank
    return None if home is None else int(home)


def keep(scheduler: Any, stays: Callable[[int | None], bool]) -> int:
    """Go on with the requests whose home ``stays``; how many were let go.

    What the others have computed remains as cached prefixes. Those that stay are not touched:
    running ones are in the next step.
    """
    scheduler.process_pending_chunked_abort()
    dropped = [request for request in _running(scheduler) if not stays(home_of(request))]
    for request in dropped:
        _release(scheduler, request)
    for batch in _batches(scheduler):
        batch.filter_batch(reqs_to_exclude=dropped)
        batch.batch_is_full = False
        if batch.chunked_req in dropped:
            batch.chunked_req = None
    if scheduler.chunked_req in dropped:
        scheduler.chunked_req = None
    let_go = len(dropped)
    for holder, name in _queues(scheduler):
        queue = getattr(holder, name)
        left = [request for request in queue if stays(home_of(request))]
        setattr(holder, name, left)
        let_go += len(queue) - len(left)
    return let_go


def suspend(scheduler: Any) -> InHand:
    """Take every request out of the scheduler's hands.

    Running ones are retracted, and their KV stays as cached prefixes, all of it but the last,
    unfinished page. Aborted ones end here. Those whose KV this rank is sending to decode servers
    stay where they are: they need no block any more.
    """
    scheduler.process_pending_chunked_abort()
    started = []
    for request in _running(scheduler):
        aborted = request.to_finish is not None
        _release(scheduler, request)
        if aborted:
            _end_aborted(scheduler, request)
        else:
            if transfers.is_prefill_side(scheduler):
                transfers.guard_sent(scheduler, request)
            _retract(request)
            started.append(request)
    waiting, compiling = [
        [request for request in queue if not _ended(scheduler, request)]
        for queue in (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
    ]
    bootstrapping = (
        transfers.bootstrapping(scheduler) if transfers.is_prefill_side(scheduler) else []
    )
    _start_over(scheduler)
    return InHand(started, waiting, bootstrapping, compiling)


def _ended(scheduler: Any, request: Any) -> bool:
    """Whether a request that waits has been aborted; it ends then: ranks that make it anew would
    run it."""
    if request.to_finish is not None:
        _end_aborted(scheduler, request)
        return True
    _skip_prompt_logprobs(request)
    return False


def resume(scheduler: Any, tickets: Iterable[Ticket], known: dict[str, Any]) -> None:
    """Queue the requests of ``tickets`` in this order, on every rank of a block alike.

    Those that ``known`` holds go on as they are; the others are made from their messages. Those
    that wait for their first token wait for their grammar, too, until all ranks have it, unless
    a decode server waits for them.
    """
    manager = scheduler.grammar_manager
    # Whether a grammar is at hand decides which queue a request enters, and the caches of ranks
    # that served apart differ.
    manager.clear()
    prefill_side = transfers.is_prefill_side(scheduler)
    waiting: list[Any] = []
    compiling: list[Any] = []
    bootstrapping: list[Any] = []
    awaited: list[Any] = []
    for ticket in sorted(tickets, key=lambda ticket: not ticket.started):
        is_awaited = prefill_side and not ticket.compiling
        request = known.get(ticket.rid)
        if request is None:
            request = _rebuilt(scheduler, ticket)
            if is_awaited:
                awaited.append(request)
        elif not (request.output_ids or is_awaited or isinstance(request.grammar, Future)):
            request.grammar = None
            manager.process_req_with_grammar(request)
        if is_awaited:
            (bootstrapping if ticket.bootstrapping else waiting).append(request)
        else:
            (compiling if isinstance(request.grammar, Future) else waiting).append(request)
        request.grammar_wait_ct = 0
    # After all of them have been made, so that their grammars compile together.
    for request in awaited:
        if isinstance(request.grammar, Future):
            _bring_grammar(manager, request)
        transfers.take_over(scheduler, request)
    _align(scheduler, waiting + bootstrapping + compiling)
    scheduler.waiting_queue, manager.grammar_queue = waiting, compiling
    if prefill_side:
        for request in waiting:
            request.pending_bootstrap = False
        scheduler.disagg_prefill_bootstrap_queue.queue = bootstrapping


def _running(scheduler: Any) -> list[Any]:
    """Requests that hold KV and are to run again, in batch order, each once."""
    requests = list(scheduler.running_batch.reqs)
    if not transfers.is_prefill_side(scheduler):  # there, the last step's are being sent
        for batch in _batches(scheduler)[1:]:
            requests += batch.reqs
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    unique = {id(request): request for request in requests if not request.finished()}
    return list(unique.values())


def _batches(scheduler: Any) -> list[Any]:
    """The running batch, and the last step's if its requests are still to join it."""
    last = scheduler.last_batch
    joins = last is not None and last is not scheduler.running_batch
    if joins and last.forward_mode.is_extend():
        return [scheduler.running_batch, last]
    return [scheduler.running_batch]


def _release(scheduler: Any, request: Any) -> None:
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(request, scheduler.tree_cache, checkpoint=True)


def _retract(request: Any) -> None:
    request.reset_for_retract()
    _skip_prompt_logprobs(request)


def _skip_prompt_logprobs(request: Any) -> None:
    """Those of a request that has tokens are known at home; to ask for them again would mean to
    compute the prompt again."""
    if request.output_ids:
        request.logprob_start_len = -1


def _end_aborted(scheduler: Any, request: Any) -> None:
    """As SGLang ends an aborted request that waits: it will not run another step."""
    from sglang.srt.managers.scheduler import _make_abort_req

    reason = request.to_finish.to_json()
    request.finished_reason, request.to_finish = request.to_finish, None
    scheduler._release_aborted_request(request)
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=reason), request)
    transfers.end_aborted(scheduler, request)


def _start_over(scheduler: Any) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.last_batch = None
    scheduler.cur_batch_for_debug = None  # the watchdog would take it for a hanging step
    scheduler.chunked_req = None
    for holder, name in _queues(scheduler):
        setattr(holder, name, [])


def _queues(scheduler: Any) -> list[tuple[Any, str]]:
    """Where requests wait that no step has begun to compute, or not lately."""
    queues = [(scheduler, "waiting_queue"), (scheduler.grammar_manager, "grammar_queue")]
    if transfers.is_prefill_side(scheduler):
        queues.append((scheduler.disagg_prefill_bootstrap_queue, "queue"))
    return queues


def _align(scheduler: Any, requests: Sequence[Any]) -> None:
    """Reset what a scheduler remembers of earlier steps and decides by: the ranks that merge
    have had different ones."""
    scheduler.new_token_ratio_tracker.reset()
    scheduler.processed_tokens_counter = 0
    scheduler._prefill_decode_interval_remaining = 0
    now_s = time.perf_counter()
    for place, request in enumerate(requests):
        request.arrival_processed_tokens = 0
        # The order among equal priorities.
        request.time_stats.wait_queue_entry_time = now_s - (len(requests) - place) * 1e-6


def _ticket(
    request: Any, *, started: bool = False, compiling: bool = False, bootstrapping: bool = False
) -> Ticket:
    return Ticket(
        rid=request.rid,
        message=encode_requests([getattr(request, MESSAGE)]),
        output_ids=list(request.output_ids),
        started=started,
        compiling=compiling,
        bootstrapping=bootstrapping,
    )


def _rebuilt(scheduler: Any, ticket: Ticket) -> Any:
    """The request as it stands on the ranks that have it, but for what only its home tells the
    client."""
    (message,) = decode_requests(ticket.message)
    queues = _queues(scheduler)
    for holder, name in queues:
        setattr(holder, name, [])
    scheduler.handle_generate_request(message)
    made = [request for holder, name in queues for request in getattr(holder, name)]
    if len(made) != 1 or made[0].to_finish is not None:
        raise RuntimeError(f"request {ticket.rid} is served elsewhere and refused here")
    request = made[0]
    request.output_ids = array("q", ticket.output_ids)
    if ticket.output_ids and request.grammar is not None:
        _bring_grammar(scheduler.grammar_manager, request)
    if ticket.started:
        _retract(request)
    return request


def _bring_grammar(manager: Any, request: Any) -> None:
    """To where the request's tokens have brought it. It has compiled elsewhere before."""
    if isinstance(request.grammar, Future):
        request.grammar = request.grammar.result()
        manager._apply_request_reasoning_config(request)
    for token in request.output_ids:
        request.grammar.accept_token(token)
