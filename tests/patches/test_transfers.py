"""Requests of a prefill pool: their home sends their KV, whatever becomes of the block."""

import ast
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vertumnus_patches import in_hand, prefixes, transfers

pytest.importorskip("sglang", reason="needs sglang")
import sglang.srt.disaggregation
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.common import release_kv_cache

from sgl_vertumnus.worker.admission import agree_on_budget
from tests.patches.conftest import Bound
from tests.patches.prefill_side import (
    ALONE,
    BLOCK,
    Sender,
    arrive,
    handshakes,
    hooked,
    prefill_scheduler,
    say,
    step,
)
from tests.patches.schedulers import (
    Grammar,
    Size,
    answer,
    free_tokens,
    kv_of,
    message_of,
    sglang_context,
)

DISAGGREGATION = Path(sglang.srt.disaggregation.__path__[0])
SIZE = Size()
#: The rank that runs. Requests of this home are sent from here.
HERE, THERE = 0, 1


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch, bound: Bound) -> Iterator[list[str]]:
    bound.rank.answers.side_effect = lambda home: home == HERE
    with hooked(monkeypatch) as agreed, sglang_context(SIZE):
        yield agreed


@pytest.fixture
def scheduler() -> Any:
    return prefill_scheduler(SIZE)


def prompt(number: int, length: int = 40) -> list[int]:
    return [number, *range(length - 1)]


def is_home(request: Any) -> bool:
    return bool(in_hand.home_of(request) == HERE)


def ready(scheduler: Any, *requests: Any) -> None:
    """Their decode servers have answered; they wait for a step."""
    for request in requests:
        if is_home(request):
            say(request, "WaitingForInput")
    handshakes(scheduler)


def pages(scheduler: Any, tokens: Sequence[int]) -> int:
    return -(-len(tokens) // scheduler.page_size)


def sent_kv(scheduler: Any, request: Any, length: int) -> Any:
    """What the transfer engine reads now of the pages that it was told."""
    import torch
    from vertumnus_patches import new_kv

    page = scheduler.page_size
    slots = torch.cat([torch.arange(p * page, (p + 1) * page) for p in sender(request).sent])
    return new_kv.read_slots(scheduler.token_to_kv_pool_allocator.get_kvcache(), slots[:length])


def sender(request: Any) -> Sender:
    assert isinstance(request.disagg_kv_sender, Sender)
    return request.disagg_kv_sender


# -- what SGLang keeps of the CP geometry ---------------------------------------------------------


def test_transfers_know_the_geometry_of_the_launch_only() -> None:
    """Every rank registers alone and stays so. Who else asks the live geometry is known: the
    loop with overlap once, when it begins, and the publisher of KV events at start."""
    found = set()
    for path in sorted(DISAGGREGATION.rglob("*.py")):
        if "encoder" in path.parts:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                found |= {
                    (path.name, function.name, node.attr)
                    for node in ast.walk(function)
                    if isinstance(node, ast.Attribute)
                    and node.attr in ("attn_cp_size", "attn_cp_rank", "attn_cp_group")
                    and ast.unparse(node.value) in ("parallel", "get_parallel()")
                }
    assert found == {
        ("conn.py", "__init__", "attn_cp_size"),
        ("conn.py", "__init__", "attn_cp_rank"),
        ("prefill.py", "_is_continuous_input_polling_enabled", "attn_cp_size"),
        ("kv_events.py", "is_kv_publisher_rank", "attn_cp_rank"),
    }


# -- one step -------------------------------------------------------------------------------------


def test_a_request_has_a_sender_at_home_and_a_stand_in_elsewhere(scheduler: Any) -> None:
    mine = arrive(scheduler, "mine", prompt(1), HERE)
    other = arrive(scheduler, "other", prompt(2), THERE)
    assert isinstance(mine.disagg_kv_sender, Sender)
    assert isinstance(other.disagg_kv_sender, transfers.Elsewhere)
    assert [r.sampling_params.max_new_tokens for r in (mine, other)] == [1, 1]


def test_the_home_alone_holds_a_request_back(scheduler: Any, groups: list[str]) -> None:
    mine = arrive(scheduler, "mine", prompt(1), HERE)
    other = arrive(scheduler, "other", prompt(2), THERE)
    handshakes(scheduler)
    assert scheduler.waiting_queue == [other], "elsewhere it may well be ready"
    assert BLOCK in groups, "whether it is, the block agrees"
    ready(scheduler, mine)
    assert scheduler.waiting_queue == [other, mine]


def test_a_home_without_a_place_for_the_first_token_waits() -> None:
    """And polls as if the handshake had not ended, for the whole block to see."""
    scheduler = prefill_scheduler(SIZE, places=1)
    first, second = (arrive(scheduler, f"r{n}", prompt(n), HERE) for n in (1, 2))
    other = arrive(scheduler, "other", prompt(3), THERE)
    ready(scheduler, first, second, other)
    assert scheduler.waiting_queue == [first, other]
    assert second.disagg_kv_sender.poll() == second.disagg_kv_sender.status
    step(scheduler)
    say(first, "Success")
    transfers.advance(scheduler)
    ready(scheduler, second)
    assert scheduler.waiting_queue == [second]


def test_the_home_sends_and_the_others_forget(scheduler: Any, groups: list[str]) -> None:
    mine = arrive(scheduler, "mine", prompt(1, 20), HERE)
    other = arrive(scheduler, "other", prompt(2, 20), THERE)
    ready(scheduler, mine, other)
    step(scheduler)
    transfers.let_go(scheduler, is_home)
    assert scheduler.disagg_prefill_inflight_queue == [mine]
    assert len(sender(mine).sent) == pages(scheduler, prompt(1, 20)) == sender(mine).pages
    assert (sent_kv(scheduler, mine, 20) == kv_of(prompt(1, 20), 0, 20)).all()
    assert list(mine.output_ids) == answer(prompt(1, 20), 1)
    assert other.finished() and prefixes.matched(scheduler, other) == 16
    # Of mine, the whole pages in the tree and the last one.
    assert free_tokens(scheduler) == SIZE.capacity - 32
    groups.clear()
    assert transfers.advance(scheduler), "it is still being sent"
    say(mine, "Success")
    assert not transfers.advance(scheduler)
    assert set(groups) == {ALONE}, "a transfer concerns nobody else"
    assert mine.finished() and free_tokens(scheduler) == SIZE.capacity


def test_what_is_sent_in_chunks_is_sent_once(scheduler: Any) -> None:
    mine = arrive(scheduler, "mine", prompt(1, 150), HERE)
    ready(scheduler, mine)
    sizes = []
    while mine not in scheduler.disagg_prefill_inflight_queue:
        step(scheduler)
        sizes.append(len(sender(mine).sent))
    assert sizes == [0, 4, 10], "a chunk goes out when the next one begins"
    assert (sent_kv(scheduler, mine, 150) == kv_of(prompt(1, 150), 0, 150)).all()


def test_only_waiting_is_told_from_working(scheduler: Any) -> None:
    assert not transfers.only_waits(scheduler), "nothing at all"
    mine = arrive(scheduler, "mine", prompt(1), HERE)
    assert transfers.only_waits(scheduler), "for the handshake"
    ready(scheduler, mine)
    assert not transfers.only_waits(scheduler)
    step(scheduler)
    assert transfers.only_waits(scheduler), "for the transfer"
    say(mine, "Success")
    transfers.advance(scheduler)
    assert not transfers.only_waits(scheduler)


@pytest.mark.parametrize("home", [HERE, THERE])
def test_an_abort_ends_the_handshake_wherever_it_is_read(scheduler: Any, home: int) -> None:
    arrive(scheduler, "gone", prompt(1), home)
    scheduler.abort_request(AbortReq(rid="gone"))
    handshakes(scheduler)
    assert not scheduler.disagg_prefill_bootstrap_queue.queue and not scheduler.waiting_queue


class Mooncake:
    """Its transfers end one by one, in an order of its own; a batch has the status of its first
    piece, as the real one."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self._statuses = list(statuses)
        self.begun: list[tuple[Any, ...]] = []
        self.looks = 0
        self.ended: set[int] = set()

    def batch_transfer_async_write(
        self, session: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        assert len(sources) == len(targets) == len(lengths) == 1, "only the first one's is told"
        self.begun.append((session, sources[0], targets[0], lengths[0]))
        return 0 if self._statuses[len(self.begun) - 1] == 0 else len(self.begun)

    def transfer_check_status(self, transfer: int) -> int:
        assert transfer not in self.ended, "it is freed with its last status"
        self.looks += 1
        if self.looks < 3 * transfer:
            return 0
        self.ended.add(transfer)
        return self._statuses[transfer - 1]


@pytest.mark.parametrize(
    ("statuses", "begun", "result"),
    [((1, 1, 1), 3, 0), ((1, -1, 1), 3, -1), ((1, 0, 1), 2, -1), ((), 0, 0)],
)
def test_a_write_has_ended_when_each_of_its_pieces_has(
    statuses: Sequence[int], begun: int, result: int
) -> None:
    """1 for one that arrives, -1 for one that fails, 0 for one that cannot begin."""
    engine = Mooncake(statuses)
    pieces = [list(range(at, at + len(statuses))) for at in (10, 20, 30)]
    assert transfers.write(engine, "peer", *pieces) == result
    assert engine.begun == [("peer", 10 + n, 20 + n, 30 + n) for n in range(begun)]
    assert len(engine.ended) == sum(status != 0 for status in statuses[:begun])


def test_a_write_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "WRITE_S", 0.05)
    engine = Mooncake((1,))
    engine.looks = -(10**9)
    assert transfers.write(engine, "peer", [1], [2], [3]) == -1


# -- moves ----------------------------------------------------------------------------------------


def test_a_split_leaves_transfers_and_handshakes_at_home(scheduler: Any) -> None:
    sending = arrive(scheduler, "sending", prompt(1), HERE)
    ready(scheduler, sending)
    step(scheduler)
    stays = arrive(scheduler, "stays", prompt(2), HERE)
    arrive(scheduler, "goes", prompt(3), THERE)
    assert in_hand.keep(scheduler, lambda home: home == HERE) == 1
    assert scheduler.disagg_prefill_bootstrap_queue.queue == [stays]
    assert scheduler.disagg_prefill_inflight_queue == [sending]
    assert not sender(stays).aborted and not sender(sending).aborted


def test_a_split_goes_on_in_the_middle_of_a_prefill(scheduler: Any) -> None:
    mine = arrive(scheduler, "mine", prompt(1, 150), HERE)
    ready(scheduler, mine)
    step(scheduler)
    in_hand.keep(scheduler, lambda home: home == HERE)
    finish(scheduler, mine)


def finish(scheduler: Any, request: Any) -> None:
    """All of its KV is sent, once and right; nothing is held afterwards."""
    tokens = list(request.origin_input_ids)
    for _ in range(20):
        transfers.release_guards(scheduler)
        if request in scheduler.disagg_prefill_inflight_queue:
            break
        step(scheduler)
    assert request in scheduler.disagg_prefill_inflight_queue
    assert len(sender(request).sent) == pages(scheduler, tokens)
    assert (sent_kv(scheduler, request, len(tokens)) == kv_of(tokens, 0, len(tokens))).all()
    say(request, "Success")
    transfers.advance(scheduler)
    assert free_tokens(scheduler) == SIZE.capacity


def merged(*ranks: Any) -> None:
    """Every one takes over what all have in hand."""
    suspended = [in_hand.suspend(scheduler) for scheduler in ranks]
    tickets = [ticket for one in suspended for ticket in one.tickets()]
    with pytest.MonkeyPatch.context() as patch:
        from sglang.srt.disaggregation import prefill

        patch.setattr(prefill, "get_kv_class", lambda backend, kind: Sender)
        for scheduler, own in zip(ranks, suspended, strict=True):
            in_hand.resume(scheduler, tickets, own.known())


def queues(scheduler: Any) -> list[list[str]]:
    return [
        [request.rid for request in queue]
        for queue in (
            scheduler.waiting_queue,
            scheduler.disagg_prefill_bootstrap_queue.queue,
            scheduler.grammar_manager.grammar_queue,
        )
    ]


def compiled(scheduler: Any, *keys: tuple[str, str]) -> None:
    """These grammars compile at once here; any other when it is said."""
    for key in keys:
        done: Future[Any] = Future()
        done.set_result(Grammar())
        scheduler.grammar_manager.grammar_backend.futures[key] = done


def test_after_a_merge_the_ranks_have_the_same_queues(scheduler: Any) -> None:
    """Whatever their requests wait for: a grammar, a decode server, a step."""
    other = prefill_scheduler(SIZE)
    regex = {"sampling": {"max_new_tokens": 8, "regex": "a+"}}
    for rank in (scheduler, other):
        compiled(rank, ("regex", "b+"), ("regex", "c+"))
    for number, rank in enumerate((scheduler, other)):
        waits = arrive(rank, f"waits{number}", prompt(number), number)
        ready(rank, waits)
        arrive(rank, f"shakes{number}", prompt(9), HERE)
        take_in(rank, f"compiles{number}", number, **regex)
        for kind in ("b", "c"):
            fields = {"sampling": {"max_new_tokens": 8, "regex": f"{kind}+"}}
            take_in(rank, f"{kind}{number}", number, **fields)
        shake_after_grammar(rank)
        if number:
            say_all(rank, f"c{number}")
    handshakes(scheduler)
    merged(scheduler, other)
    assert queues(scheduler) == queues(other)
    waiting, bootstrapping, compiling = queues(scheduler)
    assert compiling == ["compiles0", "compiles1"]
    assert {"waits0", "waits1"} <= set(waiting)
    assert {"shakes0", "shakes1", "b0"} <= set(bootstrapping)
    for rank in (scheduler, other):
        for request in (*rank.waiting_queue, *rank.disagg_prefill_bootstrap_queue.queue):
            assert request.disagg_kv_sender is not None
            assert request.sampling_params.max_new_tokens == 1
            assert not isinstance(request.grammar, Future)


def take_in(scheduler: Any, rid: str, home: int, **fields: Any) -> None:
    """A request whose grammar may have to be compiled first."""
    message = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 4 + home, "routed_dp_rank": home}
    scheduler.handle_generate_request(message_of(rid, prompt(3), **message, **fields))


def shake_after_grammar(scheduler: Any) -> None:
    """Those whose grammar is there go on to their handshake."""
    with pytest.MonkeyPatch.context() as patch:
        from sglang.srt.disaggregation import prefill

        patch.setattr(prefill, "get_kv_class", lambda backend, kind: Sender)
        for request in scheduler.grammar_manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)


def say_all(scheduler: Any, *rids: str) -> None:
    for request in scheduler.disagg_prefill_bootstrap_queue.queue:
        if request.rid in rids and is_home(request):
            say(request, "WaitingForInput")


def test_ranks_plan_alike_though_one_of_them_is_sending(scheduler: Any) -> None:
    """A prefix that is being sent is locked at home, and could be evicted elsewhere."""
    member = prefill_scheduler(SIZE)
    shared = list(range(1, 385))
    for rank, home in ((scheduler, HERE), (member, THERE)):
        first = arrive(rank, "first", [*shared, *[90] * 16], home)
        ready(rank, first)
        while not first.output_ids:
            step(rank)
        transfers.let_go(rank, is_home)
        rank.last_batch = None
    assert scheduler.disagg_prefill_inflight_queue and not member.disagg_prefill_inflight_queue
    planned = []
    for more in range(10, 600, 48):
        plans = []
        requests = [
            arrive(rank, f"next{more}", [*shared, *[91] * more], THERE)
            for rank in (scheduler, member)
        ]
        group = Told(requests, (scheduler, member))
        for rank, request in zip((scheduler, member), requests, strict=True):
            handshakes(rank)
            budget = agree_on_budget(rank, [request], [384], group)
            rank.max_prefill_tokens = rank.chunked_prefill_size = SIZE.capacity
            with prefixes.agreed_prefixes(rank, [request], [384], budget):
                plan = rank.get_new_batch_prefill(rank.running_batch).batch_to_run
            plans.append(None if plan is None else plan.extend_lens)
            for admitted in [] if plan is None else plan.reqs:
                release_kv_cache(admitted, rank.tree_cache, checkpoint=False)
            rank.waiting_queue = []
        assert plans[0] == plans[1], more
        planned.append(plans[0] is not None)
    assert planned[0] and not planned[-1], "where there is room it is used, and no more than that"


class Told:
    """A group whose ranks have all said their numbers."""

    def __init__(self, requests: Sequence[Any], ranks: Sequence[Any]) -> None:
        self._rows = [
            [prefixes.cost(rank, request, 384), *prefixes.room(rank)]
            for rank, request in zip(ranks, requests, strict=True)
        ]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        assert list(numbers) in self._rows
        return self._rows


def test_a_merge_in_the_middle_of_a_prefill_sends_what_is_missing(scheduler: Any) -> None:
    mine = arrive(scheduler, "mine", prompt(1, 150), HERE)
    ready(scheduler, mine)
    step(scheduler), step(scheduler)
    assert len(sender(mine).sent) == 4
    merged(scheduler)
    assert scheduler.waiting_queue == [mine]
    finish(scheduler, mine)


def test_kv_on_its_way_is_not_evicted_while_its_request_waits(scheduler: Any) -> None:
    mine = arrive(scheduler, "mine", prompt(1, 150), HERE)
    ready(scheduler, mine)
    step(scheduler), step(scheduler)
    merged(scheduler)
    fills = arrive(scheduler, "fills", prompt(2, 20), THERE)
    in_the_way = prefixes.reserve(scheduler, fills, 0, SIZE.capacity - 64)
    assert in_the_way is not None, "all but the 64 tokens that are being sent"
    assert (sent_kv(scheduler, mine, 64) == kv_of(prompt(1, 150), 0, 64)).all()
    prefixes.give_up(scheduler, in_the_way)
    finish(scheduler, mine)


def test_kv_on_its_way_is_not_evicted_while_its_request_starts_over(scheduler: Any) -> None:
    """With a shorter prefix than it had sent: log-probabilities of the prompt are wanted, say."""
    mine = arrive(scheduler, "mine", prompt(1, 150), HERE)
    ready(scheduler, mine)
    step(scheduler), step(scheduler)
    step(scheduler)
    sent = list(sender(mine).sent)
    mine2 = arrive(scheduler, "again", prompt(5, 200), HERE)
    ready(scheduler, mine2)
    for _ in range(3):
        step(scheduler)
    sent = list(sender(mine2).sent)
    assert len(sent) == 8
    merged(scheduler)
    with prefixes.agreed_prefixes(scheduler, [mine2], [0]):
        transfers.release_guards(scheduler)
        step(scheduler)
    assert scheduler.chunked_req is mine2
    transfers.release_guards(scheduler)
    fills = arrive(scheduler, "fills", prompt(2, 20), THERE)
    free = prefixes.room(scheduler)[0] // 16 * 16
    in_the_way = prefixes.reserve(scheduler, fills, 0, free)
    assert in_the_way is not None
    assert not {int(slot) // 16 for slot in in_the_way.slots} & set(sent)
    prefixes.give_up(scheduler, in_the_way)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_aborted_while_it_waits_holds_nothing(scheduler: Any, again: bool) -> None:
    mine = arrive(scheduler, "mine", prompt(1, 150), HERE)
    ready(scheduler, mine)
    step(scheduler), step(scheduler)
    merged(scheduler)
    if again:
        merged(scheduler)
    scheduler.abort_request(AbortReq(rid="mine"))
    transfers.release_guards(scheduler)
    assert sender(mine).aborted and not scheduler.waiting_queue
    assert free_tokens(scheduler) == SIZE.capacity
    assert scheduler.req_to_metadata_buffer_idx_allocator.available_size() == 8
