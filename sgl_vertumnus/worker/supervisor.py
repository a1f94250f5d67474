"""The controller's loop: hand requests to leaders, move the pool, watch the ranks, sleep."""

import contextlib
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import zmq
from vertumnus_patches import messages
from vertumnus_patches.regroup_message import is_regroup, regroup_message
from vertumnus_router.clock import WallClock
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import RankLost, encode_report

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.control import SILENT_S, Alive, Described, Move, Moved, Rejected
from sgl_vertumnus.worker.control_sockets import FrontDesk, RankInbox
from sgl_vertumnus.worker.groups import connect_store
from sgl_vertumnus.worker.moves import (
    Answer,
    Event,
    Fail,
    MoveAsked,
    MoveMachine,
    RankGone,
    Send,
    Tick,
)
from sgl_vertumnus.worker.rank import pid_key
from sgl_vertumnus.worker.silence import Silence

logger = logging.getLogger(__name__)

#: SGLang's own watchdog wants to hear from the loop now and then.
POLL_MS = 1000
#: A move has deadlines to keep.
MOVING_POLL_MS = 50
#: A live rank always has room for a message; one that blocks this long is gone.
SEND_TIMEOUT_MS = 1000
#: Messages of the front that are passed on before the ranks are heard again.
BURST = 64
#: Requests remembered for the case that their worker dies. The controller does not see them end,
#: so the oldest make room.
MAX_SENT = 10_000


@dataclass(frozen=True, slots=True)
class Sent:
    """What it takes to tell the front that a request will not be answered."""

    rid: str
    http_worker_ipc: str | None
    home: int


class Unroutable(Exception):
    """No live worker can take the request."""


class Supervisor:
    """Implements ``vertumnus_patches.seams.ControllerSeam``."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config

    def run(self, controller: Any) -> None:
        """Serve until the process is stopped."""
        # A rank that fails tells its parent to bring everything down; here it is one block.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        Supervision(self._config, controller).run()


class Supervision:
    """A running controller: its sockets, the moves of its pool, the lives of its ranks."""

    def __init__(self, config: PoolConfig, controller: Any) -> None:
        self._config = config
        self._controller = controller
        self._clock = WallClock()
        self._moves = MoveMachine(config.size, config.degrees)
        self._silence = Silence(range(config.size), self._clock.now())
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self._turns = count()
        self._inbox: zmq.Socket[bytes] = controller.recv_from_tokenizer
        self._to_front: zmq.Socket[bytes] = controller.context.socket(zmq.PUSH)
        self._to_front.connect(controller.port_args.tokenizer_ipc_name)
        for worker in controller.workers:
            worker.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        self._reports: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._reports.bind(f"tcp://{config.host}:{config.ports.reports + config.size}")
        self._ranks = RankInbox(config)
        self._desk = FrontDesk(config)
        self._pidfds = dict(_watch_ranks(config))

    def run(self) -> None:
        poller = zmq.Poller()
        for source in (self._inbox, self._ranks.socket, self._desk.socket, *self._pidfds):
            poller.register(source, zmq.POLLIN)
        while True:
            self._controller.soft_watchdog.feed()
            ready = dict(poller.poll(MOVING_POLL_MS if self._moves.is_moving else POLL_MS))
            # Before the deadlines are looked at: this process may have stood still meanwhile.
            self._hear_ranks()
            for pidfd in [fd for fd in self._pidfds if fd in ready]:
                poller.unregister(pidfd)
                self._on_exit(pidfd)
            for rank in self._silence.overdue(self._clock.now()):
                self._feed(RankGone(rank, f"silent for {SILENT_S:g} s"))
            self._feed(Tick())
            self._hear_front()
            self._pass_on()

    # -- requests ------------------------------------------------------------

    def _pass_on(self) -> None:
        stuck: set[int] = set()
        for _ in range(BURST):
            # A leader that takes nothing has probably died: look, before it is waited for again.
            message = None if stuck else messages.receive(self._inbox)
            if message is None:
                return
            requests = messages.requests_in(message)
            if requests is None:
                self._control(message)
                continue
            for request in requests:
                self._dispatch(request, stuck)

    def _dispatch(self, request: Any, stuck: set[int]) -> None:
        try:
            request = messages.normalised(request)
            home = self._home(request.routed_dp_rank, messages.room_of(request))
            leader = self._leader_for(home)
            request.routed_dp_rank = home
            if leader in stuck or not self._sent_to(leader, request):
                stuck.add(leader)
                raise Unroutable("its rank does not answer")
            self._remember(Sent(request.rid, request.http_worker_ipc, home))
        except messages.NotMirrorable as exc:
            self._refuse(request, str(exc), status=400)
        except Unroutable as exc:
            self._refuse(request, str(exc), status=503)

    def _sent_to(self, leader: int, request: Any) -> bool:
        try:
            messages.hand_over(self._controller.workers[leader], request)
        except zmq.Again:
            return False
        return True

    def _home(self, named: int | None, room: int | None) -> int:
        """The rank that keeps a request all its life. For one that names none, which no router
        sends: the one where its decode server looks for it, or else the next in turn."""
        if named is not None:
            return named
        if room is not None:
            return room % self._config.size
        serving = self._moves.leaders.serving
        if not serving:
            raise Unroutable("every worker of this pool has failed")
        return serving[next(self._turns) % len(serving)]

    def _leader_for(self, home: int) -> int:
        if not 0 <= home < self._config.size:
            raise Unroutable(f"the pool has no rank {home}, it has 0 to {self._config.size - 1}")
        leader = self._moves.leaders.leader_for(home)
        if leader is None:
            raise Unroutable(f"the worker of rank {home} has failed")
        return leader

    def _refuse(self, request: Any, reason: str, *, status: int) -> None:
        logger.warning("request %s was not dispatched: %s", request.rid, reason)
        messages.abort_undispatched(self._to_front, request, reason, status=status)

    def _remember(self, sent: Sent) -> None:
        self._sent[sent.rid] = sent
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)

    def _control(self, message: Any) -> None:
        if messages.refuse_session(self._to_front, message):
            return
        if is_regroup(message):
            logger.warning("moves are asked for at POST /vertumnus/regroup only")
            ranks = len(self._moves.leaders.serving)
            messages.refuse_regroup(self._to_front, message, ranks=ranks)
            return
        try:
            message = messages.normalised(message)
        except messages.NotMirrorable as exc:
            logger.error("control message %s was not sent: %s", type(message).__name__, exc)
            return
        # To leaders only: members get it from them, at the same step.
        for leader in self._moves.leaders.alive:
            self._command(leader, message, type(message).__name__)

    def _command(self, leader: int, message: Any, name: str) -> None:
        try:
            messages.send(self._controller.workers[leader], message)
        except zmq.Again:
            logger.error("rank %d does not take %s", leader, name)

    # -- moves ---------------------------------------------------------------

    def _hear_ranks(self) -> None:
        for message in self._ranks.receive():
            if isinstance(message, Alive):
                self._silence.hear(message.rank, self._clock.now())
            else:
                self._feed(message)

    def _hear_front(self) -> None:
        for asker, question in self._desk.receive():
            if isinstance(question, Move):
                self._feed(MoveAsked(asker, question.composition, question.epoch))
            else:
                self._desk.answer(asker, Described(self._moves.describe()))

    def _on_exit(self, pidfd: int) -> None:
        rank = self._pidfds.pop(pidfd)
        os.close(pidfd)
        logger.error("rank %d exited", rank)
        self._feed(RankGone(rank, "its process exited"))

    def _feed(self, event: Event) -> None:
        for effect in self._moves.on_event(event, self._clock.now()):
            match effect:
                case Send():
                    self._send(effect)
                case Fail(block, cause):
                    self._end(block, cause)
                case Answer(asker, answer):
                    self._desk.answer(asker, answer)
                    logger.info("%s", _in_words(answer))

    def _send(self, command: Send) -> None:
        pairs = [(block.first, block.degree) for block in command.blocks]
        message = regroup_message(command.phase, command.epoch, pairs)
        for rank in command.to:
            self._command(rank, message, command.phase.name)

    def _end(self, block: Block, cause: str) -> None:
        """A block without one of its ranks serves nobody: end the others and their requests."""
        logger.error("%s failed: %s", block, cause)
        for rank in block.ranks:
            self._reports.send_multipart(encode_report(RankLost(rank=rank, cause=cause)))
        for pidfd, rank in self._pidfds.items():
            if rank in block:
                with contextlib.suppress(ProcessLookupError):  # it was faster
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for sent in [one for one in self._sent.values() if one.home in block]:
            del self._sent[sent.rid]
            # The front ignores those that have ended.
            messages.abort_undispatched(self._to_front, sent, f"{block} failed", status=503)


def _in_words(answer: Rejected | Moved) -> str:
    if isinstance(answer, Rejected):
        return f"move rejected: {answer.reason}"
    report = answer.report
    move = f"epoch {report.epoch}: {report.before} to {report.after} {report.outcome}"
    return f"{move}: {report.reason}" if report.reason else move


def _watch_ranks(config: PoolConfig) -> Mapping[int, int]:
    """Descriptors that become readable when a rank's process ends, by rank."""
    store = connect_store(config)
    return {os.pidfd_open(int(store.get(pid_key(rank)))): rank for rank in range(config.size)}
