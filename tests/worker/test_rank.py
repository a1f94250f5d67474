"""One rank: what it follows, what it becomes, what it tells block, supervisor and router."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vertumnus_patches import engine, in_hand, prefixes
from vertumnus_patches.in_hand import Ticket, encode_tickets
from vertumnus_patches.prefix_marks import SURPLUS_PRIORITY
from vertumnus_patches.regroup_message import Phase, regroup_knobs
from vertumnus_router.lattice import Block, lattice
from vertumnus_router.protocol import PrefillFinished, PrefillStarted, RankState, encode_report

from sgl_vertumnus.worker import rank as rank_module
from sgl_vertumnus.worker.admission import Agreement
from sgl_vertumnus.worker.control import Alive, Entered, Ready, Refused, Switched
from sgl_vertumnus.worker.groups import Links
from sgl_vertumnus.worker.hold import HOLD_S
from sgl_vertumnus.worker.kv_service.baton import Baton, BatonTimeout
from sgl_vertumnus.worker.rank import RankRuntime, pid_key
from sgl_vertumnus.worker.stream import Content
from tests.worker.configs import config_of

CONFIG = config_of(4, (1, 2, 4))


class Stream:
    """The member's or leader's end, with what is on it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Content, Any]] = []
        self.coming: list[Any] = []

    def send(self, content: Content, payload: bytes) -> None:
        self.sent.append((content, payload))

    def receive(self, content: Content) -> bytearray:
        came, payload = self.coming.pop(0)
        assert came is content
        return bytearray(payload)

    def send_tensor(self, content: Content, tensor: torch.Tensor) -> None:
        self.sent.append((content, tensor.clone()))

    def receive_tensor(self, content: Content, tensor: torch.Tensor) -> None:
        came, sent = self.coming.pop(0)
        assert came is content
        tensor.copy_(sent)


class Reports:
    def __init__(self, host: str, port: int, heartbeat: Any, alive: Any) -> None:
        self.port, self.heartbeat, self.alive = port, heartbeat, alive
        self.sent: list[Any] = []
        self.beats = 0

    def send(self, report: Any) -> None:
        encode_report(report)
        self.sent.append(report)

    def beat(self) -> None:
        self.beats += 1


class Line:
    """To the supervisor."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Service:
    """Of the rank's KV, for other ranks."""

    def __init__(self, address: str, *, scheduler: Any, baton: Baton, **fields: Any) -> None:
        self.address, self.scheduler, self.baton, self.fields = address, scheduler, baton, fields
        self.told: list[Any] = []

    def on_block_event(self, event: Any) -> None:
        self.told.append(event)

    def on_events_published(self) -> None:
        self.told.append("published")


class Group:
    """A block's group, in which every other rank passes what a test says."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.rank = 0
        self.passed: list[bytes] = []
        self.others: list[bytes] = []

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        self.passed.append(payload)
        return [payload, *self.others]


class Suspended:
    def __init__(self, tickets: list[Ticket]) -> None:
        self._tickets = tickets

    def tickets(self) -> list[Ticket]:
        return self._tickets

    def known(self) -> dict[str, Any]:
        return {ticket.rid: ticket for ticket in self._tickets}


class InHand:
    """What is done with the requests in hand, in the place of the module."""

    def __init__(self, geometries: list[Any], homes: list[int | None]) -> None:
        self._geometries = geometries
        self.homes = homes
        self.tickets: list[Ticket] = []
        self.log: list[Any] = []

    def keep(self, scheduler: Any, stays: Any) -> int:
        self.log.append(("keep", [home for home in self.homes if stays(home)], self._turn))
        return 0

    def suspend(self, scheduler: Any) -> Suspended:
        self.log.append(("suspend", self._turn))
        return Suspended(self.tickets)

    def resume(self, scheduler: Any, tickets: list[Ticket], known: dict[str, Any]) -> None:
        rids = [ticket.rid for ticket in tickets]
        self.log.append(("resume", rids, sorted(known), self._turn))

    @property
    def _turn(self) -> int:
        """How many geometries there have been."""
        return len(self._geometries)


class Scheduler:
    """What a rank asks of a scheduler."""

    def __init__(self) -> None:
        self.max_total_num_tokens = 1000
        self.running_batch = SimpleNamespace(reqs=["a", "b"])
        self.waiting_queue = ["c"]
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 900)
        self.model_config = SimpleNamespace(hidden_size=576)
        self.chunked_req = None


class Scene:
    """A rank that has joined its pool, on fake links, and what SGLang was told."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch, config: Any = CONFIG) -> None:
        self.number = number
        self.geometries: list[Any] = []
        self.in_hand = InHand(self.geometries, [0, 1, 2, 3, None])
        self.store = dist.HashStore()
        self.links = {
            block: Links(Group(block), Stream())  # type: ignore[arg-type]
            for block in lattice(config.size, config.degrees)
            if block.degree > 1 and number in block
        }
        monkeypatch.setattr(engine, "data_parallel_rank", lambda: number)
        monkeypatch.setattr(
            engine, "apply_geometry", lambda scheduler, group: self.geometries.append(group)
        )
        for name in ("keep", "suspend", "resume"):
            monkeypatch.setattr(in_hand, name, getattr(self.in_hand, name))
        monkeypatch.setattr(rank_module, "connect_store", lambda _: self.store)
        monkeypatch.setattr(rank_module, "build_links", lambda *_: self.links)
        monkeypatch.setattr(rank_module, "Reporter", Reports)
        monkeypatch.setattr(rank_module, "SupervisorLine", Line)
        monkeypatch.setattr(rank_module, "KvService", Service)
        monkeypatch.setattr(rank_module, "pool_secret", lambda: "s3cret")
        self.rank = RankRuntime(config, "the-manifest")
        self.rank.on_parallel_ready()
        self.scheduler = Scheduler()
        reporter, line = self.rank._reporter, self.rank._line
        assert isinstance(reporter, Reports) and isinstance(line, Line)
        self.reports, self.line = reporter, line

    def command(self, phase: Phase, epoch: int, *blocks: tuple[int, int]) -> list[Any]:
        """What the supervisor hears of it, without times."""
        told = len(self.line.sent)
        self.rank.follow(self.scheduler, regroup_knobs(phase, epoch, blocks))
        return [without_time(message) for message in self.line.sent[told:]]

    def commit(self, epoch: int, *blocks: tuple[int, int]) -> list[Any]:
        return self.command(Phase.COMMIT, epoch, *blocks)

    def prepare(self, epoch: int, *blocks: tuple[int, int]) -> list[Any]:
        return self.command(Phase.PREPARE, epoch, *(blocks or ALONE))

    def abandon(self, epoch: int, *blocks: tuple[int, int]) -> list[Any]:
        return self.command(Phase.ABANDON, epoch, *(blocks or ALONE))

    @property
    def holds(self) -> bool:
        """Whether the next prefill step is left out."""
        planned = self.rank.admit_prefills(self.scheduler, RUNNING, lambda: "planned")
        return bool(planned != "planned")

    def state(self) -> Any:
        keys = ("_serving", "_links", "_scheduler")
        return (
            [getattr(self.rank, key) for key in keys],
            self.rank.is_member,
            self.rank.may_sleep,
            self.rank._hold.epoch,
            list(self.geometries),
            list(self.in_hand.log),
            self.reports.beats,
            self.rank._state(),
        )


ALONE = ((0, 1), (1, 1), (2, 1), (3, 1))
PAIRS = ((0, 2), (2, 2))
RIGHT = ((0, 1), (1, 1), (2, 2))
FOUR = ((0, 4),)
RUNNING = SimpleNamespace(is_empty=lambda: False)


def without_time(message: Any) -> Any:
    return (type(message), message.rank, getattr(message, "epoch", None))


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    threads = torch.get_num_threads()
    yield lambda number=2, config=CONFIG: Scene(number, monkeypatch, config)
    torch.set_num_threads(threads)


def is_open(rank: RankRuntime) -> bool:
    """Whether another thread may touch the tree now."""
    try:
        with rank._baton.held(0.01):
            return True
    except BatonTimeout:
        return False


# -- joining --------------------------------------------------------------------------------------


def test_a_rank_that_has_not_joined_is_alone_and_silent() -> None:
    rank = RankRuntime(CONFIG, "m")
    assert not rank.is_member and rank.may_sleep
    assert rank.exchange_requests(["a"]) == ["a"]
    ids = torch.tensor([3])
    rank.sync_token_ids(ids)
    assert ids.tolist() == [3]
    batch = batch_of("r", extend=True)
    rank.on_batch_started(Scheduler(), batch)
    rank.on_batch_finished(Scheduler(), batch)


def test_joining(scene_of: Any) -> None:
    scene = scene_of(2)
    assert int(scene.store.get(pid_key(2))) == os.getpid()
    assert scene.reports.port == CONFIG.ports.reports + 2
    state = scene.reports.heartbeat()
    assert (state.rank, state.epoch, state.first, state.degree) == (2, 0, 2, 1)
    assert (state.pool_id, state.manifest) == ("pool-test", "the-manifest")
    assert torch.get_num_threads() == CONFIG.threads
    assert scene.line.port == CONFIG.ports.control
    scene.reports.alive()
    assert scene.line.sent == [Alive(2)]
    assert scene_of(2).rank._incarnation != scene.rank._incarnation


# -- commit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "blocks", "block", "is_member"),
    [
        (0, FOUR, Block(0, 4), False),
        (1, FOUR, Block(0, 4), True),
        (2, RIGHT, Block(2, 2), False),
        (3, RIGHT, Block(2, 2), True),
        (1, RIGHT, Block(1, 1), False),
    ],
)
def test_a_rank_follows_to_its_block(
    scene_of: Any, number: int, blocks: tuple[tuple[int, int], ...], block: Block, is_member: bool
) -> None:
    scene = scene_of(number)
    assert scene.commit(1, *blocks) == [(Entered, number, 1), (Switched, number, 1)]
    assert scene.rank.is_member is is_member
    assert scene.rank.may_sleep is not is_member
    state = scene.rank._state()
    assert (state.epoch, state.first, state.degree) == (1, block.first, block.degree)
    assert scene.reports.beats == 1, "the router learns of it at once"


def test_a_rank_goes_through_compositions(scene_of: Any) -> None:
    scene = scene_of(3)
    for epoch, blocks, is_member in (
        (1, FOUR, True),
        (2, PAIRS, True),
        (3, [(0, 2), (2, 1), (3, 1)], False),
        (7, FOUR, True),
        (8, ALONE, False),
    ):
        assert scene.commit(epoch, *blocks) == [(Entered, 3, epoch), (Switched, 3, epoch)]
        assert scene.rank.is_member is is_member
    assert scene.geometries[-1] is None and len(scene.geometries) == 5


def test_times_are_those_of_the_machine(scene_of: Any, clock: Any) -> None:
    scene = scene_of(2)
    clock.s = 12.5
    scene.prepare(1)
    scene.commit(1, *FOUR)
    assert [message.at_s for message in scene.line.sent] == [12.5] * 3


def test_a_block_that_stays_is_not_touched(scene_of: Any) -> None:
    scene = scene_of(3)
    scene.commit(1, *RIGHT)
    before = (list(scene.geometries), list(scene.in_hand.log), scene.rank._prefills)
    assert scene.commit(2, *PAIRS) == [(Entered, 3, 2), (Switched, 3, 2)]
    assert (scene.geometries, scene.in_hand.log, scene.rank._prefills) == before
    assert scene.rank._state().epoch == 2 and scene.reports.beats == 2


@pytest.mark.parametrize(
    ("number", "kept"),
    [(0, [0, 1, None]), (1, [0, 1, None]), (2, [2, 3]), (3, [2, 3])],
)
def test_a_split_keeps_what_is_at_home_in_each_child(
    scene_of: Any, number: int, kept: list[int | None]
) -> None:
    """What has no home stays with the child of the old leader, as it did when it led all."""
    scene = scene_of(number)
    scene.commit(1, *FOUR)
    scene.in_hand.log.clear()
    scene.commit(2, *PAIRS)
    assert scene.in_hand.log == [("keep", kept, 1)], "while the old block's geometry still is"
    assert scene.geometries[-1] is scene.links[Block(number // 2 * 2, 2)].group


def test_a_split_into_single_ranks(scene_of: Any) -> None:
    scene = scene_of(2)
    scene.commit(1, *RIGHT)
    scene.in_hand.log.clear()
    scene.in_hand.homes[:] = [2, 3, None]
    scene.commit(2, *ALONE)
    assert scene.in_hand.log == [("keep", [2, None], 1)] and scene.geometries[-1] is None


def ticket(rid: str) -> Ticket:
    return Ticket(rid, b"", [], False)


@pytest.mark.parametrize("number", [2, 3])
def test_a_merge_exchanges_what_each_old_leader_has_in_hand(scene_of: Any, number: int) -> None:
    scene = scene_of(number)
    scene.commit(1, *PAIRS)
    scene.in_hand.log.clear()
    scene.in_hand.tickets = [ticket("a"), ticket("b")]
    group = scene.links[Block(0, 4)].group
    group.others = [encode_tickets([ticket("c")]), encode_tickets([])]
    scene.commit(2, *FOUR)
    mine = ["a", "b"] if number == 2 else []
    assert group.passed == [encode_tickets([ticket(rid) for rid in mine])], "members say nothing"
    assert scene.in_hand.log == [
        ("suspend", 1),
        # In the new geometry: what is made anew there must be like what it meets.
        ("resume", [*mine, "c"], ["a", "b"], 2),
    ]


def test_a_block_without_links_ends_the_rank(scene_of: Any) -> None:
    scene = scene_of(2)
    scene.links.clear()
    with pytest.raises(ValueError, match="has no links to merge over"):
        scene.commit(1, *FOUR)


def test_a_command_that_comes_again_is_answered_again(scene_of: Any) -> None:
    """The first answer may have been lost."""
    scene = scene_of(2)
    scene.prepare(1)
    scene.commit(1, *FOUR)
    before = scene.state()
    assert scene.commit(1, *FOUR) == [(Switched, 2, 1)]
    assert scene.state() == before


def test_an_epoch_that_is_over_is_not_followed(scene_of: Any) -> None:
    scene = scene_of(2)
    scene.commit(3, *FOUR)
    before = scene.state()
    assert scene.commit(2, *PAIRS) == []
    assert scene.state() == before


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(regroup_knobs(Phase.COMMIT, 0, FOUR), id="no epoch"),
        pytest.param(regroup_knobs(Phase.COMMIT, 2, [(0, 2)]), id="not the whole pool"),
        pytest.param(regroup_knobs(Phase.COMMIT, 2, [(2, 2)]), id="this rank only"),
        pytest.param(regroup_knobs(Phase.COMMIT, 2, [(0, 8)]), id="not in the lattice"),
        pytest.param(regroup_knobs(Phase.COMMIT, 2, [(1, 2), (0, 1), (3, 1)]), id="misaligned"),
        pytest.param(regroup_knobs(Phase.PREPARE, 2, [(0, 3), (3, 1)]), id="no power of two"),
        pytest.param({"vertumnus.epoch": 2}, id="no phase"),
        pytest.param(regroup_knobs(Phase.COMMIT, 2, FOUR) | {"vertumnus.phase": 9}, id="phase"),
        pytest.param(regroup_knobs(Phase.COMMIT, 2, FOUR) | {"x": 1}, id="more knobs"),
    ],
)
def test_what_is_no_command_changes_nothing(
    scene_of: Any, knobs: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(2)
    scene.commit(1, *RIGHT)
    before, told = scene.state(), len(scene.line.sent)
    scene.rank.follow(Scheduler(), knobs)
    assert scene.state() == before and len(scene.line.sent) == told
    assert "command not followed" in caplog.text
    assert scene.commit(2, *FOUR) == [(Entered, 2, 2), (Switched, 2, 2)]


def test_a_degree_that_was_not_launched_is_not_followed(scene_of: Any) -> None:
    scene = scene_of(2, config_of(4, (1, 4)))
    assert scene.commit(1, *PAIRS) == []
    assert scene.commit(1, *FOUR) == [(Entered, 2, 1), (Switched, 2, 1)]


def test_a_geometry_that_sglang_refuses_ends_the_rank(
    scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it says that it serves there."""
    scene = scene_of(2)

    def refuse(scheduler: Any, group: Any) -> None:
        raise ValueError("inconsistent")

    monkeypatch.setattr(engine, "apply_geometry", refuse)
    with pytest.raises(ValueError, match="inconsistent"):
        scene.commit(1, *FOUR)
    assert [type(message) for message in scene.line.sent] == [Entered]
    assert scene.rank._state().epoch == 0 and not scene.rank.is_member


# -- prepare and abandon --------------------------------------------------------------------------


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No requests wait; how long a rank that holds waits for messages."""
    polled: list[Any] = []
    monkeypatch.setattr(prefixes, "candidates", lambda scheduler, running: [])
    monkeypatch.setattr(prefixes, "agreed_prefixes", lambda *_: nullcontext())
    monkeypatch.setattr(engine, "no_prefill", lambda running: ("no prefill", running))
    monkeypatch.setattr(engine, "await_message", lambda _, ms: polled.append(ms))
    return polled


def test_a_leader_holds_and_says_so(scene_of: Any, planning: list[Any]) -> None:
    scene = scene_of(2)
    assert not scene.holds
    assert scene.prepare(1) == [(Ready, 2, 1)]
    assert scene.holds and scene.rank._state().epoch == 0
    assert planning == [], "decodes go on without a wait"


def test_a_member_holds_and_is_silent(scene_of: Any, planning: list[Any]) -> None:
    scene = scene_of(3)
    scene.commit(1, *RIGHT)
    assert scene.prepare(2) == [] and scene.holds


def test_a_leader_that_holds_and_has_nothing_to_do_leaves_the_cores_to_others(
    scene_of: Any, planning: list[Any]
) -> None:
    idle = SimpleNamespace(is_empty=lambda: True)
    leader, member = scene_of(2), scene_of(3)
    member.commit(1, *RIGHT)
    for scene in (leader, member):
        scene.prepare(2)
        plan = scene.rank.admit_prefills(scene.scheduler, idle, lambda: "planned")
        assert plan == ("no prefill", idle)
    assert planning == [rank_module.HOLD_POLL_MS], "a member waits for its leader instead"


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_hold_ends_with_its_move(scene_of: Any, planning: list[Any], end: str) -> None:
    scene = scene_of(2)
    scene.prepare(1)
    if end == "commit":
        scene.commit(1, *RIGHT)
    else:
        assert scene.abandon(1) == []
        assert scene.rank._state().epoch == 0 and scene.geometries == []
    assert not scene.holds


def test_another_moves_end_is_not_this_ones(scene_of: Any, planning: list[Any]) -> None:
    scene = scene_of(2)
    scene.prepare(5)
    scene.abandon(4)
    assert scene.holds
    scene.commit(4, *RIGHT)
    assert scene.holds, "the move to 5 is still being prepared"
    scene.abandon(5)
    assert not scene.holds


def test_a_move_that_was_abandoned_may_be_tried_again(scene_of: Any, planning: list[Any]) -> None:
    scene = scene_of(2)
    scene.prepare(1)
    scene.abandon(1)
    assert scene.prepare(2) == [(Ready, 2, 2)]
    assert scene.commit(2, *FOUR) == [(Entered, 2, 2), (Switched, 2, 2)]


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_move_to_an_epoch_that_is_not_ahead_is_refused(
    scene_of: Any, planning: list[Any], epoch: int
) -> None:
    scene = scene_of(2)
    scene.commit(3, *RIGHT)
    before = scene.state()
    assert scene.prepare(epoch) == [(Refused, 2, epoch)]
    assert f"epoch {epoch} is not newer than 3" in scene.line.sent[-1].reason
    assert scene.state() == before and not scene.holds


def test_a_member_refuses_in_silence(scene_of: Any, planning: list[Any]) -> None:
    scene = scene_of(3)
    scene.commit(3, *RIGHT)
    assert scene.prepare(3) == [] and not scene.holds


def test_a_forgotten_hold_ends_on_all_ranks_of_the_block_in_the_same_step(
    scene_of: Any, planning: list[Any], clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang", reason="makes the message")
    leader, member = scene_of(2), scene_of(3)
    for scene in (leader, member):
        scene.commit(1, *RIGHT)
        scene.prepare(2)
    clock.s += HOLD_S
    assert leader.rank.exchange_requests([]) == []
    clock.s += 0.1
    (command,) = leader.rank.exchange_requests([])
    streams = [scene.links[Block(2, 2)].stream for scene in (leader, member)]
    streams[1].coming = streams[0].sent[-1:]
    (same,) = member.rank.exchange_requests(None)
    assert leader.holds and member.holds, "until they reach it"
    for scene, message in ((leader, command), (member, same)):
        scene.rank.follow(scene.scheduler, message.server_args)
        assert not scene.holds and scene.rank._state().epoch == 1
    assert leader.rank.exchange_requests([]) == [], "once"
    assert leader.commit(2, *FOUR) == [(Entered, 2, 2), (Switched, 2, 2)], "a late COMMIT counts"


def test_a_pool_without_single_ranks_forgets_a_hold_too(
    scene_of: Any, planning: list[Any], clock: Any
) -> None:
    pytest.importorskip("sglang", reason="makes the message")
    scene = scene_of(2, config_of(4, (2, 4)))
    scene.commit(1, *PAIRS)
    scene.prepare(2, *FOUR)
    clock.s += HOLD_S + 1
    (command,) = scene.rank.exchange_requests([])
    scene.rank.follow(scene.scheduler, command.server_args)
    assert not scene.holds


# -- homes ----------------------------------------------------------------------------------------


def test_one_rank_of_a_block_answers_for_each_request(scene_of: Any) -> None:
    pair = [scene_of(2), scene_of(3)]
    for scene in pair:
        scene.commit(1, *RIGHT)
    for home, answering in ((2, 2), (3, 3), (None, 2), (0, 2)):
        found = [scene.number for scene in pair if scene.rank.answers(home)]
        assert found == [answering]


def test_a_rank_alone_answers_for_all_and_keeps_all(scene_of: Any) -> None:
    rank = scene_of(2).rank
    for home in (2, None, 0):
        assert rank.answers(home)


# -- prefills -------------------------------------------------------------------------------------


def test_a_block_agrees_before_it_plans(scene_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(2)
    scene.commit(1, *RIGHT)
    waiting, log = ["a", "b", "c"], []

    @contextmanager
    def agreed(scheduler: Any, requests: Any, lengths: Any, budget: Any) -> Iterator[None]:
        log.append(("agreed", requests, lengths, budget))
        yield
        log.append("over")

    def agree(scheduler: Any, requests: Any, group: Any, priority: int) -> Agreement:
        log.append(("agree", requests, group.block, priority))
        return Agreement((16, 0), 16)

    monkeypatch.setattr(prefixes, "candidates", lambda scheduler, running: waiting)
    monkeypatch.setattr(prefixes, "agreed_prefixes", agreed)
    monkeypatch.setattr(rank_module, "agree", agree)
    plan = scene.rank.admit_prefills(scene.scheduler, RUNNING, lambda: log.append("plan") or "p")
    assert plan == "p"
    assert log == [
        ("agree", waiting, Block(2, 2), SURPLUS_PRIORITY),
        ("agreed", ["a", "b"], (16, 0), None),
        "plan",
        "over",
    ]


def test_a_step_without_requests_takes_none_that_is_ready_meanwhile(
    scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang looks for compiled grammars while it plans; each rank at a moment of its own."""
    scene = scene_of(2)
    scene.commit(1, *RIGHT)
    seen = []

    @contextmanager
    def agreed(scheduler: Any, requests: Any, lengths: Any, budget: Any) -> Iterator[None]:
        seen.append((requests, lengths, budget))
        yield
        seen.append("over")

    monkeypatch.setattr(prefixes, "candidates", lambda scheduler, running: [])
    monkeypatch.setattr(prefixes, "agreed_prefixes", agreed)
    assert (
        scene.rank.admit_prefills(scene.scheduler, RUNNING, lambda: seen.append("plan") or 7) == 7
    )
    assert seen == [([], (), None), "plan", "over"]


def test_a_rank_alone_plans_as_it_likes(scene_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "candidates", lambda *_: pytest.fail("it asked"))
    scene = scene_of(2)
    assert scene.rank.admit_prefills(scene.scheduler, RUNNING, lambda: "plan") == "plan"


# -- the step -------------------------------------------------------------------------------------


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of these tests are numbers; SGLang's are tested with the messages themselves."""
    from sgl_vertumnus.worker import exchange

    monkeypatch.setattr(exchange, "encode_requests", lambda step: repr(step).encode())
    monkeypatch.setattr(exchange, "decode_requests", lambda payload: eval(payload.decode()))
    monkeypatch.setattr(rank_module, "is_regroup", lambda message: message < 0)


def test_a_rank_alone_keeps_its_requests(scene_of: Any, wire: None) -> None:
    scene = scene_of(2)
    assert scene.rank.exchange_requests([1, 2]) == [1, 2]
    assert scene.rank.exchange_requests([]) == scene.rank.exchange_requests(None) == []
    assert not any(link.stream.sent for link in scene.links.values())


def test_a_leader_tells_its_members_every_step(scene_of: Any, wire: None) -> None:
    scene = scene_of(2)
    scene.commit(1, *RIGHT)
    assert scene.rank.exchange_requests([1, 2]) == [1, 2]
    assert scene.rank.exchange_requests([]) == []
    told = [(Content.REQUESTS, b"[1, 2]"), (Content.REQUESTS, b"[]")]
    assert scene.links[Block(2, 2)].stream.sent == told
    assert scene.links[Block(0, 4)].stream.sent == []


def test_a_member_does_what_its_leader_says(scene_of: Any, wire: None) -> None:
    scene = scene_of(3)
    scene.commit(1, *RIGHT)
    stream = scene.links[Block(2, 2)].stream
    stream.coming = [(Content.REQUESTS, b"[1, 2]"), (Content.REQUESTS, b"[]")]
    assert scene.rank.exchange_requests(None) == [1, 2]
    assert scene.rank.exchange_requests(["its own socket"]) == []
    assert stream.sent == []


def test_a_leader_holds_what_follows_a_command_and_stays_awake(scene_of: Any, wire: None) -> None:
    scene = scene_of(2)
    assert scene.rank.exchange_requests([1, -1, 2]) == [1, -1]
    assert not scene.rank.may_sleep
    assert scene.rank.exchange_requests([3]) == [2, 3]
    assert scene.rank.may_sleep


def test_sampled_tokens_are_the_leaders(scene_of: Any) -> None:
    leader, member = scene_of(2), scene_of(3)
    for scene in (leader, member):
        scene.commit(1, *RIGHT)
    ids = torch.tensor([5, 6])
    leader.rank.sync_token_ids(ids)
    streams = [scene.links[Block(2, 2)].stream for scene in (leader, member)]
    streams[1].coming = streams[0].sent
    others = torch.tensor([1, 2])
    member.rank.sync_token_ids(others)
    assert ids.tolist() == others.tolist() == [5, 6]


def test_work_decides_what_is_sharded(scene_of: Any) -> None:
    scene = scene_of(2)
    scene.commit(1, *FOUR)
    assert scene.rank.shards([1000], [1000], 4) and not scene.rank.shards([10], [10], 4)


# -- reports --------------------------------------------------------------------------------------


def batch_of(*rids: str, extend: bool, chunked: tuple[str, ...] = ()) -> Any:
    """A batch whose requests get a token, but for those in ``chunked``."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        reqs=[
            SimpleNamespace(
                rid=rid,
                origin_input_ids=[0] * 10,
                cached_tokens=4,
                output_ids=[] if extend else [7],
                is_chunked=rid in chunked,
                finished=lambda: False,
            )
            for rid in rids
        ],
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(rank_module.time, "perf_counter", lambda: now.s)
    return now


def step(scene: Scene, clock: Any, batch: Any, seconds: float) -> None:
    scene.rank.on_batch_started(scene.scheduler, batch)
    clock.s += seconds
    for request in batch.reqs:
        request.output_ids += [] if request.is_chunked else [7]
    scene.rank.on_batch_finished(scene.scheduler, batch)


def test_prefills_are_reported_with_their_epoch_and_life(scene_of: Any, clock: Any) -> None:
    scene = scene_of(2)
    scene.commit(1, *RIGHT)
    step(scene, clock, batch_of("a", "b", extend=True, chunked=("b",)), 1.0)
    step(scene, clock, batch_of("a", extend=False), 5.0)
    step(scene, clock, batch_of("b", extend=True), 0.5)
    started, first, second = scene.reports.sent
    life = scene.rank._incarnation
    assert started == PrefillStarted(rank=2, incarnation=life, epoch=1, rids=("a", "b"))
    assert isinstance(first, PrefillFinished) and (first.rank, first.epoch) == (2, 1)
    assert [(d.rid, d.input_tokens, d.cached_tokens, d.compute_s) for d in first.done] == [
        ("a", 10, 4, 1.0)
    ]
    assert [(d.rid, d.compute_s) for d in second.done] == [("b", 1.5)]


def test_a_request_that_goes_on_after_a_move_has_had_its_prefill(scene_of: Any, clock: Any) -> None:
    scene = scene_of(2)
    batch = batch_of("resumed", "new", extend=True)
    batch.reqs[0].output_ids = [1, 2, 3]
    step(scene, clock, batch, 1.0)
    started, finished = scene.reports.sent
    assert started.rids == ("new",)
    assert [done.rid for done in finished.done] == ["new"]


def test_a_prefill_that_goes_on_in_a_new_block_begins_there(scene_of: Any, clock: Any) -> None:
    """The router has forgotten the old epoch's workers; time spent there is not the new one's."""
    scene = scene_of(2)
    step(scene, clock, batch_of("long", extend=True, chunked=("long",)), 8.0)
    scene.commit(1, *RIGHT)
    step(scene, clock, batch_of("long", extend=True), 1.0)
    _, again, finished = scene.reports.sent
    assert (again.epoch, again.rids) == (1, ("long",))
    assert [done.compute_s for done in finished.done] == [1.0]


def test_members_report_no_prefills(scene_of: Any, clock: Any) -> None:
    scene = scene_of(3)
    scene.commit(1, *RIGHT)
    step(scene, clock, batch_of("a", extend=True), 1.0)
    assert scene.reports.sent == []
    scene.commit(2, *ALONE)
    step(scene, clock, batch_of("a", extend=True), 1.0)
    assert [type(report) for report in scene.reports.sent] == [PrefillStarted, PrefillFinished]


def test_a_former_leader_reports_nothing_of_its_members_time(scene_of: Any, clock: Any) -> None:
    scene = scene_of(3)
    step(scene, clock, batch_of("a", extend=True), 1.0)
    scene.reports.sent.clear()
    scene.commit(1, *FOUR)
    step(scene, clock, batch_of("b", extend=True), 1.0)
    assert scene.reports.sent == []


def test_the_heartbeat_carries_the_load(scene_of: Any) -> None:
    scene = scene_of(2)
    state = scene.rank._state()
    assert isinstance(state, RankState) and state.kv_capacity_tokens == 0
    scene.commit(1, *FOUR)
    state = scene.rank._state()
    assert (state.running_requests, state.waiting_requests) == (2, 1)
    assert (state.kv_used_tokens, state.kv_capacity_tokens) == (100, 1000)


# -- the KV service -------------------------------------------------------------------------------


def test_a_rank_has_a_kv_service_of_its_own(scene_of: Any) -> None:
    scene = scene_of(2)
    service = scene.rank._kv
    assert service.address == f"127.0.0.1:{CONFIG.ports.kv_service + 2}"
    assert service.fields == {
        "rank": 2,
        "incarnation": scene.rank._incarnation,
        "secret": "s3cret",
        "force_mooncake": False,
    }
    assert service.scheduler() is None
    scene.commit(1, *PAIRS)
    assert service.scheduler() is scene.scheduler
    scene.rank.on_block_event("event")
    scene.rank.on_events_published()
    assert service.told == ["event", "published"]


def test_a_rank_that_has_not_joined_has_no_kv_service() -> None:
    rank = RankRuntime(CONFIG, "m")
    rank.on_block_event("event")  # type: ignore[arg-type]
    rank.on_events_published()
    assert rank._kv is None


def test_the_tree_is_open_while_the_rank_waits_or_computes(
    scene_of: Any, wire: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(3)
    rank = scene.rank
    seen: list[bool] = []

    def look(*_: Any) -> list[Any]:
        seen.append(is_open(rank))
        return []

    assert not is_open(rank), "before its first step"
    rank.exchange_requests([])
    assert not is_open(rank)
    rank.sleep(look)
    assert rank.compute_once(None, None, look) == []
    monkeypatch.setattr(engine, "await_message", look)
    monkeypatch.setattr(engine, "no_prefill", lambda _: None)
    scene.prepare(1)
    rank.admit_prefills(scene.scheduler, SimpleNamespace(is_empty=lambda: True), look)
    scene.commit(1, *RIGHT)
    monkeypatch.setattr(rank_module, "receive_step", look)
    rank.exchange_requests(None)
    assert seen == [True] * 4
    rank.sleep(look)
    assert len(seen) == 4, "a member does not sleep"
    assert not is_open(rank)


def test_whoever_waits_for_the_tree_is_let_in_at_the_next_step(scene_of: Any, wire: None) -> None:
    rank = scene_of(0).rank
    rank.exchange_requests([])
    inside = threading.Event()

    def wait_for_it() -> None:
        with rank._baton.held(10):
            inside.set()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    while not rank._baton._waiting:
        time.sleep(0.001)
    rank.exchange_requests([])
    assert inside.is_set()
    thread.join()


# -- memory ---------------------------------------------------------------------------------------


class Capacities:
    """A block's group in which every rank tells its own."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def gather_numbers(self, numbers: Any) -> list[list[int]]:
        return [list(numbers), *([other] for other in self.tokens)]


def test_ranks_that_may_share_a_block_have_the_same_capacity() -> None:
    """Each measures its own GPU; one page more, and it would admit what the others do not."""
    runtime = RankRuntime(CONFIG, "manifest")
    assert runtime.least_capacity(640) == 640, "no block but itself"
    groups: Any = {Block(0, 2): Capacities([704]), Block(0, 4): Capacities([704, 576, 704])}
    stream: Any = Stream()
    runtime._lattice = {block: Links(group, stream) for block, group in groups.items()}
    assert runtime.least_capacity(640) == 576
