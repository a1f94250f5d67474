"""Cached prefixes of one rank, with SGLang's own scheduler, tree and pools."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vertumnus_patches import prefixes
from vertumnus_patches.patches import least_room, least_rows
from vertumnus_patches.patches.agreed_prefix import within_agreed
from vertumnus_patches.patches.keep_one import lower_surplus
from vertumnus_patches.patches.prefill_admission import admit_alike
from vertumnus_patches.prefix_marks import SURPLUS_PRIORITY, Budget

from tests.patches.conftest import Bound, around

pytest.importorskip("sglang", reason="needs sglang")
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.patches.schedulers import (
    LAYERS,
    Grammar,
    Size,
    free_tokens,
    kv_of,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)

SIZE = Size(capacity=256)
SAMPLING = {"max_new_tokens": 1, "ignore_eos": True}


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = Req._compute_max_prefix_len
    monkeypatch.setattr(
        Req,
        "_compute_max_prefix_len",
        lambda request, input_len: within_agreed(original, request, input_len),
    )
    for owner, name, hook in (
        (PrefillBudget, "_available_and_evictable", least_room.as_agreed),
        (Scheduler, "get_num_allocatable_reqs", least_rows.as_agreed),
    ):
        monkeypatch.setattr(owner, name, around(getattr(owner, name), hook))
    with sglang_context(SIZE):
        yield


@pytest.fixture
def scheduler() -> Any:
    return scheduler_with_pools(SIZE)


def tokens(number: int, length: int = 50) -> list[int]:
    return [number, *range(length - 1)]


def take(scheduler: Any, rid: str, number: int, length: int = 50, **fields: Any) -> Any:
    return receive(scheduler, rid, tokens(number, length), **{"sampling": SAMPLING} | fields)


def serve(scheduler: Any, number: int, **fields: Any) -> Any:
    request = take(scheduler, f"served{number}", number, **fields)
    while not request.finished():
        step(scheduler)
    return request


def put(scheduler: Any, request: Any, length: int, priority: int = 0) -> None:
    """Take over the prefix from a rank that has it."""
    start = prefixes.matched(scheduler, request)
    incoming = prefixes.reserve(scheduler, request, start, length)
    assert incoming is not None
    kv = kv_of(request.origin_input_ids, start, length)
    prefixes.store(scheduler, incoming, kv, priority)


# -- what is held ---------------------------------------------------------------------------------


def test_a_prefix_is_whole_pages_and_leaves_a_token_to_compute(scheduler: Any) -> None:
    serve(scheduler, 1, length=48)
    for length, matched in ((48, 32), (49, 48), (60, 48), (17, 16), (16, 0), (1, 0)):
        assert prefixes.matched(scheduler, take(scheduler, "r", 1, length)) == matched


def test_replaced_embeddings_share_no_prefix(scheduler: Any) -> None:
    serve(scheduler, 1)
    request = take(scheduler, "r", 1)
    request.positional_embed_overrides = object()
    assert prefixes.matched(scheduler, request) == 0


def test_asked_for_log_probabilities_of_the_prompt_forbid_its_prefix(scheduler: Any) -> None:
    serve(scheduler, 1)
    request = take(scheduler, "r", 1, return_logprob=True, logprob_start_len=20)
    assert prefixes.matched(scheduler, request) == 16


def test_kv_is_read_as_it_was_computed(scheduler: Any) -> None:
    request = serve(scheduler, 1)
    for start, end in ((0, 48), (16, 48), (32, 48), (16, 32)):
        kv = prefixes.read(scheduler, request, start, end)
        assert kv.equal(kv_of(tokens(1), start, end))
        assert kv.shape == prefixes.empty(scheduler, end - start).shape
        assert kv.shape[0] == LAYERS


def test_what_is_not_held_is_not_read(scheduler: Any) -> None:
    request = take(scheduler, "r", 1)
    with pytest.raises(ValueError, match="0 tokens are cached, 48 were to be read"):
        prefixes.read(scheduler, request, 0, 48)


@pytest.mark.parametrize("held", [0, 17, 34])
def test_what_was_taken_over_is_used_like_what_was_computed(scheduler: Any, held: int) -> None:
    if held:
        serve(scheduler, 1, length=held)
    request = take(scheduler, "r", 1)
    put(scheduler, request, 48)
    assert prefixes.matched(scheduler, request) == 48
    # The simulated model compares all that it reads with what belongs there.
    assert step(scheduler).prefix_lens == [48]
    assert free_tokens(scheduler) == SIZE.capacity


def test_slots_that_were_given_up_are_free_again(scheduler: Any) -> None:
    request = take(scheduler, "r", 1)
    incoming = prefixes.reserve(scheduler, request, 0, 48)
    assert incoming is not None and free_tokens(scheduler) == SIZE.capacity - 48
    prefixes.give_up(scheduler, incoming)
    assert free_tokens(scheduler) == SIZE.capacity
    assert prefixes.matched(scheduler, request) == 0


def test_no_room_is_no_place_and_costs_nothing(scheduler: Any) -> None:
    scheduler.token_to_kv_pool_allocator.alloc(SIZE.capacity - 32)
    assert prefixes.reserve(scheduler, take(scheduler, "r", 1), 0, 48) is None
    assert free_tokens(scheduler) == 32


def test_a_locked_prefix_stays_until_it_is_unlocked(scheduler: Any) -> None:
    held = serve(scheduler, 1)
    with prefixes.locked(scheduler, [(held, 48)]):
        assert prefixes.reserve(scheduler, take(scheduler, "r", 2), 0, SIZE.capacity) is None
        assert prefixes.matched(scheduler, held) == 48
    assert free_tokens(scheduler) == SIZE.capacity
    incoming = prefixes.reserve(scheduler, take(scheduler, "r", 2), 0, SIZE.capacity)
    assert incoming is not None and prefixes.matched(scheduler, held) == 0


def test_a_lock_is_released_when_the_work_under_it_fails(scheduler: Any) -> None:
    held = serve(scheduler, 1)
    with pytest.raises(RuntimeError), prefixes.locked(scheduler, [(held, 48)]):
        raise RuntimeError
    assert free_tokens(scheduler) == SIZE.capacity


# -- which copy goes first ------------------------------------------------------------------------


def test_surplus_copies_go_before_older_prefixes_of_ones_own(scheduler: Any) -> None:
    own = serve(scheduler, 1)
    surplus = take(scheduler, "r", 2)
    put(scheduler, surplus, 48, SURPLUS_PRIORITY)
    assert prefixes.reserve(scheduler, take(scheduler, "r", 3), 0, SIZE.capacity - 64) is not None
    assert prefixes.matched(scheduler, own) == 48
    assert prefixes.matched(scheduler, surplus) < 48


def test_among_equals_the_older_one_goes(scheduler: Any) -> None:
    old, new = serve(scheduler, 1), take(scheduler, "r", 2)
    put(scheduler, new, 48)
    assert prefixes.reserve(scheduler, take(scheduler, "r", 3), 0, SIZE.capacity - 64) is not None
    assert prefixes.matched(scheduler, old) < 48
    assert prefixes.matched(scheduler, new) == 48


@pytest.fixture
def keeping_one(monkeypatch: pytest.MonkeyPatch, bound: Bound) -> Bound:
    """What is at home on rank 0 is kept by this rank."""
    original = UnifiedRadixCache.checkpoint_into_tree
    monkeypatch.setattr(
        UnifiedRadixCache,
        "checkpoint_into_tree",
        lambda tree, req, **fields: lower_surplus(original, tree, req, **fields),
    )
    bound.rank.answers.side_effect = lambda home: home == 0
    return bound


def test_a_block_keeps_the_copy_of_a_requests_home(scheduler: Any, keeping_one: Bound) -> None:
    mine = serve(scheduler, 1, routed_dp_rank=0)
    others = serve(scheduler, 2, routed_dp_rank=1, priority=7)
    assert others.priority == 7, "it is the client's"
    assert prefixes.reserve(scheduler, take(scheduler, "r", 3), 0, SIZE.capacity - 64) is not None
    assert prefixes.matched(scheduler, mine) == 48
    assert prefixes.matched(scheduler, others) < 48


def test_a_surplus_prefix_that_its_home_serves_again_is_kept(
    scheduler: Any, keeping_one: Bound
) -> None:
    serve(scheduler, 1, routed_dp_rank=1)
    mine = serve(scheduler, 1, routed_dp_rank=0)
    other = serve(scheduler, 2, routed_dp_rank=1)
    assert prefixes.reserve(scheduler, take(scheduler, "r", 3), 0, SIZE.capacity - 64) is not None
    assert prefixes.matched(scheduler, mine) == 48
    assert prefixes.matched(scheduler, other) < 48


def test_the_clients_priority_returns_when_storing_fails(bound: Bound) -> None:
    bound.rank.answers.return_value = False
    request = SimpleNamespace(priority=3, routed_dp_rank=1)

    def fail(tree: Any, req: Any, **_: Any) -> None:
        assert req.priority == SURPLUS_PRIORITY
        raise RuntimeError

    with pytest.raises(RuntimeError):
        lower_surplus(fail, object(), request, up_to=1)
    assert request.priority == 3


# -- the plan of a step ---------------------------------------------------------------------------


def plan(scheduler: Any) -> Any:
    return scheduler.get_new_batch_prefill(scheduler.running_batch).batch_to_run


def test_a_step_uses_no_more_than_was_agreed(scheduler: Any) -> None:
    for number in (1, 2, 3):
        serve(scheduler, number)
    requests = [take(scheduler, f"r{number}", number) for number in (1, 2, 3)]
    with prefixes.agreed_prefixes(scheduler, requests, (48, 16, 0)):
        batch = plan(scheduler)
    assert batch.prefix_lens == [48, 16]
    assert batch.extend_lens == [2, 34]
    assert scheduler.waiting_queue == requests[2:], "34 of 64 tokens leave no room for 50"


@pytest.mark.parametrize(
    ("tokens", "rows", "taken"),
    [(SIZE.capacity, 32, 3), (SIZE.capacity, 2, 2), (SIZE.capacity, 0, 0), (40, 32, 1), (0, 32, 0)],
)
def test_a_step_takes_no_more_than_its_budget(
    scheduler: Any, tokens: int, rows: int, taken: int
) -> None:
    """Which may be less than this rank has: that of the poorest."""
    requests = [take(scheduler, f"r{number}", number, length=15) for number in (1, 2, 3)]
    with prefixes.agreed_prefixes(scheduler, requests, (0, 0, 0), Budget(tokens, rows, {})):
        batch = plan(scheduler)
    assert (0 if batch is None else len(batch.reqs)) == taken
    assert scheduler.waiting_queue == requests[taken:]


def test_a_cached_prefix_costs_what_it_costs_the_rank_that_pays_most(scheduler: Any) -> None:
    serve(scheduler, 1)
    request = take(scheduler, "r", 1, length=60)
    free = SIZE.capacity
    assert prefixes.cost(scheduler, request, 48) == 48 and prefixes.room(scheduler)[0] == free
    held = prefixes.lock(scheduler, request, 48)
    assert prefixes.cost(scheduler, request, 48) == 0, "it cannot be evicted anyhow"
    # 12 tokens in a page, and a page for the next: 32 behind the prefix, which elsewhere is 48.
    for tokens, taken in ((48 + 33, 1), (48 + 20, 0)):
        budget = Budget(tokens, 32, {id(request): 48})
        with prefixes.agreed_prefixes(scheduler, [request], (48,), budget):
            batch = plan(scheduler)
        assert (batch is not None) == bool(taken), tokens
        if batch is not None:
            break
        scheduler.waiting_queue = [request]
    scheduler.tree_cache.unlock(held)


def test_what_was_not_agreed_on_waits_and_keeps_its_place(scheduler: Any) -> None:
    requests = [take(scheduler, f"r{number}", number, 10) for number in range(4)]
    with prefixes.agreed_prefixes(scheduler, requests[:2], (0, 0)):
        assert [request.rid for request in plan(scheduler).reqs] == ["r0", "r1"]
    assert scheduler.waiting_queue == requests[2:]
    with prefixes.agreed_prefixes(scheduler, [], ()):
        assert plan(scheduler) is None
    assert scheduler.waiting_queue == requests[2:]


def test_an_agreement_holds_for_one_step(scheduler: Any) -> None:
    serve(scheduler, 1)
    request = take(scheduler, "r", 1)
    with (
        pytest.raises(RuntimeError),
        prefixes.agreed_prefixes(scheduler, [request], (0,)),
    ):
        assert prefixes.matched(scheduler, request) == 0
        raise RuntimeError
    assert scheduler.waiting_queue == [request]
    assert prefixes.matched(scheduler, request) == 48


def test_a_request_whose_grammar_is_ready_is_agreed_on_like_any_other(scheduler: Any) -> None:
    """SGLang would queue it in the middle of planning, with the prefix that this rank holds."""
    late = take(scheduler, "late", 1, sampling=SAMPLING | {"json_schema": "1"})
    ready = take(scheduler, "ready", 2, sampling=SAMPLING | {"json_schema": "2"})
    futures = scheduler.grammar_manager.grammar_backend.futures
    futures["json", "2"].set_result(Grammar())
    assert prefixes.candidates(scheduler, scheduler.running_batch) == [ready]
    futures["json", "1"].set_result(Grammar())
    with prefixes.agreed_prefixes(scheduler, [ready], (0,)):
        assert plan(scheduler).reqs == [ready], "the late one has missed this agreement"
    assert scheduler.grammar_manager.grammar_queue == [late]
    assert prefixes.candidates(scheduler, scheduler.running_batch) == [late]


def test_a_full_batch_takes_nobody_unless_it_lets_go_of_others_for_them(scheduler: Any) -> None:
    waiting = take(scheduler, "waits", 1)
    full = SimpleNamespace(batch_is_full=True, is_empty=lambda: False, reqs=[])
    assert prefixes.candidates(scheduler, full) == []
    scheduler.enable_priority_preemption = True
    assert prefixes.candidates(scheduler, full) == [waiting]
    scheduler.enable_priority_preemption = False
    emptied = SimpleNamespace(batch_is_full=True, is_empty=lambda: True, reqs=[])
    assert prefixes.candidates(scheduler, emptied) == [waiting]


def test_candidates_come_in_the_order_of_the_step(scheduler: Any) -> None:
    """The agreement is about the first of them."""
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    scheduler.enable_priority_scheduling = True
    scheduler.policy = SchedulePolicy("fcfs", scheduler.tree_cache, False, True, False)
    low, high = take(scheduler, "low", 1, priority=1), take(scheduler, "high", 2, priority=9)
    assert prefixes.candidates(scheduler, scheduler.running_batch) == [high, low]


def test_a_chunk_is_bounded_by_the_smaller_limit(scheduler: Any) -> None:
    assert prefixes.chunk_tokens(scheduler) == SIZE.chunk
    scheduler.chunked_prefill_size = None
    assert prefixes.chunk_tokens(scheduler) == scheduler.max_prefill_tokens
    assert prefixes.page_tokens(scheduler) == SIZE.page


def test_the_runtime_decides_whether_a_step_is_planned(bound: Bound) -> None:
    calls: list[Any] = []

    def original(scheduler: Any, running_batch: Any) -> str:
        calls.append((scheduler, running_batch))
        return "plan"

    bound.rank.admit_prefills.side_effect = lambda scheduler, batch, admit: admit()
    assert admit_alike(original, "scheduler", "running") == "plan"
    assert calls == [("scheduler", "running")]
    bound.rank.admit_prefills.side_effect = lambda scheduler, batch, admit: "none"
    assert admit_alike(original, "scheduler", running_batch="running") == "none"
    assert len(calls) == 1


def test_no_prefill_is_a_plan_that_sglang_goes_on_with(scheduler: Any) -> None:
    from vertumnus_patches.engine import no_prefill

    running = receive(scheduler, "runs", tokens(1), sampling=SAMPLING | {"max_new_tokens": 3})
    step(scheduler)
    take(scheduler, "waits", 2)
    scheduler.get_new_batch_prefill = no_prefill
    assert step(scheduler).reqs == [running] and step(scheduler).reqs == [running]
    assert step(scheduler) is None and running.finished()
    assert Scheduler.get_new_batch_prefill is not no_prefill
