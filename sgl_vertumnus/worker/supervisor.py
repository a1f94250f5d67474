"""The controller's loop: hand requests to leaders, watch the ranks, sleep in between."""

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
from vertumnus_patches.regroup_message import MalformedRegroup, is_regroup
from vertumnus_router.lattice import Block
from vertumnus_router.protocol import RankLost, encode_report

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.worker.command import read_command
from sgl_vertumnus.worker.groups import connect_store
from sgl_vertumnus.worker.leaders import Leaders
from sgl_vertumnus.worker.rank import pid_key

logger = logging.getLogger(__name__)

#: SGLang's own watchdog wants to hear from the loop now and then.
POLL_MS = 1000
#: A live rank always has room for a message; one that blocks this long is gone.
SEND_TIMEOUT_MS = 1000


#: Requests remembered for the case that their worker dies. The controller does not see them end,
#: so the oldest make room.
MAX_SENT = 100_000


@dataclass(frozen=True, slots=True)
class Sent:
    """What it takes to tell the front that a request will not be answered."""

    rid: str
    http_worker_ipc: str | None
    leader: int


class Supervisor:
    """Implements ``vertumnus_patches.seams.ControllerSeam``."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._leaders = Leaders(config.size)
        self._epoch = 0
        self._lost: zmq.Socket[bytes] | None = None
        self._pidfds: dict[int, int] = {}
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self._turns = count()

    def run(self, controller: Any) -> None:
        """Serve until the process is stopped."""
        # A rank that fails tells its parent to bring everything down; here it is one block.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        self._open_report_socket()
        self._pidfds = dict(self._watch_ranks())
        to_front = controller.context.socket(zmq.PUSH)
        to_front.connect(controller.port_args.tokenizer_ipc_name)
        for worker in controller.workers:
            worker.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        inbox = controller.recv_from_tokenizer
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        for pidfd in self._pidfds:
            poller.register(pidfd, zmq.POLLIN)
        while True:
            controller.soft_watchdog.feed()
            ready = dict(poller.poll(POLL_MS))
            for pidfd in [fd for fd in self._pidfds if fd in ready]:
                poller.unregister(pidfd)
                self._on_exit(controller, self._pidfds.pop(pidfd), to_front)
            if inbox in ready:
                self._drain(controller, inbox, to_front)

    def on_control(self, controller: Any, message: Any) -> None:
        """Requests behind a regroup command go to the leaders that it names."""
        if not is_regroup(message):
            return
        try:
            command = read_command(self._config, message.server_args)
        except MalformedRegroup as exc:
            logger.warning("regroup not followed: %s", exc)
            return
        if command.epoch <= self._epoch:
            logger.warning("regroup not followed: epoch %d is not new", command.epoch)
            return
        self._epoch = command.epoch
        self._leaders.regroup(command.blocks)
        self._apply(controller)

    def _drain(
        self, controller: Any, inbox: zmq.Socket[bytes], to_front: zmq.Socket[bytes]
    ) -> None:
        while (message := messages.receive(inbox)) is not None:
            requests = messages.requests_in(message)
            if requests is None:
                if not messages.refuse_session(to_front, message):
                    self._send_control(controller, message)
                continue
            for request in requests:
                self._dispatch(controller, request, to_front)

    def _dispatch(self, controller: Any, request: Any, to_front: zmq.Socket[bytes]) -> None:
        try:
            request = messages.normalised(request)
            request.routed_dp_rank = self._leader_for(request.routed_dp_rank)
            controller.dispatching_with_trace(request)
            self._remember(request)
        except messages.NotMirrorable as exc:
            self._refuse(to_front, request, str(exc), status=400)
        except Unroutable as exc:
            self._refuse(to_front, request, str(exc), status=503)
        except zmq.Again:
            self._refuse(to_front, request, "its rank does not answer", status=503)

    def _refuse(
        self, to_front: zmq.Socket[bytes], request: Any, reason: str, *, status: int
    ) -> None:
        logger.warning("request %s was not dispatched: %s", request.rid, reason)
        messages.abort_undispatched(to_front, request, reason, status=status)

    def _remember(self, request: Any) -> None:
        self._sent[request.rid] = Sent(request.rid, request.http_worker_ipc, request.routed_dp_rank)
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)

    def _send_control(self, controller: Any, message: Any) -> None:
        try:
            controller._request_dispatcher(messages.normalised(message))
        except (messages.NotMirrorable, zmq.Again) as exc:
            logger.error("control message %s was not sent: %s", type(message).__name__, exc)

    def _leader_for(self, rank: int | None) -> int:
        """The leader that serves a request to ``rank``; the next in turn for None, which no
        router sends."""
        if rank is None:
            alive = self._leaders.alive
            if not alive:
                raise Unroutable("every worker of this pool has failed")
            return alive[next(self._turns) % len(alive)]
        if not 0 <= rank < self._config.size:
            raise Unroutable(f"the pool has no rank {rank}, it has 0 to {self._config.size - 1}")
        leader = self._leaders.leader_for(rank)
        if leader is None:
            raise Unroutable(f"the worker of rank {rank} has failed")
        return leader

    # -- deaths --------------------------------------------------------------

    def _on_exit(self, controller: Any, rank: int, to_front: zmq.Socket[bytes]) -> None:
        failed = self._leaders.lose(rank)
        logger.error("rank %d exited; %s", rank, f"{failed} failed" if failed else "known")
        self._apply(controller)
        if self._lost is not None:
            report = RankLost(rank=rank, incarnation=None, cause="its process exited")
            self._lost.send_multipart(encode_report(report))
        if failed is not None:
            self._end(failed, to_front)

    def _end(self, block: Block, to_front: zmq.Socket[bytes]) -> None:
        """A block without one of its ranks serves nobody: end the others and their requests."""
        for pidfd, rank in self._pidfds.items():
            if rank in block:
                with contextlib.suppress(ProcessLookupError):  # it was faster
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for sent in [one for one in self._sent.values() if one.leader in block]:
            del self._sent[sent.rid]
            # The front ignores those that have ended.
            messages.abort_undispatched(to_front, sent, f"{block} failed", status=503)

    def _apply(self, controller: Any) -> None:
        """SGLang sends requests and control messages to its active workers only; members get
        both from their leader."""
        alive = self._leaders.alive
        controller.status = [rank in alive for rank in range(len(controller.workers))]
        controller._active_workers = alive
        controller._active_count_cache = len(alive)

    def _watch_ranks(self) -> Mapping[int, int]:
        """Descriptors that become readable when a rank's process ends, by rank."""
        store = connect_store(self._config)
        return {
            os.pidfd_open(int(store.get(pid_key(rank)))): rank for rank in range(self._config.size)
        }

    def _open_report_socket(self) -> None:
        self._lost = zmq.Context.instance().socket(zmq.PUB)
        port = self._config.ports.reports + self._config.size
        self._lost.bind(f"tcp://{self._config.host}:{port}")


class Unroutable(Exception):
    """No live worker can take the request."""
