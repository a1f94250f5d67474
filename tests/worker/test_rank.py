"""One rank: what it refuses, what it becomes, what it tells its block and the router."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vertumnus_patches import engine
from vertumnus_patches.regroup_message import regroup_knobs
from vertumnus_router.lattice import Block, lattice
from vertumnus_router.protocol import PrefillFinished, PrefillStarted, RankState, encode_report

from sgl_vertumnus.worker import rank as rank_module
from sgl_vertumnus.worker.groups import Links
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
    def __init__(self, host: str, port: int, heartbeat: Any) -> None:
        self.port, self.heartbeat = port, heartbeat
        self.sent: list[Any] = []
        self.beats = 0

    def send(self, report: Any) -> None:
        encode_report(report)
        self.sent.append(report)

    def beat(self) -> None:
        self.beats += 1


class Scheduler:
    """What a rank asks of a scheduler."""

    def __init__(self) -> None:
        self.idle = True
        self.max_total_num_tokens = 1000
        self.running_batch = SimpleNamespace(reqs=["a", "b"])
        self.waiting_queue = ["c"]
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 900)
        self.model_config = SimpleNamespace(hidden_size=576)

    def is_fully_idle(self) -> bool:
        return self.idle


class Scene:
    """A rank that has joined its pool, on fake links, and what SGLang was told."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch, config: Any = CONFIG) -> None:
        self.number = number
        self.geometries: list[Any] = []
        self.flushes = 0
        self.store = dist.HashStore()
        self.links = {
            block: Links(SimpleNamespace(block=block), Stream())  # type: ignore[arg-type]
            for block in lattice(config.size, config.degrees)
            if block.degree > 1 and number in block
        }
        monkeypatch.setattr(engine, "data_parallel_rank", lambda: number)
        monkeypatch.setattr(
            engine, "apply_geometry", lambda scheduler, group: self.geometries.append(group)
        )
        monkeypatch.setattr(engine, "flush", lambda scheduler: self._flush())
        monkeypatch.setattr(rank_module, "connect_store", lambda _: self.store)
        monkeypatch.setattr(rank_module, "build_links", lambda *_: self.links)
        monkeypatch.setattr(rank_module, "Reporter", Reports)
        self.rank = RankRuntime(config, "the-manifest")
        self.rank.on_parallel_ready()
        self.scheduler = Scheduler()
        reporter = self.rank._reporter
        assert isinstance(reporter, Reports)
        self.reports = reporter

    def _flush(self) -> None:
        self.flushes += 1

    def regroup(self, epoch: int, *blocks: tuple[int, int]) -> bool:
        return self.rank.reconfigure(self.scheduler, regroup_knobs(epoch, blocks))

    def state(self) -> Any:
        keys = ("_serving", "_links", "_scheduler")
        return (
            [getattr(self.rank, key) for key in keys],
            self.rank.is_member,
            self.rank.may_sleep,
            list(self.geometries),
            self.flushes,
            self.reports.beats,
            self.rank._state(),
        )


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    threads = torch.get_num_threads()
    yield lambda number=2, config=CONFIG: Scene(number, monkeypatch, config)
    torch.set_num_threads(threads)


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
    assert scene_of(2).rank._incarnation != scene.rank._incarnation


# -- regrouping -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "blocks", "block", "is_member"),
    [
        (0, [(0, 4)], Block(0, 4), False),
        (1, [(0, 4)], Block(0, 4), True),
        (2, [(0, 1), (1, 1), (2, 2)], Block(2, 2), False),
        (3, [(0, 1), (1, 1), (2, 2)], Block(2, 2), True),
        (1, [(0, 1), (1, 1), (2, 2)], Block(1, 1), False),
    ],
)
def test_a_rank_follows_to_its_block(
    scene_of: Any, number: int, blocks: list[tuple[int, int]], block: Block, is_member: bool
) -> None:
    scene = scene_of(number)
    assert scene.regroup(1, *blocks)
    assert scene.rank.is_member is is_member
    assert scene.rank.may_sleep is not is_member
    link = scene.links.get(block)
    assert scene.geometries == [link.group if link else None]
    state = scene.rank._state()
    assert (state.epoch, state.first, state.degree) == (1, block.first, block.degree)
    assert scene.reports.beats == 1, "the router learns of it at once"


def test_a_rank_goes_through_compositions(scene_of: Any) -> None:
    scene = scene_of(3)
    for epoch, blocks, is_member in (
        (1, [(0, 4)], True),
        (2, [(0, 2), (2, 2)], True),
        (3, [(0, 2), (2, 1), (3, 1)], False),
        (7, [(0, 4)], True),
        (8, [(0, 1), (1, 1), (2, 1), (3, 1)], False),
    ):
        assert scene.regroup(epoch, *blocks)
        assert scene.rank.is_member is is_member
    assert scene.geometries[-1] is None and len(scene.geometries) == 5


def test_prefixes_of_ranks_that_served_apart_are_forgotten_in_lockstep(scene_of: Any) -> None:
    """A block whose ranks match different prefixes would run different batches."""
    scene = scene_of(3)
    for epoch, blocks, flushes in (
        (1, [(0, 1), (1, 1), (2, 1), (3, 1)], 0),  # alone before, alone now
        (2, [(0, 2), (2, 2)], 1),
        (3, [(0, 1), (1, 1), (2, 2)], 1),  # its own block stays
        (4, [(0, 4)], 2),
        (5, [(0, 2), (2, 1), (3, 1)], 2),  # a split keeps what all have
        (6, [(0, 2), (2, 2)], 3),
    ):
        assert scene.regroup(epoch, *blocks)
        assert scene.flushes == flushes


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(regroup_knobs(1, [(0, 1), (1, 1), (2, 2)]), id="current epoch"),
        pytest.param(regroup_knobs(0, [(0, 4)]), id="old epoch"),
        pytest.param(regroup_knobs(2, [(0, 2)]), id="not the whole pool"),
        pytest.param(regroup_knobs(2, [(2, 2)]), id="not the whole pool, but this rank"),
        pytest.param(regroup_knobs(2, [(0, 8)]), id="not in the lattice"),
        pytest.param(regroup_knobs(2, [(1, 2), (0, 1), (3, 1)]), id="misaligned"),
        pytest.param(regroup_knobs(2, [(0, 3), (3, 1)]), id="no power of two"),
        pytest.param({"vertumnus.epoch": 2}, id="no blocks"),
        pytest.param({"vertumnus.epoch": 2.5, "vertumnus.leader.0": 4}, id="half an epoch"),
        pytest.param({"vertumnus.epoch": 2, "vertumnus.leader.0": 4, "x": 1}, id="more knobs"),
    ],
)
def test_a_refused_command_leaves_everything_as_it_was(
    scene_of: Any, knobs: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of(2)
    assert scene.regroup(1, (0, 1), (1, 1), (2, 2))
    before = scene.state()
    assert scene.rank.reconfigure(Scheduler(), knobs) is False
    assert scene.state() == before
    assert "regroup refused" in caplog.text
    assert scene.regroup(2, (0, 4)), "a refusal does not use up the epoch"


def test_a_busy_rank_refuses_and_follows_when_it_is_idle(scene_of: Any) -> None:
    scene = scene_of(2)
    scene.scheduler.idle = False
    before = scene.state()
    assert not scene.regroup(1, (0, 4))
    assert scene.state() == before
    scene.scheduler.idle = True
    assert scene.regroup(1, (0, 4))


def test_a_degree_that_was_not_launched_is_refused(scene_of: Any) -> None:
    scene = scene_of(2, config_of(4, (1, 4)))
    assert not scene.regroup(1, (0, 2), (2, 2))
    assert scene.regroup(1, (0, 4))


def test_a_geometry_that_sglang_refuses_ends_the_rank_as_it_was(
    scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(2)
    before = scene.state()

    def refuse(scheduler: Any, group: Any) -> None:
        raise ValueError("inconsistent")

    monkeypatch.setattr(engine, "apply_geometry", refuse)
    with pytest.raises(ValueError, match="inconsistent"):
        scene.regroup(1, (0, 4))
    scene.flushes = 0  # what was forgotten costs time, nothing else
    assert scene.state() == before


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
    scene.regroup(1, (0, 1), (1, 1), (2, 2))
    assert scene.rank.exchange_requests([1, 2]) == [1, 2]
    assert scene.rank.exchange_requests([]) == []
    told = [(Content.REQUESTS, b"[1, 2]"), (Content.REQUESTS, b"[]")]
    assert scene.links[Block(2, 2)].stream.sent == told
    assert scene.links[Block(0, 4)].stream.sent == []


def test_a_member_does_what_its_leader_says(scene_of: Any, wire: None) -> None:
    scene = scene_of(3)
    scene.regroup(1, (0, 1), (1, 1), (2, 2))
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
        scene.regroup(1, (0, 1), (1, 1), (2, 2))
    ids = torch.tensor([5, 6])
    leader.rank.sync_token_ids(ids)
    streams = [scene.links[Block(2, 2)].stream for scene in (leader, member)]
    streams[1].coming = streams[0].sent
    others = torch.tensor([1, 2])
    member.rank.sync_token_ids(others)
    assert ids.tolist() == others.tolist() == [5, 6]


def test_work_decides_what_is_sharded(scene_of: Any) -> None:
    scene = scene_of(2)
    scene.regroup(1, (0, 4))
    assert scene.rank.shards([1000], [1000], 4) and not scene.rank.shards([10], [10], 4)


# -- reports --------------------------------------------------------------------------------------


def batch_of(*rids: str, extend: bool, chunked: tuple[str, ...] = ()) -> Any:
    """A batch whose requests have their first token, but for those in ``chunked``."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        reqs=[
            SimpleNamespace(
                rid=rid,
                origin_input_ids=[0] * 10,
                cached_tokens=4,
                output_ids=[] if rid in chunked else [7],
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
    scene.rank.on_batch_finished(scene.scheduler, batch)


def test_prefills_are_reported_with_their_epoch_and_life(scene_of: Any, clock: Any) -> None:
    scene = scene_of(2)
    scene.regroup(1, (0, 1), (1, 1), (2, 2))
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


def test_members_report_no_prefills(scene_of: Any, clock: Any) -> None:
    scene = scene_of(3)
    scene.regroup(1, (0, 1), (1, 1), (2, 2))
    step(scene, clock, batch_of("a", extend=True), 1.0)
    assert scene.reports.sent == []
    scene.regroup(2, (0, 1), (1, 1), (2, 1), (3, 1))
    step(scene, clock, batch_of("a", extend=True), 1.0)
    assert [type(report) for report in scene.reports.sent] == [PrefillStarted, PrefillFinished]


def test_a_former_leader_reports_nothing_of_its_members_time(scene_of: Any, clock: Any) -> None:
    scene = scene_of(3)
    step(scene, clock, batch_of("a", extend=True), 1.0)
    scene.reports.sent.clear()
    scene.regroup(1, (0, 4))
    step(scene, clock, batch_of("b", extend=True), 1.0)
    assert scene.reports.sent == []


def test_the_heartbeat_carries_the_load(scene_of: Any) -> None:
    scene = scene_of(2)
    state = scene.rank._state()
    assert isinstance(state, RankState) and state.kv_capacity_tokens == 0
    scene.regroup(1, (0, 4))
    state = scene.rank._state()
    assert (state.running_requests, state.waiting_requests) == (2, 1)
    assert (state.kv_used_tokens, state.kv_capacity_tokens) == (100, 1000)
