import pytest
from vertumnus_router.core.ledger import Ledger
from vertumnus_router.core.types import BlockHash, RequestId, WorkerId

W, V = WorkerId("p/0x1"), WorkerId("p/1x1")
A, B, C = (RequestId(name) for name in "abc")


def test_queued_work_does_not_age() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100)
    ledger.reserve(B, W, 3.0, 200)
    assert ledger.queue_s(W, 0.0) == 5.0
    assert ledger.queue_s(W, 100.0) == 5.0
    assert ledger.queue_s(V, 100.0) == 0.0


def test_the_running_prefill_ages_and_never_below_zero() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100)
    ledger.reserve(B, W, 3.0, 200)
    ledger.start(A, 10.0)
    assert ledger.queue_s(W, 10.0) == 5.0
    assert ledger.queue_s(W, 11.5) == 3.5
    assert ledger.queue_s(W, 60.0) == 3.0  # overdue, what is queued behind it is still to do
    ledger.release(A, 60.0)
    assert ledger.queue_s(W, 60.0) == 3.0


def test_one_prefill_after_the_other() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100)
    ledger.reserve(B, W, 3.0, 200)
    ledger.start(A, 0.0)
    ledger.release(A, 1.0)  # sooner than predicted
    ledger.start(B, 4.0)
    assert ledger.queue_s(W, 5.0) == 2.0


def test_a_batch_ages_once_not_once_per_request() -> None:
    ledger = Ledger()
    for request in (A, B, C):
        ledger.reserve(request, W, 2.0, 100)
        ledger.start(request, 0.0)
    assert ledger.queue_s(W, 3.0) == 3.0
    ledger.release(C, 3.0)
    assert ledger.queue_s(W, 3.0) == 1.0  # A is done, B half done
    assert ledger.queue_s(W, 9.0) == 0.0


def test_a_late_start_report_does_not_restart_the_clock() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100)
    ledger.start(A, 0.0)
    ledger.start(A, 1.0)
    assert ledger.queue_s(W, 1.0) == 1.0


def test_an_idle_worker_has_exactly_nothing_reserved() -> None:
    ledger = Ledger()
    for i in range(100):
        ledger.reserve(RequestId(f"r{i}"), W, 0.1 + i / 7, i)
    for i in range(0, 100, 2):
        ledger.start(RequestId(f"r{i}"), i / 3)
    for i in range(100):
        ledger.release(RequestId(f"r{i}"), 50.0 + i / 11)
    assert ledger.queue_s(W, 1000.0) == 0.0
    assert ledger.load(W) == (0, 0)
    assert len(ledger) == 0


def test_release_is_idempotent_and_reserve_is_not() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100)
    with pytest.raises(ValueError, match=r"a is reserved at p/0x1"):
        ledger.reserve(A, V, 2.0, 100)
    assert ledger.release(A, 0.0) is not None
    assert ledger.release(A, 0.0) is None
    assert ledger.release(B, 0.0) is None
    ledger.start(B, 0.0)
    assert ledger.queue_s(W, 0.0) == 0.0


def test_load_counts_tokens_with_and_without_the_last_bound() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100)
    assert ledger.load(W) == (100, 0)
    ledger.reserve(B, W, 3.0, 250)
    assert ledger.load(W) == (350, 100)
    ledger.start(A, 0.0)
    ledger.release(A, 1.0)
    assert ledger.load(W) == (250, 0)


def test_only_a_prefill_that_ran_alone_is_unshared() -> None:
    ledger = Ledger()
    for request in (A, B, C):
        ledger.reserve(request, W, 1.0, 10)
    ledger.start(A, 0.0)
    ledger.start(B, 0.5)
    a, b = ledger.release(A, 1.0), ledger.release(B, 2.0)
    ledger.start(C, 3.0)
    c = ledger.release(C, 4.0)
    assert a is not None and b is not None and c is not None
    assert (a.shared, b.shared, c.shared) == (True, True, False)
    assert c.started


def test_a_moved_reservation_takes_what_is_left_at_the_new_rate() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 2.0, 100, (BlockHash(7),))
    ledger.reserve(B, W, 3.0, 200)
    ledger.start(A, 0.0)
    ledger.move(A, V, 0.5, 1.0)
    assert (ledger.queue_s(W, 1.0), ledger.queue_s(V, 1.0)) == (3.0, 0.5)
    assert ledger.queue_s(V, 1.25) == 0.25  # it runs there
    assert ledger.load(V) == (100, 100 - 100)
    assert ledger.computing((BlockHash(7),)) == {V: 1}
    ledger.move(B, V, 2.0, 2.0)
    assert (ledger.queue_s(W, 2.0), ledger.queue_s(V, 2.0)) == (0.0, 6.0)
    released = [ledger.release(request, 3.0) for request in (A, B)]
    assert all(reservation is not None and reservation.shared for reservation in released)
    assert (len(ledger), ledger.queue_s(V, 4.0), ledger.load(V)) == (0, 0.0, (0, 0))


def test_of_a_chain_the_longest_prefix_being_computed_counts_by_worker() -> None:
    ledger = Ledger()
    ledger.reserve(A, W, 1.0, 100, (BlockHash(1), BlockHash(2), BlockHash(3)))
    ledger.reserve(B, W, 1.0, 100, (BlockHash(1), BlockHash(9)))
    ledger.reserve(C, V, 1.0, 100, (BlockHash(1), BlockHash(2)))
    chain = (BlockHash(1), BlockHash(2), BlockHash(4))
    assert ledger.computing(chain) == {W: 2, V: 2}
    assert ledger.computing((BlockHash(1), BlockHash(9))) == {W: 2, V: 1}
    assert ledger.computing((BlockHash(2),)) == {} == ledger.computing(())
    version = ledger.version
    ledger.release(A, 0.0)
    assert ledger.version > version
    assert ledger.computing(chain) == {W: 1, V: 2}
    ledger.release(B, 0.0)
    ledger.release(C, 0.0)
    assert ledger.computing(chain) == {}
    version = ledger.version
    ledger.reserve(A, W, 1.0, 100, (BlockHash(1),))
    assert ledger.version > version


def test_moving_what_is_not_reserved_does_nothing() -> None:
    ledger = Ledger()
    ledger.move(A, V, 0.5, 1.0)
    assert len(ledger) == 0
