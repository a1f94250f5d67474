"""The controller's loop: SGLang's own routing, real sockets, real processes that die."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import zmq
from vertumnus_patches.regroup_message import regroup_knobs
from vertumnus_router.protocol import REPORT_TOPIC, RankLost, decode_report

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.processes import cpu_s, family
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
        self.to_controller = context.socket(zmq.PUSH)
        self.front = context.socket(zmq.PULL)
        self.ranks = [context.socket(zmq.PULL) for _ in range(config.size)]
        self.lost = context.socket(zmq.SUB)
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

    def regroup(self, epoch: int, *blocks: tuple[int, int]) -> None:
        self.send(io_struct.SetInternalStateReq(server_args=regroup_knobs(epoch, blocks)))

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
        remembered: int = 1000,
    ) -> Pool:
        config = config_of(size, tuple(d for d in (1, 2, 4) if d <= size))
        store = open_store(config)
        pool = Pool(config, context, deaf)
        ends.append(pool.close)
        for rank, process in enumerate(pool.processes):
            store.set(pid_key(rank), str(process.pid))
        to_controller, front, *_ = pool.addresses
        arguments = (config, to_controller, front, pool.workers, remembered)
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


def test_after_a_regroup_leaders_take_requests_and_control(start: Start) -> None:
    pool = start()
    pool.regroup(1, (0, 2), (2, 1), (3, 1))
    for rank in range(4):  # the command itself still goes to those who led before it
        assert isinstance(pool.at(rank), io_struct.SetInternalStateReq)
    pool.request("to-1", 1)
    request = pool.at(0)
    assert (request.rid, request.routed_dp_rank) == ("to-1", 0)
    for number in range(6):
        pool.request(f"any{number}")
    taken = [[pool.at(rank).rid for _ in range(2)] for rank in (0, 2, 3)]
    assert sorted(rid for rids in taken for rid in rids) == [f"any{n}" for n in range(6)]
    pool.send(io_struct.AbortReq(rid="any"))
    assert [pool.at(rank).rid for rank in (0, 2, 3)] == ["any"] * 3
    pool.regroup(2, (0, 4))
    assert all(isinstance(pool.at(r), io_struct.SetInternalStateReq) for r in (0, 2, 3))
    pool.request("to-3", 3)
    assert pool.at(0).rid == "to-3"
    assert pool.is_silent()


def test_requests_behind_a_command_never_overtake_it(start: Start) -> None:
    pool = start()
    for rid, rank in (("before", 3), (None, None), ("behind", 3)):
        if rid is None:
            pool.regroup(1, (0, 4))
        else:
            pool.request(rid, rank)
    assert pool.at(3).rid == "before"
    assert isinstance(pool.at(3), io_struct.SetInternalStateReq)
    assert isinstance(pool.at(0), io_struct.SetInternalStateReq)
    assert pool.at(0).rid == "behind"


def test_a_batch_is_dispatched_one_by_one(start: Start) -> None:
    pool = start()
    pool.regroup(1, (0, 2), (2, 2))
    for rank in range(4):
        pool.at(rank)
    requests = [generate_request(f"b{rank}", routed_dp_rank=rank) for rank in range(4)]
    pool.send(io_struct.BatchTokenizedGenerateReqInput(batch=requests))
    assert [pool.at(0).rid, pool.at(0).rid] == ["b0", "b1"]
    assert [pool.at(2).rid, pool.at(2).rid] == ["b2", "b3"]


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


@pytest.mark.parametrize(
    "knobs",
    [
        {"vertumnus.epoch": 2},
        {"vertumnus.epoch": 2, "vertumnus.leader.1": 2},
        {"vertumnus.epoch": 2, "vertumnus.leader.0": 2},
        {"vertumnus.epoch": 2, "vertumnus.leader.0": 2.5},
        {"vertumnus.epoch": 2, "vertumnus.leader.x": 4},
        regroup_knobs(1, [(0, 4)]),
        regroup_knobs(0, [(0, 4)]),
    ],
    ids=str,
)
def test_a_command_that_no_rank_follows_changes_no_leader(
    start: Start, knobs: dict[str, float]
) -> None:
    pool = start()
    pool.regroup(1, (0, 2), (2, 2))
    pool.send(io_struct.SetInternalStateReq(server_args=knobs))
    pool.request("to-3", 3)
    pool.request("to-1", 1)
    for leader, rid in ((2, "to-3"), (0, "to-1")):
        assert pool.at(leader).server_args == regroup_knobs(1, [(0, 2), (2, 2)])
        assert pool.at(leader).server_args == knobs  # ranks refuse by the same rules
        assert pool.at(leader).rid == rid


def test_a_rank_that_takes_nothing_costs_its_own_requests_only(start: Start) -> None:
    pool = start(deaf={1})
    pool.request("stuck", 1)
    pool.request("next", 2)
    abort = pool.abort()
    assert (abort.rid, abort.finished_reason["status_code"]) == ("stuck", 503)
    assert abort.abort_message == "its rank does not answer"
    assert pool.at(2).rid == "next"


# -- deaths ---------------------------------------------------------------------------------------


def test_a_killed_rank_takes_its_block_with_it_and_no_other(start: Start) -> None:
    pool = start()
    pool.regroup(1, (0, 2), (2, 2))
    for rank in range(4):
        pool.at(rank)
    pool.request("running-2", 2, http_worker_ipc="ipc://front-2")
    pool.request("running-3", 3)
    pool.request("elsewhere", 1)
    assert [pool.at(2).rid, pool.at(2).rid, pool.at(0).rid] == [
        "running-2",
        "running-3",
        "elsewhere",
    ]
    lost = pool.kill(3)
    assert (lost.rank, lost.incarnation) == (3, None) and "exited" in lost.cause
    aborts = [pool.abort() for _ in range(2)]
    assert [abort.rid for abort in aborts] == ["running-2", "running-3"]
    assert aborts[0].http_worker_ipc == "ipc://front-2"
    assert all(abort.finished_reason["status_code"] == 503 for abort in aborts)
    assert pool.heard().rank == 2, "its sibling serves nobody any more"
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
    pool.regroup(1, (0, 4))
    for process in pool.processes:
        process.kill()
    assert {pool.heard().rank for _ in range(4)} == {0, 1, 2, 3}
    pool.request("r")
    assert "every worker of this pool has failed" in pool.abort().abort_message


def test_a_sibling_that_is_gone_already_needs_no_end(start: Start) -> None:
    pool = start()
    pool.regroup(1, (0, 2), (2, 2))
    assert isinstance(pool.at(0), io_struct.SetInternalStateReq)
    os.kill(pool.controller.pid, signal.SIGSTOP)
    for process in pool.processes[2:]:
        process.kill()
        process.wait()  # its parent has taken note: there is no process to signal any more
    os.kill(pool.controller.pid, signal.SIGCONT)
    assert {pool.heard().rank for _ in range(2)} == {2, 3}
    pool.request("next", 0)
    assert pool.at(0).rid == "next"


def test_requests_of_a_composition_that_was_not_left_end_with_the_block(start: Start) -> None:
    """A busy rank refuses a command that the controller has followed."""
    pool = start()
    pool.regroup(1, (0, 2), (2, 2))
    pool.request("running", 2)
    pool.regroup(2, (0, 4))
    pool.request("last", 0)
    # A death is noticed at once, even with messages still unread.
    while getattr(pool.at(0), "rid", None) != "last":
        pass
    pool.kill(1)
    aborts = {
        abort.rid: abort.finished_reason["status_code"] for abort in (pool.abort(), pool.abort())
    }
    assert aborts == {"running": 503, "last": 503}
    assert {pool.heard().rank for _ in range(3)} == {0, 2, 3}


def test_only_the_latest_requests_are_remembered(start: Start) -> None:
    pool = start(2, remembered=3)
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
