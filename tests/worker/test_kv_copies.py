"""Prefixes copied between ranks, deleted, and told again: SGLang's trees, real sockets, and bytes
that go from one pool to the other."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs sglang")
from vertumnus_patches import cached_blocks

from sgl_vertumnus.worker.kv_service import exports, imports, messages, pieces, service
from sgl_vertumnus.worker.kv_service.transports import LocalReader, ReadError
from tests.patches.schedulers import Size, receive, sglang_context, step
from tests.worker import ranks as processes
from tests.worker.kv_ranks import PAGE, Rank, install, serve_elsewhere

SIZE = Size(capacity=512)
ROOMY = Size(capacity=1024)
LONG = list(range(3, 3 + 8 * PAGE + 1))
OTHER = [*LONG[: 4 * PAGE], *range(60, 60 + 4 * PAGE + 1)]

Ranks = Callable[..., Rank]


class Thread:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._ended = threading.Event()
        self._outcome: Any = None

        def run() -> None:
            try:
                self._outcome = function(*args, **kwargs)
            except BaseException as exc:
                self._outcome = exc
            self._ended.set()

        threading.Thread(target=run, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def result(self) -> Any:
        assert self.wait(60), "it hangs"
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks: list[Rank] = []

    def make(number: int = 0, size: Size = SIZE, **options: Any) -> Rank:
        ranks.append(Rank(size, number, **options))
        return ranks[-1]

    install(monkeypatch)
    with sglang_context(SIZE):
        yield make
        for rank in ranks:
            rank.close()


# -- copy -----------------------------------------------------------------------------------------


def test_a_prefix_is_copied_as_it_was_computed(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    assert len(blocks) == 8 and target.held(LONG) == 0
    report = target.copy(source, blocks)
    assert (report.outcome, report.reason, report.blocks) == ("done", None, 8)
    assert report.bytes == 8 * PAGE * 2 * 2 * 2 * 4 and 0 < report.transfer_s <= report.seconds
    assert target.held(LONG) == 8 * PAGE
    assert target.chain(LONG) == blocks, "another rank's blocks have the same names"
    assert source.is_clean() and target.is_clean()


def test_only_what_is_missing_is_moved(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    target.serve(OTHER)
    report = target.copy(source, blocks)
    assert (report.outcome, report.blocks) == ("done", 4)
    assert target.held(LONG) == target.held(OTHER) == 8 * PAGE
    assert target.copy(source, blocks, source="nowhere:1").blocks == 0, "nobody is asked"
    assert source.is_clean() and target.is_clean()


def test_a_part_of_what_the_source_has(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    assert target.copy(source, blocks[:3]).blocks == 3
    assert target.held(LONG) == 3 * PAGE
    assert target.copy(source, blocks).blocks == 5
    assert target.held(LONG) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


def test_tenants_stay_apart(rank_of: Ranks) -> None:
    source, target = rank_of(0, ROOMY), rank_of(1, ROOMY)
    names = [(None, None), ("key", None), (None, "salt"), ("key", "salt")]
    chains = [source.serve(LONG, extra_key=key, cache_salt=salt) for key, salt in names]
    assert len({chain[0] for chain in chains}) == 4
    for (key, salt), chain in zip(names, chains, strict=True):
        assert target.held(LONG, key, salt) == 0
        assert target.copy(source, chain).blocks == 8
        assert target.held(LONG, key, salt) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


def test_a_copy_to_a_rank_in_the_middle_of_a_step_waits_for_it_alone(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    with target.stepping():
        copying = Thread(target.copy, source, blocks)
        assert not copying.wait(0.05)
        with source.stepping():
            pass
    assert copying.result().outcome == "done"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 5}, "this is rank 1"),
        ({"incarnation": "before"}, "this is rank 1"),
        ({"source_incarnation": "before"}, "this is rank 0"),
        ({"source": "127.0.0.1:1"}, "no rank listens at 127.0.0.1:1"),
        ({"source": "?"}, "is no address"),
        ({"blocks": (1, 2)}, "block 1 of 2 is not held"),
    ],
)
def test_a_copy_that_cannot_be_is_refused(
    rank_of: Ranks, changes: dict[str, Any], reason: str
) -> None:
    source, target = rank_of(0), rank_of(1)
    report = target.copy(source, source.serve(LONG), **changes)
    assert report.outcome == "refused" and reason in (report.reason or "")
    assert source.is_clean() and target.is_clean() and target.held(LONG) == 0


def test_blocks_that_are_no_chain_are_refused(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    for wrong in ([blocks[0], *blocks[2:]], blocks[1:], [*blocks[:2], blocks[0]]):
        report = target.copy(source, wrong)
        assert report.outcome == "refused" and "does not follow" in (report.reason or "")
    target.copy(source, blocks[:4])
    report = target.copy(source, [blocks[0], blocks[2], blocks[3], blocks[4]])
    assert report.outcome == "refused" and "does not follow" in (report.reason or "")
    assert source.is_clean() and target.is_clean()


def test_kv_of_another_kind_is_refused(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    source.scheduler.model_config.model_path = "/models/another/"
    report = target.copy(source, source.serve(LONG))
    assert report.outcome == "refused" and "another: torch.float32" in (report.reason or "")


def test_kv_of_other_weights_is_refused(rank_of: Ranks) -> None:
    """The ranks of a pool take over new weights one by one."""
    from sglang.srt.runtime_context import get_context

    source = rank_of(0)
    ask = messages.Pin(
        incarnation=source.incarnation,
        blocks=tuple(source.serve(LONG)),
        start=0,
        lease_s=60,
        kind=cached_blocks.memory(source.scheduler).kind,
    )
    assert source.ask(messages.Release(lease=source.ask(ask).lease)).was_held
    get_context().override("scheduler.weight_version", weight_version="next")
    with pytest.raises(messages.ServiceError, match=r"'next' there.*'default' here"):
        source.ask(ask)
    assert source.is_clean()


def test_who_does_not_know_the_secret_gets_nothing(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1, secret="another pool's")
    report = target.copy(source, source.serve(LONG))
    assert report.outcome == "refused" and "--admin-api-key" in (report.reason or "")


def test_a_copy_evicts_what_is_unused_but_nothing_else(rank_of: Ranks) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    big = [7, *range(SIZE.capacity - 3 * PAGE)]
    with target.stepping() as scheduler:
        receive(scheduler, "runs", big, sampling={"max_new_tokens": 9, "ignore_eos": True})
        while not scheduler.running_batch.reqs:
            step(scheduler)
    report = target.copy(source, blocks)
    assert (report.outcome, report.reason) == ("refused", "there is no room for it")
    with target.stepping() as scheduler:
        while step(scheduler) is not None:
            pass
    assert target.held(big) > SIZE.capacity - 5 * PAGE
    assert target.copy(source, blocks).outcome == "done"
    assert target.held(LONG) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


# -- what comes between ---------------------------------------------------------------------------


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has a function called in the middle of the next copy, and once only."""

    def arrange(function: Callable[[], Any]) -> None:
        calls = [lambda: None, function]
        monkeypatch.setattr(pieces, "SLICE_BYTES", 512)

        def fetch(reader: Any, part: Any, timeout_s: float) -> None:
            if calls:
                calls.pop(0)()

        monkeypatch.setattr(LocalReader, "fetch", fetch)

    return arrange


@pytest.mark.parametrize("served", [LONG, [*LONG, *LONG], LONG[: 3 * PAGE + 1], OTHER, LONG[:PAGE]])
def test_a_request_that_stores_the_same_meanwhile(
    rank_of: Ranks, between: Any, served: list[int]
) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    between(lambda: target.serve(served))
    report = target.copy(source, blocks)
    assert (report.outcome, report.blocks) == ("done", 8)
    assert target.held(LONG) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


def test_requests_take_the_memory_of_a_copy_back(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    target.serve(LONG[: 2 * PAGE + 1])
    blocks = source.serve(LONG)
    big = [9, *range(SIZE.capacity - 2 * PAGE)]
    between(lambda: target.serve(big))
    report = target.copy(source, blocks)
    assert (report.outcome, report.reason) == ("failed", "the memory was needed for requests")
    assert target.held(big) == len(big) // PAGE * PAGE
    assert source.is_clean() and target.is_clean()


def test_requests_take_what_is_read_at_the_source(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    between(lambda: source.serve([9, *range(SIZE.capacity - 2 * PAGE)]))
    report = target.copy(source, blocks)
    assert report.outcome == "failed" and "source needed the memory" in (report.reason or "")
    assert target.held(LONG) == 0 and source.held(LONG) == 0
    assert source.is_clean() and target.is_clean()


def test_what_is_read_stays_until_memory_is_short(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)

    def fill() -> None:
        # More than is free beside the prefix that is read, in turns.
        for number in range(20, 26):
            source.serve([number, *range(9 * PAGE)])

    between(fill)
    assert target.copy(source, blocks).outcome == "done"
    assert target.held(LONG) == source.held(LONG) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


@pytest.mark.parametrize("flushed", [0, 1])
def test_a_flush_ends_a_copy(rank_of: Ranks, between: Any, flushed: int) -> None:
    source, target = ranks = rank_of(0), rank_of(1)
    target.serve(LONG[: 2 * PAGE + 1])
    blocks = source.serve(LONG)

    def flush() -> None:
        with ranks[flushed].stepping() as scheduler:
            scheduler.tree_cache.reset()
            scheduler.token_to_kv_pool_allocator.clear()

    between(flush)
    assert target.copy(source, blocks).outcome == "failed"
    assert target.held(LONG) == (0 if flushed else 2 * PAGE)
    assert source.is_clean() and target.is_clean()
    source.serve(LONG)
    assert target.copy(source, blocks).outcome == "done"
    assert source.is_clean() and target.is_clean()


def test_a_lease_ends_by_itself(
    rank_of: Ranks, between: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    monkeypatch.setattr(exports, "MAX_LEASE_S", 0.01)

    def outlive() -> None:
        while source.service._exports._leases:
            time.sleep(0.001)
        assert source.is_clean()

    between(outlive)
    assert target.copy(source, blocks).outcome == "failed"
    assert target.held(LONG) == 0 and target.is_clean()


def test_a_copy_that_takes_too_long_fails(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    between(lambda: time.sleep(0.3))
    report = target.copy(source, blocks, timeout_s=0.3)
    assert (report.outcome, report.reason) == ("failed", "it took too long")
    assert source.is_clean() and target.is_clean() and target.held(LONG) == 0


def test_a_source_that_stops_meanwhile(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    between(source.close)
    report = target.copy(source, blocks)
    assert report.outcome == "failed" and "is gone" in (report.reason or "")
    assert target.is_clean() and target.held(LONG) == 0
    monkey = rank_of(2)
    assert target.copy(monkey, monkey.serve(LONG)).outcome == "done"


def test_copies_of_one_rank_wait_for_each_other(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    long, other = source.serve(LONG), source.serve(OTHER)
    second: list[Thread] = []
    between(lambda: second.append(Thread(target.copy, source, other)))
    assert target.copy(source, long).blocks == 8
    assert second[0].result().blocks == 4, "the beginning has come with the first"
    assert target.held(LONG) == target.held(OTHER) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


def test_more_copies_than_may_wait_are_refused(
    rank_of: Ranks, between: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "MAX_COPIES", 1)
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    reports: list[Any] = []
    between(lambda: reports.append(target.copy(source, blocks)))
    assert target.copy(source, blocks).outcome == "done"
    assert reports[0].outcome == "refused" and "busy" in reports[0].reason


def test_two_ranks_copy_from_each_other_at_once(rank_of: Ranks) -> None:
    one, two = rank_of(0), rank_of(1)
    long, other = one.serve(LONG), two.serve(OTHER)
    copies = [Thread(one.copy, two, other), Thread(two.copy, one, long)]
    assert [copy.result().outcome for copy in copies] == ["done", "done"]
    for rank in (one, two):
        assert rank.held(LONG) == rank.held(OTHER) == 8 * PAGE and rank.is_clean()


# -- processes and machines -----------------------------------------------------------------------


def test_a_source_in_another_process_that_is_killed_meanwhile(rank_of: Ranks, between: Any) -> None:
    target = rank_of(1)
    with processes.started(serve_elsewhere, [(SIZE, LONG)]) as ((process, connection),):
        address, incarnation, blocks = processes.answer(process, connection, 60)
        source: Any = SimpleNamespace(address=address, incarnation=incarnation)
        assert target.copy(source, blocks[:3]).outcome == "done"
        assert target.held(LONG) == 3 * PAGE

        def kill() -> None:
            process.kill()
            process.join()

        between(kill)
        report = target.copy(source, blocks)
        assert (report.outcome, report.reason) == ("failed", "the source's process is gone")
    assert target.held(LONG) == 3 * PAGE and target.is_clean()
    report = target.copy(source, blocks)
    assert report.outcome == "refused" and "no rank listens" in (report.reason or "")


def test_a_target_that_is_killed_leaves_a_lease_that_ends(
    rank_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = rank_of(0)
    blocks = source.serve(LONG)
    kind = cached_blocks.memory(source.scheduler).kind
    ask = messages.Pin(
        incarnation=source.incarnation, blocks=tuple(blocks), start=0, lease_s=0.05, kind=kind
    )
    pinned = source.ask(ask)
    assert source.scheduler.tree_cache.protected_size() == 8 * PAGE
    while source.service._exports._leases:
        time.sleep(0.001)
    assert source.is_clean()
    assert source.ask(messages.Release(lease=pinned.lease)).was_held is False
    monkeypatch.setattr(exports, "MAX_LEASES", 1)
    source.ask(msgspec.structs.replace(ask, lease_s=60))
    with pytest.raises(messages.ServiceError, match="busy"):
        source.ask(ask)


def test_copies_between_machines(rank_of: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake.engine", reason="needs Mooncake")
    monkeypatch.setattr(pieces, "SLICE_BYTES", 1024)
    source, target = rank_of(0), rank_of(1, force_mooncake=True)
    blocks = source.serve(LONG)
    assert target.copy(source, blocks[:5]).outcome == "done"
    report = target.copy(source, blocks)
    assert (report.outcome, report.reason, report.blocks) == ("done", None, 3)
    assert target.held(LONG) == 8 * PAGE
    assert source.is_clean() and target.is_clean()


def test_memory_of_a_transfer_that_was_given_up_is_used_again(rank_of: Ranks) -> None:
    pytest.importorskip("mooncake.engine", reason="needs Mooncake")
    source, target = rank_of(0), rank_of(1, force_mooncake=True)
    blocks = source.serve(LONG)
    assert target.copy(source, blocks[:1]).outcome == "done"
    engine = target.service._engine
    buffers = engine._buffers
    assert buffers is not None
    session = source.ask(messages.OpenSession(host="127.0.0.1")).address
    memory = cached_blocks.memory(source.scheduler).buffers
    pages = np.arange(1, 9)
    (part, *_) = pieces.slices(memory, memory, pages, pages, PAGE)
    for _ in range(5):
        with pytest.raises(ReadError, match="in time"):
            engine.reader("127.0.0.1", session).fetch(part, 0)
        time.sleep(0.05)
    assert len(buffers._memory) <= 3
    assert target.copy(source, blocks).outcome == "done"
    assert target.held(LONG) == 8 * PAGE and target.is_clean()


def test_without_mooncake_a_copy_between_machines_is_refused(
    rank_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    source, target = rank_of(0), rank_of(1, force_mooncake=True)
    report = target.copy(source, source.serve(LONG))
    assert report.outcome == "refused" and "sgl-vertumnus[pd]" in (report.reason or "")
    assert source.is_clean() and target.is_clean()


# -- delete ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 5, 7])
def test_the_end_of_a_prefix_is_deleted(rank_of: Ranks, keep: int) -> None:
    rank = rank_of(0)
    blocks = rank.serve(LONG)
    report = rank.reclaim(blocks, keep)
    assert (report.outcome, report.blocks) == ("done", 8 - keep)
    assert rank.held(LONG) == keep * PAGE
    assert set(rank.subscriber.held) == set(blocks[:keep]), "subscribers have heard of it"
    assert rank.is_clean()
    again = rank.reclaim(blocks, keep)
    assert again.outcome == "refused" and "is not held" in (again.reason or "")


def test_what_others_share_is_not_deleted_with_it(rank_of: Ranks) -> None:
    rank = rank_of(0)
    long, other = rank.serve(LONG), rank.serve(OTHER)
    for keep in (0, 3):
        assert rank.reclaim(long, keep).reason == "other prefixes continue it"
        assert rank.reclaim(long[:6], keep).reason == "other prefixes continue it"
    assert rank.reclaim(long, 4).outcome == "done"
    assert rank.held(OTHER) == 8 * PAGE and rank.held(LONG) == 4 * PAGE
    assert rank.reclaim(other, 0).outcome == "done"
    assert rank.held(OTHER) == 0 and rank.is_clean()


def test_a_tenant_s_prefix_is_deleted_alone(rank_of: Ranks) -> None:
    rank = rank_of(0)
    mine, _ = rank.serve(LONG, cache_salt="mine"), rank.serve(LONG)
    assert rank.reclaim(mine, 0).outcome == "done"
    assert rank.held(LONG) == 8 * PAGE and rank.held(LONG, None, "mine") == 0
    assert rank.is_clean()


def test_what_was_stored_again_since_is_not_what_is_meant(rank_of: Ranks) -> None:
    rank = rank_of(0)
    blocks = rank.serve(LONG)
    seen = len(rank.subscriber.batches)
    assert rank.reclaim(blocks, 4).outcome == "done"
    rank.serve(LONG)
    assert rank.reclaim(blocks, 4, as_of=seen).reason == "it was stored again since"
    assert rank.reclaim(blocks[:3], 0, as_of=seen).reason == "other prefixes continue it"
    assert rank.held(LONG) == 8 * PAGE
    assert rank.reclaim(blocks, 4, as_of=seen + 2).outcome == "done"


def test_what_is_used_is_not_deleted(rank_of: Ranks) -> None:
    rank = rank_of(0)
    blocks = rank.serve(LONG)
    with rank.stepping() as scheduler:
        request = receive(
            scheduler, "r", LONG[: 5 * PAGE], sampling={"max_new_tokens": 2, "ignore_eos": True}
        )
        step(scheduler)
    assert rank.reclaim(blocks, 2).reason == "it is in use"
    assert rank.reclaim(blocks, 5).outcome == "done", "what hangs below is not"
    with rank.stepping() as scheduler:
        while not request.finished():
            step(scheduler)
    assert rank.reclaim(blocks[:5], 2).outcome == "done"
    assert rank.held(LONG) == 2 * PAGE and rank.is_clean()


def test_what_another_rank_reads_is_not_deleted(rank_of: Ranks, between: Any) -> None:
    source, target = rank_of(0), rank_of(1)
    blocks = source.serve(LONG)
    reports: list[Any] = []
    between(lambda: reports.append(source.reclaim(blocks, 0)))
    assert target.copy(source, blocks).outcome == "done"
    assert reports[0].reason == "it is in use"
    assert source.reclaim(blocks, 0).outcome == "done" and source.is_clean()


@pytest.mark.parametrize(("keep", "changes"), [(8, {}), (-1, {}), (0, {"incarnation": "before"})])
def test_a_deletion_that_cannot_be_meant(rank_of: Ranks, keep: int, changes: Any) -> None:
    rank = rank_of(0)
    blocks = rank.serve(LONG)
    assert rank.reclaim(blocks, keep, **changes).outcome == "refused"
    assert rank.held(LONG) == 8 * PAGE


# -- snapshot -------------------------------------------------------------------------------------


def test_a_router_that_knows_nothing_learns_everything(
    rank_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SNAPSHOT_BLOCKS", 5)
    rank = rank_of(0, ROOMY)
    for fields in ({}, {"extra_key": "key"}, {"cache_salt": "salt"}):
        rank.serve(LONG, **fields)
        rank.serve(OTHER, **fields)
    before, seen = dict(rank.subscriber.held), len(rank.subscriber.batches)
    rank.subscriber.held.clear()
    report = rank.snapshot()
    assert (report.outcome, report.blocks) == ("done", len(before)) and len(before) == 36
    assert rank.subscriber.held == before
    stored = [event for batch in rank.subscriber.batches[seen:] for event in batch.events]
    assert {event.block_size for event in stored} == {PAGE}
    assert {event.cache_salt for event in stored} == {None, "salt"}
    assert (
        max(sum(len(e.block_hashes) for e in b.events) for b in rank.subscriber.batches[seen:]) == 5
    )
    blocks = rank.chain(LONG)
    assert rank.reclaim(blocks, 4, as_of=seen).outcome == "done", "told again is not stored again"
    assert rank.is_clean()
    assert rank.snapshot(incarnation="before").outcome == "refused"


# -- all at once ----------------------------------------------------------------------------------


def test_whatever_happens_kv_is_right_and_nothing_leaks(
    rank_of: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with little memory serve, copy from each other, delete, and tell."""
    monkeypatch.setattr(pieces, "SLICE_BYTES", 256)
    monkeypatch.setattr(LocalReader, "fetch", lambda *_: time.sleep(0.0002))
    size = Size(capacity=16 * PAGE)
    ranks = rank_of(0, size), rank_of(1, size)
    outcomes: set[str] = set()

    def serve(rank: Rank, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(25):
            start, length = chance.randrange(6), chance.randrange(1, 12) * PAGE
            rank.serve([start, *range(length)])

    def move(rank: Rank, other: Rank, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            with other.stepping():
                chain = other.chain([chance.randrange(6), *range(11 * PAGE)])
            if chain:
                outcomes.add(rank.copy(other, chain).outcome)
                outcomes.add(other.reclaim(chain, len(chain) // 2).outcome + "!")

    jobs = [
        Thread(work, *arguments)
        for number, (rank, other) in enumerate((ranks, ranks[::-1]))
        for work, arguments in ((serve, (rank, number)), (move, (rank, other, number)))
    ]
    for job in jobs:
        job.result()
    assert {"done", "done!"} <= outcomes
    for rank in ranks:
        for start in range(6):
            rank.held([start, *range(11 * PAGE)])
        assert rank.is_clean()
