"""SGLang's data-parallel controller without its ranks, run by our supervisor."""

from types import SimpleNamespace
from typing import Any

import zmq

from sgl_vertumnus.config import PoolConfig


def supervise(
    connection: Any,
    config: PoolConfig,
    inbox: str,
    front: str,
    workers: list[str | None],
    remembered: int,
) -> None:
    """Runs until killed. Sends True on ``connection`` whenever the watchdog is fed.

    A worker without an address is a rank that takes nothing.
    """
    from sglang.srt.managers.data_parallel_controller import (
        DataParallelController,
        LoadBalanceMethod,
    )
    from vertumnus_patches.patches.controller_leaders import after_control_message
    from vertumnus_patches.patches.controller_loop import run_controller
    from vertumnus_patches.seams import seams

    from sgl_vertumnus.worker import supervisor

    supervisor.MAX_SENT = remembered

    class Controller(DataParallelController):  # type: ignore[misc]
        """Upstream's routing on sockets that exist, with our patches around it."""

        def __init__(self) -> None:
            self.load_balance_method = LoadBalanceMethod.ROUND_ROBIN
            self.dispatching = self.round_robin_scheduler
            self.refresh_load_budget_on_dispatch = False
            self.round_robin_counter = self.health_round_robin_counter = 0
            self.control_message_step = 1
            self.max_dp_size = config.size
            self.status = [True] * config.size
            self._active_workers = list(range(config.size))
            self._active_count_cache = config.size
            self.context = zmq.Context()
            self.port_args = SimpleNamespace(tokenizer_ipc_name=front)
            self.recv_from_tokenizer = self.context.socket(zmq.PULL)
            self.recv_from_tokenizer.connect(inbox)
            self.workers = []
            for address in workers:
                self.workers.append(self.context.socket(zmq.PUSH))
                if address is not None:
                    self.workers[-1].connect(address)
            self.soft_watchdog = SimpleNamespace(feed=lambda: connection.send(True))
            self.init_dispatcher()

        def send_control_message(self, obj: Any) -> None:
            after_control_message(super().send_control_message(obj), self, obj)

    unused: Any = None
    seams.bind(rank=unused, controller=supervisor.Supervisor(config), front=unused)
    run_controller(Controller())
