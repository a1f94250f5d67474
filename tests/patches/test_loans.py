"""Memory that copies use while requests do not need it, in SGLang's own tree and pool."""

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vertumnus_patches import cached_blocks, prefixes
from vertumnus_patches.loans import Loan, Loans, loans_of
from vertumnus_patches.patches import least_room
from vertumnus_patches.patches.loans_counted import with_reserved
from vertumnus_patches.patches.loans_flushed import recall
from vertumnus_patches.patches.loans_recalled import recall_if_short

from tests.patches.conftest import around

pytest.importorskip("sglang", reason="needs sglang")
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from tests.patches.schedulers import (
    Size,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)

SIZE = Size(capacity=256)
PAGE = SIZE.page
NOBODY = (None, None)
SAMPLING = {"max_new_tokens": 1, "ignore_eos": True}


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name, hook in (
        (PrefillBudget, "_available_and_evictable", least_room.as_agreed),
        (BaseTokenToKVPoolAllocator, "evict_to_free_tokens", recall_if_short),
    ):
        monkeypatch.setattr(owner, name, around(getattr(owner, name), hook))
    with sglang_context(SIZE):
        yield


@pytest.fixture
def scheduler() -> Any:
    return scheduler_with_pools(SIZE)


def tokens(number: int, pages: int) -> list[int]:
    return [number, *range(pages * PAGE - 1)]


def take(scheduler: Any, number: int, pages: int, **sampling: Any) -> Any:
    # One token more than whole pages, so that all of them can be cached.
    prompt = [*tokens(number, pages), 1]
    return receive(scheduler, f"r{number}", prompt, sampling=SAMPLING | sampling)


def finish(scheduler: Any, *requests: Any) -> None:
    while not all(request.finished() for request in requests):
        step(scheduler)


def serve(scheduler: Any, number: int, pages: int) -> Any:
    request = take(scheduler, number, pages)
    finish(scheduler, request)
    return request


def lend(scheduler: Any, number: int, pages: int, reserve: int = 0) -> Loan:
    """A prefix and slots on loan."""
    prefix = array("q", tokens(number, pages)) if pages else array("q")
    loan = cached_blocks.lend(scheduler, prefix, NOBODY)
    assert loan is not None
    assert not reserve or cached_blocks.hold(scheduler, loan, reserve * PAGE)
    return loan


def budget(scheduler: Any) -> int:
    allocator = scheduler.token_to_kv_pool_allocator
    return int(PrefillBudget(allocator, scheduler.tree_cache)._available_and_evictable())


def test_what_is_on_loan_counts_as_free(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    whole = budget(scheduler), prefixes.room(scheduler)
    assert whole[0] == SIZE.capacity
    loans = [lend(scheduler, 1, 4), lend(scheduler, 1, 2, reserve=3), lend(scheduler, 0, 0, 1)]
    held = loans_of(scheduler)
    assert held.reserved_tokens == 4 * PAGE and held.tokens == 8 * PAGE
    assert (budget(scheduler), prefixes.room(scheduler)) == whole
    for loan in loans:
        assert held.end(loan) and not held.end(loan)
        assert (budget(scheduler), prefixes.room(scheduler)) == whole
    assert held.tokens == held.reserved_tokens == 0
    assert scheduler.tree_cache.protected_size() == 0


def test_what_a_request_uses_too_does_not(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    request = take(scheduler, 1, 3, max_new_tokens=3)
    before = prefixes.cost(scheduler, request, 3 * PAGE)
    lend(scheduler, 1, 4)
    assert prefixes.cost(scheduler, request, 3 * PAGE) == before == 3 * PAGE
    step(scheduler)
    assert loans_of(scheduler).tokens == PAGE
    finish(scheduler, request)
    assert loans_of(scheduler).tokens == 4 * PAGE and budget(scheduler) == SIZE.capacity


def test_requests_are_planned_as_if_nothing_was_on_loan(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    loans = [lend(scheduler, 1, 4), lend(scheduler, 0, 0, reserve=8)]
    big = take(scheduler, 2, 14)
    finish(scheduler, big)
    assert not any(loan.is_held for loan in loans)
    assert budget(scheduler) == SIZE.capacity and loans_of(scheduler).tokens == 0


def test_decodes_get_it_back_too(scheduler: Any) -> None:
    request = take(scheduler, 1, 3, max_new_tokens=2 * PAGE)
    step(scheduler)
    loan = lend(scheduler, 0, 0, reserve=(SIZE.capacity // PAGE) - 4)
    finish(scheduler, request)
    assert not loan.is_held and scheduler.token_to_kv_pool_allocator.available_size() > 0


def test_what_is_unused_goes_before_what_is_on_loan(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    serve(scheduler, 2, 4)
    loan = lend(scheduler, 1, 4, reserve=2)
    serve(scheduler, 3, 8)
    assert loan.is_held
    assert prefixes.matched(scheduler, take(scheduler, 1, 4)) == 4 * PAGE


def test_slots_on_loan_come_from_unused_prefixes_only(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    serve(scheduler, 2, 4)
    mine, other = lend(scheduler, 1, 4), lend(scheduler, 0, 0, reserve=2)
    assert not cached_blocks.hold(scheduler, mine, 11 * PAGE)
    assert prefixes.matched(scheduler, take(scheduler, 2, 4)) == 4 * PAGE, "evicted for nothing"
    assert cached_blocks.hold(scheduler, mine, 10 * PAGE)
    assert mine.is_held and other.is_held
    assert prefixes.matched(scheduler, take(scheduler, 1, 4)) == 4 * PAGE
    loans_of(scheduler).recall()
    assert budget(scheduler) == SIZE.capacity


def test_a_prefix_that_is_not_held_as_a_whole_is_not_lent(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    assert cached_blocks.lend(scheduler, array("q", tokens(1, 5)), NOBODY) is None
    assert cached_blocks.lend(scheduler, array("q", tokens(1, 4)), (None, "salt")) is None
    assert not loans_of(scheduler)._loans


def test_a_flush_takes_it_back_first(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    loan = lend(scheduler, 1, 4, reserve=2)
    recall(scheduler.tree_cache)
    assert not loan.is_held and budget(scheduler) == SIZE.capacity
    recall(scheduler_with_pools(SIZE).tree_cache)  # without any


def test_what_was_taken_back_is_not_stored(scheduler: Any) -> None:
    loan = lend(scheduler, 0, 0, reserve=2)
    loans_of(scheduler).recall()
    with pytest.raises(ValueError, match="needed for requests"):
        cached_blocks.store(scheduler, loan, array("q", tokens(1, 2)), NOBODY)
    assert budget(scheduler) == SIZE.capacity


def test_reserved_slots_are_no_leak(scheduler: Any) -> None:
    serve(scheduler, 1, 4)
    checker = SchedulerInvariantChecker.__new__(SchedulerInvariantChecker)
    checker.is_hybrid_swa = checker.is_hybrid_ssm = False
    checker.max_total_num_tokens = SIZE.capacity
    checker.tree_cache = scheduler.tree_cache
    checker.token_to_kv_pool_allocator = scheduler.token_to_kv_pool_allocator
    checker.pool_stats_observer = SimpleNamespace(session_held_tokens=lambda: 0)
    original = SchedulerInvariantChecker._check_full_pool

    def leaks() -> bool:
        stats = SimpleNamespace(
            full_evictable_size=scheduler.tree_cache.evictable_size(),
            full_available_size=scheduler.token_to_kv_pool_allocator.available_size(),
        )
        return bool(with_reserved(original, checker, stats)[0])

    assert not leaks()
    lend(scheduler, 1, 3, reserve=2)
    assert not leaks()
    scheduler.token_to_kv_pool_allocator.alloc(PAGE)
    assert leaks(), "others are"


def test_a_recall_waits_for_a_write_that_is_under_way(scheduler: Any) -> None:
    import threading

    loan = lend(scheduler, 0, 0, reserve=2)
    loan.use.acquire()
    recalling = threading.Thread(target=loans_of(scheduler).recall)
    recalling.start()
    recalling.join(0.02)
    assert recalling.is_alive() and loan.is_held
    loan.use.release()
    recalling.join(10)
    assert not loan.is_held


def test_only_kv_of_one_number_format_is_of_one_kind(scheduler: Any) -> None:
    """Both are kept as bytes."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def kind(dtype: torch.dtype) -> str:
        pool = MHATokenToKVPool(
            size=64,
            page_size=PAGE,
            dtype=dtype,
            head_num=1,
            head_dim=2,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        scheduler.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: pool)
        return cached_blocks.memory(scheduler).kind

    one, other = kind(torch.float8_e4m3fn), kind(torch.float8_e5m2)
    assert one != other and kind(torch.float8_e5m2) == other


def test_a_scheduler_has_one_account(scheduler: Any) -> None:
    assert loans_of(scheduler) is loans_of(scheduler)
    assert isinstance(loans_of(scheduler), Loans)
    assert loans_of(scheduler_with_pools(SIZE)) is not loans_of(scheduler)
