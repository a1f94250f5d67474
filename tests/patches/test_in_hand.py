"""What becomes of requests in hand at a split and at a merge, on SGLang's own schedulers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vertumnus_patches import in_hand
from vertumnus_patches.in_hand import MESSAGE, decode_tickets, encode_tickets
from vertumnus_patches.patches.request_source import remember_message

pytest.importorskip("sglang", reason="needs sglang")
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from tests.patches.schedulers import (
    Grammar,
    Size,
    aborts,
    answer,
    free_tokens,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)

SIZE = Size()
SCHEMA = {"json_schema": "{}"}


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = Scheduler._create_generation_req

    def made(scheduler: Any, message: Any, *args: Any, **fields: Any) -> Any:
        request = original(scheduler, message, *args, **fields)
        remember_message(request, scheduler, message, *args, **fields)
        return request

    monkeypatch.setattr(Scheduler, "_create_generation_req", made)
    with sglang_context(SIZE):
        yield


def prompt(number: int, length: int = 40) -> list[int]:
    """Prompts that share nothing."""
    return [number, *range(length - 1)]


def sampling(max_new_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "ignore_eos": True} | more


def take(scheduler: Any, rid: str, number: int, home: int | None = 0, **fields: Any) -> Any:
    fields.setdefault("sampling", sampling())
    tokens = prompt(number, fields.pop("length", 40))
    return receive(scheduler, rid, tokens, routed_dp_rank=home, **fields)


def run(*schedulers: Any) -> None:
    """Until there is nothing left to do."""
    for scheduler in schedulers:
        for _ in range(100):
            if step(scheduler) is None and not scheduler.waiting_queue:
                break
        else:
            raise AssertionError("it does not end")


def rids(requests: Sequence[Any]) -> list[str]:
    return [request.rid for request in requests]


def in_home(home: int) -> Callable[[int | None], bool]:
    return lambda rank: rank == home


def running(scheduler: Any, *requests: Any, tokens: int = 3) -> None:
    """Let ``requests`` have said so much."""
    for _ in range(100):
        if all(len(request.output_ids) >= tokens for request in requests):
            return
        step(scheduler)
    raise AssertionError("they do not get there")


# -- split ----------------------------------------------------------------------------------------


def test_a_split_parts_running_requests_by_their_home() -> None:
    children = [scheduler_with_pools(SIZE) for _ in range(2)]
    for home, scheduler in enumerate(children):
        requests = [take(scheduler, f"r{number}", number, number % 2) for number in range(4)]
        running(scheduler, *requests)
        assert in_hand.keep(scheduler, in_home(home)) == 2
        assert rids(scheduler.running_batch.reqs) == [f"r{home}", f"r{home + 2}"]
        batch = step(scheduler)
        assert rids(batch.reqs) == [f"r{home}", f"r{home + 2}"], "they are in the very next step"
        run(scheduler)
        for number in (home, home + 2):
            assert list(requests[number].output_ids) == answer(prompt(number), 8)
        assert free_tokens(scheduler) == SIZE.capacity
        assert aborts(scheduler) == [], "their home goes on"


def test_what_a_split_lets_go_of_is_a_cached_prefix() -> None:
    scheduler = scheduler_with_pools(SIZE)
    gone = take(scheduler, "gone", 1, 1, length=60)
    stays = take(scheduler, "stays", 2, 0, length=60)
    running(scheduler, gone, stays, tokens=6)
    in_hand.keep(scheduler, in_home(0))
    tokens = [*prompt(1, 60), *gone.output_ids, 5]
    again = receive(scheduler, "again", tokens, sampling=sampling())
    step(scheduler)
    # 60 tokens and those that were fed back, in whole pages.
    assert again.cached_tokens == (60 + len(gone.output_ids) - 1) // SIZE.page * SIZE.page == 64
    run(scheduler)
    assert list(stays.output_ids) == answer(prompt(2, 60), 8)
    assert free_tokens(scheduler) == SIZE.capacity


def test_requests_of_the_last_prefill_step_have_not_joined_the_running_ones_yet() -> None:
    scheduler = scheduler_with_pools(SIZE)
    old = [take(scheduler, f"old{home}", home, home) for home in range(2)]
    running(scheduler, *old)
    new = [take(scheduler, f"new{home}", 2 + home, home, length=20) for home in range(2)]
    batch = step(scheduler)
    assert rids(batch.reqs) == ["new0", "new1"] and batch is scheduler.last_batch
    assert in_hand.keep(scheduler, in_home(1)) == 2
    assert rids(step(scheduler).reqs) == ["old1", "new1"]
    run(scheduler)
    assert list(new[1].output_ids) == answer(prompt(3, 20), 8)
    assert len(old[0].output_ids) == 3 and len(new[0].output_ids) == 1
    assert free_tokens(scheduler) == SIZE.capacity


def test_what_a_split_lets_go_of_makes_room_for_others() -> None:
    scheduler = scheduler_with_pools(SIZE)
    running(scheduler, take(scheduler, "stays", 1, 0), take(scheduler, "gone", 2, 1))
    scheduler.running_batch.batch_is_full = True
    late = take(scheduler, "late", 3, 0)
    in_hand.keep(scheduler, in_home(0))
    assert step(scheduler).reqs == [late]


def test_a_split_may_leave_nothing() -> None:
    scheduler = scheduler_with_pools(SIZE)
    running(scheduler, take(scheduler, "r", 1, 1))
    assert in_hand.keep(scheduler, in_home(0)) == 1
    assert scheduler.running_batch.is_empty() and step(scheduler) is None
    late = take(scheduler, "late", 2, 0)
    run(scheduler)
    assert list(late.output_ids) == answer(prompt(2), 8)
    assert free_tokens(scheduler) == SIZE.capacity


@pytest.mark.parametrize("home", [0, 1])
def test_a_prefill_between_two_chunks_is_kept_or_let_go(home: int) -> None:
    scheduler = scheduler_with_pools(SIZE)
    other = take(scheduler, "other", 1, 0)
    running(scheduler, other, tokens=2)
    long = take(scheduler, "long", 2, home, length=200)
    step(scheduler)
    assert scheduler.chunked_req is long
    assert in_hand.keep(scheduler, in_home(0)) == home
    assert scheduler.chunked_req is (None if home else long)
    assert scheduler.last_batch.chunked_req is scheduler.chunked_req
    run(scheduler)
    assert list(other.output_ids) == answer(prompt(1), 8)
    assert list(long.output_ids) == ([] if home else answer(prompt(2, 200), 8))
    assert free_tokens(scheduler) == SIZE.capacity


def test_a_prefill_that_a_hold_has_kept_between_two_chunks() -> None:
    """Decodes went on meanwhile: it is in no batch."""
    scheduler = scheduler_with_pools(SIZE)
    other = take(scheduler, "other", 1, 0)
    running(scheduler, other, tokens=1)
    long = take(scheduler, "long", 2, 1, length=200)
    step(scheduler)
    scheduler.get_new_batch_prefill = held
    step(scheduler)
    assert long not in scheduler.last_batch.reqs + scheduler.running_batch.reqs
    assert in_hand.keep(scheduler, in_home(0)) == 1 and scheduler.chunked_req is None
    del scheduler.get_new_batch_prefill
    run(scheduler)
    assert free_tokens(scheduler) == SIZE.capacity


def held(running_batch: Any) -> Any:
    from vertumnus_patches.engine import no_prefill

    return no_prefill(running_batch)


def test_waiting_requests_part_too() -> None:
    scheduler = scheduler_with_pools(SIZE)
    for number in range(4):
        take(scheduler, f"w{number}", number, number % 2)
    grammars = [
        take(scheduler, f"g{home}", home, home, sampling=sampling(**SCHEMA)) for home in range(2)
    ]
    assert in_hand.keep(scheduler, in_home(1)) == 3
    assert rids(scheduler.waiting_queue) == ["w1", "w3"]
    assert scheduler.grammar_manager.grammar_queue == [grammars[1]]


def test_requests_without_a_home_are_asked_about_as_such() -> None:
    scheduler = scheduler_with_pools(SIZE)
    take(scheduler, "somewhere", 1, 1)
    take(scheduler, "anywhere", 2, None)
    assert in_hand.keep(scheduler, lambda home: home is None) == 1
    assert rids(scheduler.waiting_queue) == ["anywhere"]


def test_an_abort_that_waits_for_the_chunk_to_end_is_told_once_at_a_split() -> None:
    scheduler = scheduler_with_pools(SIZE)
    long = take(scheduler, "long", 2, 1, length=200)
    step(scheduler)
    scheduler.abort_request(AbortReq(rid="long"))
    in_hand.keep(scheduler, in_home(0))
    assert rids(aborts(scheduler)) == ["long"] and long.finished()
    run(scheduler)
    assert len(aborts(scheduler)) == 1 and free_tokens(scheduler) == SIZE.capacity


def test_a_finished_request_is_not_released_twice() -> None:
    scheduler = scheduler_with_pools(SIZE)
    done = take(scheduler, "done", 1, 1, sampling=sampling(1))
    stays = take(scheduler, "stays", 2, 0, length=10)
    step(scheduler)
    assert done.finished() and done in scheduler.last_batch.reqs
    assert in_hand.keep(scheduler, in_home(0)) == 0
    run(scheduler)
    assert list(stays.output_ids) == answer(prompt(2, 10), 8)
    assert free_tokens(scheduler) == SIZE.capacity


# -- merge ----------------------------------------------------------------------------------------


def merge(*schedulers: Any) -> None:
    """What the leaders of blocks do that become one."""
    suspended = [in_hand.suspend(scheduler) for scheduler in schedulers]
    payloads = [encode_tickets(one.tickets()) for one in suspended]
    for scheduler, mine in zip(schedulers, suspended, strict=True):
        tickets = [ticket for payload in payloads for ticket in decode_tickets(payload)]
        in_hand.resume(scheduler, tickets, mine.known())


def pair() -> tuple[Any, Any]:
    return scheduler_with_pools(SIZE), scheduler_with_pools(SIZE)


def queues(*schedulers: Any) -> list[list[str]]:
    return [rids(scheduler.waiting_queue) for scheduler in schedulers]


def test_merged_ranks_queue_the_same_requests_in_the_same_order() -> None:
    one, two = pair()
    running(one, take(one, "r1", 1, 0))
    take(one, "w1", 2, 0)
    running(two, take(two, "r2", 3, 1), take(two, "r3", 4, 1))
    take(two, "w2", 5, 1)
    merge(one, two)
    # Those that hold KV first: theirs may be evicted by the others.
    assert queues(one, two) == [["r1", "r2", "r3", "w1", "w2"]] * 2
    for scheduler in (one, two):
        assert scheduler.running_batch.is_empty() and scheduler.last_batch is None
        assert free_tokens(scheduler) == SIZE.capacity
        assert aborts(scheduler) == []


def test_resumed_requests_say_on_every_rank_what_they_would_have_said() -> None:
    one, two = pair()
    running(one, take(one, "r1", 1, 0), take(one, "r2", 2, 0, length=70))
    running(two, take(two, "r3", 3, 1), tokens=1)
    take(two, "w", 4, 1)
    merge(one, two)
    requests = [list(scheduler.waiting_queue) for scheduler in (one, two)]
    run(one, two)
    for made in requests:
        said = {request.rid: list(request.output_ids) for request in made}
        assert said == {
            "r1": answer(prompt(1), 8),
            "r2": answer(prompt(2, 70), 8),
            "r3": answer(prompt(3), 8),
            "w": answer(prompt(4), 8),
        }
    assert free_tokens(one) == free_tokens(two) == SIZE.capacity


def test_what_a_suspended_request_has_computed_is_found_again() -> None:
    scheduler = scheduler_with_pools(SIZE)
    request = take(scheduler, "r", 1, 0, length=60)
    running(scheduler, request, tokens=6)
    merge(scheduler)
    assert scheduler.waiting_queue == [request], "the same, with all that its client is owed"
    # Of 60 + 6 tokens, the last one of which was not fed back, whole pages.
    assert step(scheduler).prefix_lens == [64]


def test_a_request_of_the_last_prefill_step_is_suspended_once() -> None:
    scheduler = scheduler_with_pools(SIZE)
    running(scheduler, old := take(scheduler, "old", 1))
    new = take(scheduler, "new", 2)
    step(scheduler)
    merge(scheduler)
    assert scheduler.waiting_queue == [old, new]
    run(scheduler)
    assert list(old.output_ids) == answer(prompt(1), 8)
    assert list(new.output_ids) == answer(prompt(2), 8)
    assert free_tokens(scheduler) == SIZE.capacity


def test_a_prefill_between_two_chunks_goes_on_behind_what_it_has() -> None:
    one, two = pair()
    long = take(one, "long", 1, 0, length=200)
    step(one)
    assert one.chunked_req is long and not long.output_ids
    merge(one, two)
    assert queues(one, two) == [["long"]] * 2
    assert one.chunked_req is None and long.inflight_middle_chunks == 0
    requests = one.waiting_queue + two.waiting_queue
    assert step(one).prefix_lens == [SIZE.chunk]
    run(one, two)
    for request in requests:
        assert list(request.output_ids) == answer(prompt(1, 200), 8)
    assert free_tokens(one) == free_tokens(two) == SIZE.capacity


@pytest.mark.parametrize(
    "where", ["running", "chunked", "between two chunks", "waiting with a reason"]
)
def test_an_aborted_request_ends_at_the_merge_and_is_told_once(where: str) -> None:
    one, two = pair()
    stays = take(one, "stays", 2, 0)
    running(one, stays, tokens=2)
    aborted = take(one, "aborted", 1, 0, length=200 if "chunk" in where else 40)
    if where != "waiting with a reason":
        step(one)
        if where == "between two chunks":
            one.get_new_batch_prefill = held
            step(one)
            del one.get_new_batch_prefill
        one.abort_request(AbortReq(rid="aborted"))
    else:
        aborted.set_finish_with_abort("its grammar took too long")
    merge(one, two)
    (told,) = aborts(one)
    assert told.rid == "aborted" and aborts(two) == []
    assert aborted.finished()
    assert queues(one, two) == [["stays"]] * 2
    run(one, two)
    assert len(aborts(one)) == 1
    assert list(stays.output_ids) == answer(prompt(2), 8)
    assert free_tokens(one) == free_tokens(two) == SIZE.capacity


def test_the_reason_of_an_abort_reaches_the_client() -> None:
    scheduler = scheduler_with_pools(SIZE)
    running(scheduler, take(scheduler, "late", 1))
    scheduler.abort_request(AbortReq(rid="late", abort_message="took too long"))
    merge(scheduler)
    (told,) = aborts(scheduler)
    assert told.finished_reason["type"] == "abort"
    assert (told.finished_reason["message"], told.finished_reason["status_code"]) == (
        "took too long",
        503,
    )
    (_, about) = scheduler.ipc_channels.send_to_tokenizer.sent[0]
    assert about.routed_dp_rank == 0, "whose home decides which rank tells it"


def test_members_of_one_block_and_strangers_end_up_alike() -> None:
    """A block's leader alone sends tickets; its member knows the requests, too."""
    leader, member, stranger = (scheduler_with_pools(SIZE) for _ in range(3))
    for scheduler in (leader, member):
        running(scheduler, take(scheduler, "r", 1, 1))
    suspended = [in_hand.suspend(scheduler) for scheduler in (leader, member, stranger)]
    tickets = suspended[0].tickets()
    for scheduler, mine in zip((leader, member, stranger), suspended, strict=True):
        in_hand.resume(scheduler, tickets, mine.known())
    requests = [scheduler.waiting_queue[0] for scheduler in (leader, member, stranger)]
    run(leader, member, stranger)
    assert [list(request.output_ids) for request in requests] == [answer(prompt(1), 8)] * 3
    assert {request.routed_dp_rank for request in requests} == {1}


# -- merge: log-probabilities ---------------------------------------------------------------------


def with_prompt_logprobs(scheduler: Any, rid: str, number: int) -> Any:
    return take(scheduler, rid, number, return_logprob=True, logprob_start_len=0)


def test_the_prompts_log_probabilities_are_not_asked_for_again() -> None:
    """They would forbid to use the prompt's cached KV."""
    one, two = pair()
    begun = with_prompt_logprobs(one, "begun", 1)
    running(one, begun, tokens=2)
    with_prompt_logprobs(one, "waits", 2)
    merge(one, two)
    for scheduler in (one, two):
        starts = [request.logprob_start_len for request in scheduler.waiting_queue]
        assert starts == [-1, 0], "of the one that waits nobody has told them yet"


def test_nor_by_a_prefill_that_has_no_token_yet_forgotten() -> None:
    one, two = pair()
    long = take(one, "long", 1, length=200, return_logprob=True, logprob_start_len=0)
    step(one)
    assert one.chunked_req is long
    merge(one, two)
    assert [s.waiting_queue[0].logprob_start_len for s in (one, two)] == [0, 0]


def test_nor_by_one_that_was_retracted_before_the_merge() -> None:
    one, two = pair()
    begun = with_prompt_logprobs(one, "begun", 1)
    running(one, begun, tokens=2)
    retract(one)
    assert one.waiting_queue == [begun]
    merge(one, two)
    assert [s.waiting_queue[0].logprob_start_len for s in (one, two)] == [-1, -1]
    assert queues(one, two) == [["begun"]] * 2


def retract(scheduler: Any) -> None:
    """As SGLang does when memory runs out."""
    from sglang.srt.mem_cache.common import release_kv_cache

    step(scheduler)
    (request,) = scheduler.running_batch.reqs
    release_kv_cache(request, scheduler.tree_cache, checkpoint=False)
    request.reset_for_retract()
    scheduler.running_batch.filter_batch(reqs_to_exclude=[request])
    scheduler.last_batch = None
    scheduler._add_request_to_queue(request, is_retracted=True)


# -- merge: grammars ------------------------------------------------------------------------------


def compiled(scheduler: Any, schema: str = "{}") -> None:
    scheduler.grammar_manager.grammar_backend.futures["json", schema].set_result(Grammar())


def compile_at_once(scheduler: Any) -> None:
    """Its compiler is never late."""
    backend = scheduler.grammar_manager.grammar_backend
    later = backend.get_cached_or_future_value

    def at_once(key: Any, reasoning: bool) -> Any:
        value, hit = later(key, reasoning)
        if not hit and not value.done():
            value.set_result(Grammar())
        return value, hit

    backend.get_cached_or_future_value = at_once


def compiling(*schedulers: Any) -> list[list[str]]:
    """Who waits for a grammar at each of them, and for nothing else."""
    assert queues(*schedulers) == [[] for _ in schedulers]
    return [[r.rid for r in one.grammar_manager.grammar_queue] for one in schedulers]


def test_a_request_whose_grammar_compiles_waits_for_it_on_every_rank() -> None:
    one, two = pair()
    take(one, "g", 1, sampling=sampling(**SCHEMA))
    compiled(one)
    compile_at_once(two)
    merge(one, two)
    assert compiling(one, two) == [["g"]] * 2
    run(one, two)
    assert free_tokens(one) == free_tokens(two) == SIZE.capacity


def test_a_merge_does_not_wait_for_a_grammar() -> None:
    """Behind COMMIT every rank has seconds, and a schema may take longer to compile."""
    one, two = pair()
    request = take(one, "g", 1, sampling=sampling(**SCHEMA))
    pending = request.grammar
    request.grammar_wait_ct = 7
    merge(one, two)
    assert compiling(one, two) == [["g"]] * 2
    assert request.grammar is pending and not pending.done() and request.grammar_wait_ct == 0


def test_a_schema_that_one_rank_knew_enters_the_same_queue_on_all_after_a_merge() -> None:
    """A rank with a warm cache would plan a step in which the other still compiles."""
    one, two = pair()
    for scheduler in (one, two):
        compile_at_once(scheduler)
    one.grammar_manager.grammar_backend.set_cache(("json", "{}"), Grammar())
    take(one, "queued", 0, sampling=sampling(**SCHEMA))
    assert rids(one.waiting_queue) == ["queued"], "its grammar was at hand"
    merge(one, two)
    for scheduler in (one, two):
        assert scheduler.grammar_manager.grammar_backend.cached == {}
        take(scheduler, "next", 1, sampling=sampling(**SCHEMA))
    assert compiling(one, two) == [["queued", "next"]] * 2
    run(one, two)


def test_a_grammar_stands_where_its_tokens_have_brought_it() -> None:
    one, two = pair()
    request = take(one, "g", 1, sampling=sampling(**SCHEMA))
    compiled(one)
    compile_at_once(two)
    running(one, request)
    merge(one, two)
    (mine,), (theirs,) = one.waiting_queue, two.waiting_queue
    assert mine is request and mine.grammar.accepted == list(request.output_ids)
    assert theirs.grammar.accepted == list(request.output_ids)


def test_a_grammar_that_does_not_compile_ends_its_request_on_every_rank() -> None:
    one, two = pair()
    take(one, "g", 1, sampling=sampling(**SCHEMA))
    merge(one, two)
    for scheduler in (one, two):
        backend = scheduler.grammar_manager.grammar_backend
        backend.futures["json", "{}"].set_result(InvalidGrammarObject("no such thing"))
        (request,) = scheduler.grammar_manager.get_ready_grammar_requests()
        assert "no such thing" in request.to_finish.message


def test_a_request_that_is_refused_here_alone_ends_the_rank() -> None:
    """Its block would run it without this rank."""
    one, two = pair()
    take(one, "g", 1, sampling=sampling(**SCHEMA))
    two.grammar_manager.grammar_backend = None
    with pytest.raises(RuntimeError, match="refused here"):
        merge(one, two)


def test_a_client_that_leaves_while_its_grammar_compiles_is_gone_on_every_rank() -> None:
    one, two = pair()
    take(one, "g", 1, sampling=sampling(**SCHEMA))
    one.abort_request(AbortReq(rid="g"))
    merge(one, two)
    assert queues(one, two) == [[], []]
    assert rids(aborts(one)) == ["g"] and aborts(two) == []


# -- merge: what a scheduler remembers ------------------------------------------------------------


def test_what_a_scheduler_decides_by_is_the_same_on_all_ranks_again() -> None:
    one, two = pair()
    running(one, take(one, "r", 1))
    one.new_token_ratio_tracker.current = 0.123
    one.processed_tokens_counter = 4711
    one._prefill_decode_interval_remaining = 3
    one.running_batch.batch_is_full = True
    one.cur_batch_for_debug = one.running_batch  # what the watchdog looks at
    take(two, "w", 2, 1)
    merge(one, two)
    seen = [
        (
            scheduler.new_token_ratio_tracker.current,
            scheduler.processed_tokens_counter,
            scheduler._prefill_decode_interval_remaining,
            scheduler.running_batch.batch_is_full,
            scheduler.cur_batch_for_debug,
            [request.arrival_processed_tokens for request in scheduler.waiting_queue],
        )
        for scheduler in (one, two)
    ]
    assert seen[0] == seen[1]
    for scheduler in (one, two):
        entries = [r.time_stats.wait_queue_entry_time for r in scheduler.waiting_queue]
        assert entries == sorted(set(entries)), "the order among equal priorities is the queue's"


# -- tickets --------------------------------------------------------------------------------------


def test_a_ticket_carries_the_request_as_the_front_wrote_it() -> None:
    from vertumnus_patches.messages import decode_requests

    scheduler = scheduler_with_pools(SIZE)
    params = sampling(stop_token_ids=[90], frequency_penalty=0.5, custom_params={"a": 1})
    request = take(scheduler, "r", 1, 3, sampling=params, cache_salt="s", extra_key="k")
    running(scheduler, request)
    (ticket,) = decode_tickets(encode_tickets(in_hand.suspend(scheduler).tickets()))
    assert (ticket.rid, ticket.output_ids) == ("r", list(request.output_ids))
    assert ticket.started
    (message,) = decode_requests(ticket.message)
    assert message == getattr(request, MESSAGE)
    assert (message.routed_dp_rank, message.cache_salt, message.extra_key) == (3, "s", "k")


def test_nothing_is_no_tickets() -> None:
    assert decode_tickets(b"") == [] == decode_tickets(encode_tickets([]))
    assert in_hand.suspend(scheduler_with_pools(SIZE)).tickets() == []


def test_a_retracted_request_that_waits_has_begun() -> None:
    scheduler = scheduler_with_pools(SIZE)
    running(scheduler, take(scheduler, "r", 1), tokens=2)
    retract(scheduler)
    take(scheduler, "w", 2)
    tickets = {ticket.rid: ticket.started for ticket in in_hand.suspend(scheduler).tickets()}
    assert tickets == {"r": True, "w": False}


def test_a_request_that_cannot_be_made_here_ends_the_rank() -> None:
    """It would otherwise be served by some of the ranks that are to do everything alike."""
    one, two = pair()
    take(one, "r", 1, priority=1)
    two.abort_on_priority_when_disabled = True
    with pytest.raises(RuntimeError, match="request r is served elsewhere and refused here"):
        merge(one, two)


def test_rebuilding_leaves_no_request_behind_in_the_queues() -> None:
    one, two = pair()
    take(one, "r", 1)
    take(two, "mine", 2, 1)
    merge(one, two)
    assert queues(one, two) == [["r", "mine"]] * 2
    assert two.grammar_manager.grammar_queue == []
