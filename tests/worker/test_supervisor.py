"""The controller's loop: SGLang's messages, real sockets, real processes that die."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import zmq
from vertumnus_patches import engine
from vertumnus_patches.regroup_message import Phase, read_regroup, regroup_message
from vertumnus_router.protocol import (
    REPORT_TOPIC,
    BlockState,
    MoveReport,
    PoolComposition,
    RankLost,
    decode_report,
)

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.processes import cpu_s, family
from sgl_vertumnus.worker.control import (
    Alive,
    Describe,
    Described,
    Entered,
    Move,
    Moved,
    RankMessage,
    Ready,
    Refused,
    Rejected,
    SupervisorAnswer,
    Switched,
)
from sgl_vertumnus.worker.control_sockets import (
    ask_composition,
    ask_move,
    front_url,
    ranks_url,
)
from sgl_vertumnus.worker.rank import pid_key
from sgl_vertumnus.worker.rendezvous import open_store
from tests.patches.sglang_requests import generate_request
from tests.worker.configs import config_of
from tests.worker.controller_process import supervise
from tests.worker.ranks import started

io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang")
TIMEOUT_S = 20.0


class Pool:
    """The controller's surroundings: its front, its ranks, its listeners."""

    def __init__(self, config: PoolConfig, context: "zmq.Context[Any]", deaf: set[int]) -> None:
        self.config = config
        self._context = context
        self.to_controller = context.socket(zmq.PUSH)
        self.front = context.socket(zmq.PULL)
        self.ranks = [context.socket(zmq.PULL) for _ in range(config.size)]
        self.lost = context.socket(zmq.SUB)
        self.to_supervisor = context.socket(zmq.PUSH)
        self.to_supervisor.connect(ranks_url(config))
        self.processes = [subprocess.Popen(["sleep", "600"]) for _ in range(config.size)]
        self.addresses = [
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for socket in (self.to_controller, self.front, *self.ranks)
        ]
        self.workers = [
            None if rank in deaf else address for rank, address in enumerate(self.addresses[2:])
        ]
        self.controller: Any = None
        self.fed: Any = None

    def listen(self) -> None:
        """Hear of lost ranks from now on."""
        monitor = self.lost.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.lost.subscribe(REPORT_TOPIC)
        self.lost.connect(f"tcp://127.0.0.1:{self.config.ports.reports + self.config.size}")
        assert monitor.poll(int(TIMEOUT_S * 1000))
        self.lost.disable_monitor()

    def send(self, message: Any) -> None:
        io_struct.sock_send(self.to_controller, message)

    def request(self, rid: str, rank: int | None = None, **fields: Any) -> None:
        self.send(generate_request(rid, routed_dp_rank=rank, **fields))

    def say(self, *messages: RankMessage) -> None:
        """As ranks do."""
        for message in messages:
            self.to_supervisor.send(msgspec.msgpack.encode(message))

    def question(self, question: Move | Describe) -> "Asked":
        asked = Asked(self._context, self.config)
        asked.send(msgspec.msgpack.encode(question))
        return asked

    def commanded(self, phase: Phase, epoch: int, *ranks: int) -> None:
        """The next that these ranks get is this command."""
        for rank in ranks:
            message = self.at(rank)
            assert isinstance(message, io_struct.SetInternalStateReq), message
            assert read_regroup(message.server_args)[:2] == (phase, epoch)

    def begin(self, epoch: int, composition: str, holders: Sequence[int]) -> "Asked":
        """A move up to the point where the ranks have been told to prepare."""
        asked = self.question(Move(composition))
        self.commanded(Phase.PREPARE, epoch, *holders)
        return asked

    def move(
        self, epoch: int, composition: str, *, holders: Sequence[int], leaders: Sequence[int]
    ) -> MoveReport:
        """A whole move; ``leaders`` are those before it, ``holders`` the ones whose blocks end."""
        asked = self.begin(epoch, composition, holders)
        self.say(*(Ready(rank, epoch, 0.0) for rank in holders))
        self.commanded(Phase.COMMIT, epoch, *leaders)
        self.say(*(Switched(rank, epoch, 0.0) for rank in range(self.config.size)))
        answer = asked.answer()
        assert isinstance(answer, Moved)
        return answer.report

    def describe(self) -> PoolComposition:
        answer = self.question(Describe()).answer()
        assert isinstance(answer, Described)
        return answer.composition

    def at(self, rank: int) -> Any:
        """The next message that a rank gets."""
        return received(self.ranks[rank])

    def abort(self) -> Any:
        """The next request that the front is told not to wait for."""
        message = received(self.front)
        assert isinstance(message, io_struct.AbortReq)
        return message

    def kill(self, rank: int) -> RankLost:
        """Ends a rank; what the listeners are told first."""
        self.processes[rank].kill()
        return self.heard()

    def heard(self) -> RankLost:
        assert self.lost.poll(int(TIMEOUT_S * 1000)), "nobody said that a rank is lost"
        report = decode_report(self.lost.recv_multipart())
        assert isinstance(report, RankLost)
        return report

    def is_silent(self) -> bool:
        """Whether everything that was sent has been read, and nothing is on the way."""
        return not any(socket.poll(100) for socket in (*self.ranks, self.front))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Asked:
    """A question of the front, with a socket of its own."""

    def __init__(self, context: "zmq.Context[Any]", config: PoolConfig) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(front_url(config))
        self.send = self._socket.send

    def answer(self) -> Any:
        assert self._socket.poll(int(TIMEOUT_S * 1000)), "no answer"
        return msgspec.msgpack.decode(self._socket.recv(), type=SupervisorAnswer)

    def is_unanswered(self) -> bool:
        return not self._socket.poll(100)


def received(socket: Any) -> Any:
    assert socket.poll(int(TIMEOUT_S * 1000)), "nothing came"
    return io_struct.sock_recv(socket)


Start = Callable[..., Pool]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a supervised controller for four ranks; returns when it dispatches."""
    context: zmq.Context[Any] = zmq.Context()
    ends: list[Callable[[], object]] = []
    stores = []

    def begin(
        size: int = 4,
        *,
        deaf: set[int] = frozenset(),  # type: ignore[assignment]
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> Pool:
        config = config_of(size, tuple(d for d in (1, 2, 4) if d <= size))
        store = open_store(config)
        pool = Pool(config, context, deaf)
        ends.append(pool.close)
        for rank, process in enumerate(pool.processes):
            store.set(pid_key(rank), str(process.pid))
        to_controller, front, *_ = pool.addresses
        arguments = (config, to_controller, front, pool.workers, dict(constants))
        running = started(supervise, [arguments])
        ((pool.controller, pool.fed),) = running.__enter__()
        ends.append(partial(running.__exit__, None, None, None))
        stores.append(store)
        pool.listen()
        pool.request("hello", size)  # to nobody, and so remembered by nobody
        assert pool.abort().rid == "hello"
        return pool

    yield begin
    for end in reversed(ends):
        end()
    context.destroy(linger=0)


# -- who gets what --------------------------------------------------------------------------------


def test_at_first_every_rank_takes_its_own(start: Start) -> None:
    pool = start()
    for rank in range(4):
        pool.request(f"r{rank}", rank)
        request = pool.at(rank)
        assert (request.rid, request.routed_dp_rank) == (f"r{rank}", rank)
    for number in range(4):
        pool.request(f"any{number}")
    assert {pool.at(rank).rid for rank in range(4)} == {"any0", "any1", "any2", "any3"}
    pool.send(io_struct.FlushCacheReqInput())
    assert all(isinstance(pool.at(rank), io_struct.FlushCacheReqInput) for rank in range(4))
    assert pool.is_silent()


def test_leaders_take_the_requests_of_their_blocks_and_leave_each_its_home(start: Start) -> None:
    pool = start()
    pool.move(1, "1x2,2x1", holders=[0, 1], leaders=[0, 1, 2, 3])
    for home, leader in enumerate([0, 0, 2, 3]):
        pool.request(f"to-{home}", home)
        request = pool.at(leader)
        assert (request.rid, request.routed_dp_rank) == (f"to-{home}", home)
    for number in range(8):
        pool.request(f"any{number}")
    given = [pool.at(leader) for leader in (0, 0, 0, 0, 2, 2, 3, 3)]
    assert sorted(request.rid for request in given) == [f"any{n}" for n in range(8)]
    assert sorted(request.routed_dp_rank for request in given) == [0, 0, 1, 1, 2, 2, 3, 3]
    pool.send(io_struct.AbortReq(rid="any"))
    assert [pool.at(rank).rid for rank in (0, 2, 3)] == ["any"] * 3
    assert pool.is_silent()


def test_a_request_without_a_home_goes_where_its_decode_server_looks_for_it(start: Start) -> None:
    """SGLang's rule for a room; what names its home keeps it."""
    pool = start()
    for room in (7, 4, 2**60 + 1):
        pool.request(f"room-{room}", bootstrap_room=room)
        assert pool.at(room % 4).routed_dp_rank == room % 4
    pool.request("named", 3, bootstrap_room=4)
    assert pool.at(3).rid == "named"


def test_health_checks_of_a_prefill_pool_go_to_who_serves(start: Start) -> None:
    """SGLang gives all of them room 0, and no decode server waits for any."""
    pool = start()
    pool.kill(0)
    fake = engine.unpaired_fields()
    for number in range(3):
        pool.request(f"health-{number}", **fake)
    assert {pool.at(rank).rid for rank in (1, 2, 3)} == {f"health-{n}" for n in range(3)}


def test_a_batch_is_dispatched_one_by_one(start: Start) -> None:
    pool = start()
    pool.move(1, "2x2", holders=range(4), leaders=range(4))
    requests = [generate_request(f"b{rank}", routed_dp_rank=rank) for rank in range(4)]
    pool.send(io_struct.BatchTokenizedGenerateReqInput(batch=requests))
    assert [pool.at(0).rid, pool.at(0).rid] == ["b0", "b1"]
    assert [pool.at(2).rid, pool.at(2).rid] == ["b2", "b3"]


# -- moves ----------------------------------------------------------------------------------------


def test_requests_go_to_the_new_leaders_from_the_commit_on(start: Start) -> None:
    pool = start()
    pool.request("before", 3)
    assert pool.at(3).rid == "before"
    asked = pool.begin(1, "1x4", range(4))
    assert pool.describe().moving == "1x4"
    pool.request("during", 3)
    assert pool.at(3).rid == "during"
    pool.say(*(Ready(rank, 1, 0.0) for rank in range(4)))
    pool.commanded(Phase.COMMIT, 1, 0, 1, 2, 3)
    pool.request("behind", 3)
    request = pool.at(0)
    assert (request.rid, request.routed_dp_rank) == ("behind", 3)
    pool.send(io_struct.FlushCacheReqInput())
    assert isinstance(pool.at(0), io_struct.FlushCacheReqInput)
    pool.say(*(Switched(rank, 1, 0.0) for rank in range(4)))
    assert asked.answer().report.outcome == "committed"
    assert pool.is_silent()


def test_stages_are_measured_from_the_question_to_the_answer(start: Start) -> None:
    pool = start()
    began = time.monotonic()
    asked = pool.begin(1, "1x2,2x1", [0, 1])
    ready_s = time.monotonic()
    pool.say(Ready(0, 1, ready_s - 60.0), Ready(1, 1, ready_s))
    pool.commanded(Phase.COMMIT, 1, 0, 1, 2, 3)
    pool.say(Entered(0, 1, ready_s + 0.25), Entered(1, 1, ready_s + 0.125))
    pool.say(Switched(0, 1, ready_s + 0.5), Switched(1, 1, ready_s + 0.75))
    stages = asked.answer().report.stages
    assert 0 <= stages.drain <= (ready_s - began) * 1000
    assert stages.vote == pytest.approx(250) and stages.switch == pytest.approx(500)
    assert stages.publish == 0, "stamps from the future count nothing"


def test_the_pool_tells_what_it_is_and_was(start: Start) -> None:
    pool = start()
    report = pool.move(1, "2x2", holders=range(4), leaders=range(4))
    assert pool.describe() == PoolComposition(
        epoch=1,
        composition="2x2",
        blocks=tuple(BlockState(first=f, degree=2, state="serving") for f in (0, 2)),
        moves=(report,),
    )


def test_the_front_gets_its_answers(start: Start) -> None:
    pool = start()
    assert ask_composition(pool.config, TIMEOUT_S).composition == "4x1"
    rejected = ask_move(pool.config, Move("2x2", epoch=9), TIMEOUT_S)
    assert rejected == Rejected("the pool is at epoch 0, not 9")
    moved = ask_move(pool.config, Move("4x1", epoch=0), TIMEOUT_S)
    assert isinstance(moved, Moved) and moved.report.outcome == "committed"
    assert pool.is_silent(), "it serves as that already"


def test_one_move_at_a_time_and_none_that_is_stale(start: Start) -> None:
    pool = start()
    first = pool.begin(1, "1x4", range(4))
    second = pool.question(Move("2x2"))
    assert second.answer() == Rejected("the pool is moving to 1x4, epoch 1")
    assert first.is_unanswered()
    pool.say(Refused(2, 1, "no"))
    pool.commanded(Phase.ABANDON, 1, 0, 1, 2, 3)
    report = first.answer().report
    assert (report.outcome, report.reason) == ("abandoned", "rank 2: no")
    stale = pool.question(Move("2x2", epoch=1))
    assert stale.answer() == Rejected("the pool is at epoch 0, not 1")
    assert pool.is_silent()


def test_deadlines_and_repetitions_keep_time_while_nothing_is_heard(start: Start) -> None:
    pool = start(constants={"moves.DRAIN_S": 0.3, "moves.SWITCH_S": 0.7, "moves.REPEAT_S": 0.3})
    abandoned = pool.begin(1, "2x2", range(4))
    pool.commanded(Phase.ABANDON, 1, 0, 1, 2, 3)
    assert "ranks [0, 1, 2, 3] were not ready" in abandoned.answer().report.reason

    failed = pool.begin(2, "2x2", range(4))
    pool.say(*(Ready(rank, 2, 0.0) for rank in range(4)))
    pool.commanded(Phase.COMMIT, 2, 0, 1, 2, 3)
    pool.say(*(Switched(rank, 2, 0.0) for rank in (0, 1, 3)))
    pool.commanded(Phase.COMMIT, 2, 2, 3)  # once more, where an answer is due
    report = failed.answer().report
    assert (report.outcome, report.failed) == ("failed", ((2, 2),))
    assert {pool.heard().rank, pool.heard().rank} == {2, 3}
    assert [p.wait(TIMEOUT_S) for p in pool.processes[2:]] == [-signal.SIGKILL] * 2
    assert [p.poll() for p in pool.processes[:2]] == [None, None]


@pytest.mark.parametrize("stage", ["drain", "switch"])
def test_a_rank_that_dies_in_a_move(start: Start, stage: str) -> None:
    pool = start()
    pool.request("home-1", 1)
    assert pool.at(1).rid == "home-1"
    asked = pool.begin(1, "2x2", range(4))
    if stage == "switch":
        pool.say(*(Ready(rank, 1, 0.0) for rank in range(4)))
        pool.commanded(Phase.COMMIT, 1, 0, 1, 2, 3)
    assert pool.kill(0).rank == 0
    if stage == "drain":
        pool.commanded(Phase.ABANDON, 1, 1, 2, 3)
        assert asked.answer().report.outcome == "abandoned"
        assert [b.state for b in pool.describe().blocks] == ["failed"] + ["serving"] * 3
        assert pool.processes[1].poll() is None
        pool.request("next", 1)
        assert pool.at(1).rid == "next"
        return
    assert pool.heard().rank == 1
    assert pool.abort().rid == "home-1"
    assert pool.processes[1].wait(TIMEOUT_S) == -signal.SIGKILL
    pool.say(Switched(2, 1, 0.0), Switched(3, 1, 0.0))
    report = asked.answer().report
    assert (report.outcome, report.failed) == ("failed", ((0, 2),))
    assert report.reason == "rank 0: its process exited"
    pool.request("next", 3)
    assert pool.at(2).rid == "next"


def test_a_controller_that_stood_still_hears_its_ranks_before_it_judges_them(
    start: Start,
) -> None:
    pool = start(constants={"moves.SWITCH_S": 0.5, "moves.STOOD_STILL_S": 0.3})
    asked = pool.begin(1, "1x4", range(4))
    pool.say(*(Ready(rank, 1, 0.0) for rank in range(4)))
    pool.commanded(Phase.COMMIT, 1, 0, 1, 2, 3)
    os.kill(pool.controller.pid, signal.SIGSTOP)
    time.sleep(1.0)  # the deadline passes
    pool.say(*(Switched(rank, 1, 0.0) for rank in range(4)))
    os.kill(pool.controller.pid, signal.SIGCONT)
    assert asked.answer().report.outcome == "committed"


def test_what_is_not_of_this_pool_is_dropped(start: Start) -> None:
    pool = start()
    for frame in (b"", b"\xc1", b"x" * 1000, msgspec.msgpack.encode({"type": "ready"})):
        pool.to_supervisor.send(frame)
        asked = Asked(pool._context, pool.config)
        asked.send(frame)
        assert asked.is_unanswered()
    pool.to_supervisor.send_multipart([b"\xc1", b"\xc1"])
    pool.say(Ready(4, 1, 0.0), Switched(-1, 1, 0.0), Alive(99), Refused(7, 1, "no"))
    pool.move(1, "1x4", holders=range(4), leaders=range(4))


def test_an_asker_that_has_gone_does_not_stop_a_move(start: Start) -> None:
    pool = start()
    pool.begin(1, "1x4", range(4))._socket.close(linger=0)
    pool.say(*(Ready(rank, 1, 0.0) for rank in range(4)))
    pool.commanded(Phase.COMMIT, 1, 0, 1, 2, 3)
    pool.say(*(Switched(rank, 1, 0.0) for rank in range(4)))
    while pool.describe().epoch != 1:
        pass


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [4, 99, -1])
def test_a_rank_that_does_not_exist(start: Start, rank: int) -> None:
    pool = start()
    pool.request("r", rank, http_worker_ipc="ipc://front-2")
    abort = pool.abort()
    assert (abort.rid, abort.http_worker_ipc) == ("r", "ipc://front-2")
    assert abort.finished_reason["status_code"] == 503
    assert f"the pool has no rank {rank}, it has 0 to 3" in abort.abort_message
    pool.request("next", 1)
    assert pool.at(1).rid == "next"


def test_a_session_is_refused_where_the_front_waits_for_it(start: Start) -> None:
    pool = start()
    pool.send(
        io_struct.OpenSessionReqInput(
            capacity_of_str_len=100, session_id="s", http_worker_ipc="ipc://front-2"
        )
    )
    answer = received(pool.front)
    assert isinstance(answer, io_struct.OpenSessionReqOutput)
    assert (answer.session_id, answer.success) == ("s", False)
    assert answer.http_worker_ipc == "ipc://front-2"
    assert pool.is_silent()


def test_a_request_that_members_could_not_read(start: Start) -> None:
    pool = start()
    pool.request("bad", 0, sampling={"max_new_tokens": 5.5})
    abort = pool.abort()
    assert (abort.rid, abort.finished_reason["status_code"]) == ("bad", 400)
    assert "sampling_params.max_new_tokens" in abort.abort_message
    pool.request("loose", 0, sampling={"ignore_eos": 1})
    assert pool.at(0).sampling_params.ignore_eos is True
    assert pool.is_silent()


def test_a_command_from_outside_moves_nothing_and_leaves_nobody_waiting(start: Start) -> None:
    pool = start()
    message = regroup_message(Phase.COMMIT, 1, [(0, 4)])
    message.http_worker_ipc = "ipc://front-2"
    for answers in (4, 3):
        pool.send(message)
        for _ in range(answers):
            answer = received(pool.front)
            assert isinstance(answer, io_struct.SetInternalStateReqOutput)
            assert (answer.updated, answer.http_worker_ipc) == (False, "ipc://front-2")
        assert pool.is_silent()
        if answers == 4:
            pool.kill(3)
    pool.send(io_struct.SetInternalStateReq(server_args={"pp_max_micro_batch_size": 8}))
    assert all(isinstance(pool.at(r), io_struct.SetInternalStateReq) for r in range(3))


def test_a_rank_that_takes_nothing_costs_its_own_requests_only(start: Start) -> None:
    pool = start(deaf={1})
    pool.request("stuck", 1)
    pool.request("next", 2)
    abort = pool.abort()
    assert (abort.rid, abort.finished_reason["status_code"]) == ("stuck", 503)
    assert abort.abort_message == "its rank does not answer"
    assert pool.at(2).rid == "next"


def test_a_rank_that_takes_nothing_is_waited_for_once_a_batch(start: Start) -> None:
    """Every wait of a second is one in which no request of the pool goes anywhere."""
    pool = start(deaf={1})
    stuck = [generate_request(f"stuck-{n}", routed_dp_rank=1) for n in range(20)]
    began = time.monotonic()
    pool.send(io_struct.BatchTokenizedGenerateReqInput(batch=stuck))
    pool.request("next", 2)
    assert pool.at(2).rid == "next"
    assert time.monotonic() - began < 10
    assert {pool.abort().rid for _ in stuck} == {request.rid for request in stuck}


def test_a_rank_that_takes_nothing_keeps_no_other_from_control_messages(start: Start) -> None:
    pool = start(deaf={1})
    pool.send(io_struct.FlushCacheReqInput())
    for rank in (0, 2, 3):
        assert isinstance(pool.at(rank), io_struct.FlushCacheReqInput)


# -- deaths ---------------------------------------------------------------------------------------


def test_a_killed_rank_takes_its_block_with_it_and_no_other(start: Start) -> None:
    pool = start()
    pool.move(1, "2x2", holders=range(4), leaders=range(4))
    pool.request("running-2", 2, http_worker_ipc="ipc://front-2")
    pool.request("running-3", 3)
    pool.request("elsewhere", 1)
    assert [pool.at(2).rid, pool.at(2).rid, pool.at(0).rid] == [
        "running-2",
        "running-3",
        "elsewhere",
    ]
    lost = [pool.kill(3), pool.heard()]
    assert [(one.rank, one.incarnation) for one in lost] == [(2, None), (3, None)]
    assert {one.cause for one in lost} == {"rank 3: its process exited"}
    aborts = [pool.abort() for _ in range(2)]
    assert [abort.rid for abort in aborts] == ["running-2", "running-3"]
    assert aborts[0].http_worker_ipc == "ipc://front-2"
    assert all(abort.finished_reason["status_code"] == 503 for abort in aborts)
    assert pool.processes[2].wait(TIMEOUT_S) == -signal.SIGKILL
    for rank in (2, 3):
        pool.request(f"to-{rank}", rank)
        abort = pool.abort()
        assert (abort.rid, abort.finished_reason["status_code"]) == (f"to-{rank}", 503)
        assert f"the worker of rank {rank} has failed" in abort.abort_message
    for rank in (0, 1):
        pool.request(f"to-{rank}", rank)
        assert pool.at(0).rid == f"to-{rank}"
    for number in range(3):
        pool.request(f"any{number}")
        assert pool.at(0).rid == f"any{number}"
    pool.send(io_struct.FlushCacheReqInput())
    assert isinstance(pool.at(0), io_struct.FlushCacheReqInput)
    assert pool.is_silent(), "a failed block gets nothing any more"

    assert [process.poll() for process in pool.processes[:2]] == [None, None]
    assert pool.kill(0).rank == 0
    assert [pool.abort().rid for _ in range(6)] == [
        *("elsewhere", "to-0", "to-1", "any0", "any1", "any2"),
    ], "whatever chose their rank"
    assert pool.heard().rank == 1
    pool.request("nobody")
    abort = pool.abort()
    assert abort.rid == "nobody" and "every worker of this pool has failed" in abort.abort_message
    pool.request("to-1", 1)
    assert "the worker of rank 1 has failed" in pool.abort().abort_message


def test_ranks_that_die_together_are_all_reported(start: Start) -> None:
    pool = start()
    pool.move(1, "1x2,2x1", holders=[0, 1], leaders=range(4))
    for process in pool.processes:
        process.kill()
    assert {pool.heard().rank for _ in range(4)} == {0, 1, 2, 3}
    pool.request("r")
    assert "every worker of this pool has failed" in pool.abort().abort_message


def test_a_sibling_that_is_gone_already_needs_no_end(start: Start) -> None:
    pool = start()
    pool.move(1, "2x2", holders=range(4), leaders=range(4))
    os.kill(pool.controller.pid, signal.SIGSTOP)
    for process in pool.processes[2:]:
        process.kill()
        process.wait()  # its parent has taken note: there is no process to signal any more
    os.kill(pool.controller.pid, signal.SIGCONT)
    assert {pool.heard().rank for _ in range(2)} == {2, 3}
    pool.request("next", 0)
    assert pool.at(0).rid == "next"


def test_after_a_split_a_death_ends_the_requests_at_home_there_only(start: Start) -> None:
    pool = start()
    pool.move(1, "1x2,2x1", holders=[0, 1], leaders=range(4))
    for home in (0, 1):
        pool.request(f"home-{home}", home)
        assert pool.at(0).rid == f"home-{home}"
    pool.move(2, "4x1", holders=[0], leaders=[0, 2, 3])
    assert pool.kill(1).rank == 1
    abort = pool.abort()
    assert (abort.rid, abort.finished_reason["status_code"]) == ("home-1", 503)
    assert pool.is_silent()


def test_a_rank_that_falls_silent_is_ended_with_its_block(start: Start) -> None:
    """It never says a word; the others do."""
    pool = start(constants={"silence.SILENT_S": 1.0})
    os.kill(pool.processes[2].pid, signal.SIGSTOP)
    over = threading.Event()

    def speak() -> None:
        while not over.wait(0.1):
            for rank in (0, 1, 3):
                pool.say(Alive(rank))

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        lost = pool.heard()
        assert lost.rank == 2 and "rank 2: silent for" in lost.cause
        assert pool.processes[2].wait(TIMEOUT_S) == -signal.SIGKILL
        pool.request("next", 0)
        assert pool.at(0).rid == "next"
    finally:
        over.set()
        speaker.join()
    assert pool.is_silent()


def test_only_the_latest_requests_are_remembered(start: Start) -> None:
    pool = start(2, constants={"supervisor.MAX_SENT": 3})
    for number in range(10):
        pool.request(f"r{number}", 1)
        assert pool.at(1).rid == f"r{number}"
    pool.kill(1)
    assert [pool.abort().rid for _ in range(3)] == ["r7", "r8", "r9"]
    assert pool.is_silent()


def test_a_rank_that_fails_cannot_bring_the_controller_down(start: Start) -> None:
    """SGLang's schedulers send SIGQUIT to their parent before they exit."""
    pool = start()
    os.kill(pool.controller.pid, signal.SIGQUIT)
    assert pool.kill(3).rank == 3
    pool.request("r", 0)
    assert pool.at(0).rid == "r"


# -- rest -----------------------------------------------------------------------------------------


def test_an_idle_controller_sleeps_and_still_feeds_its_watchdog(start: Start) -> None:
    pool = start()
    pool.kill(3)  # the descriptor of a dead process stays readable
    while pool.fed.poll(0.2):
        pool.fed.recv()
    (process,) = [p for p in family(pool.controller.pid) if p.pid == pool.controller.pid]
    before, began = cpu_s([process]), time.monotonic()
    time.sleep(2.0)
    elapsed_s, spent_s = time.monotonic() - began, cpu_s([process]) - before
    assert spent_s < 0.02 * elapsed_s
    fed = 0
    while pool.fed.poll(0):
        pool.fed.recv()
        fed += 1
    assert 1 <= fed <= 2 * elapsed_s
