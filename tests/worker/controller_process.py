"""SGLang's data-parallel controller without its ranks, run by our supervisor."""

import importlib
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
    constants: dict[str, float],
) -> None:
    """Runs until killed. Sends True on ``connection`` whenever the watchdog is fed.

    A worker without an address is a rank that takes nothing. ``constants``: other values for
    constants of the runtime, by ``module.NAME``.
    """
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from vertumnus_patches.patches.controller_loop import run_controller
    from vertumnus_patches.seams import seams

    from sgl_vertumnus.worker import supervisor

    for name, value in constants.items():
        module, _, constant = name.partition(".")
        setattr(importlib.import_module(f"sgl_vertumnus.worker.{module}"), constant, value)

    class Controller(DataParallelController):  # type: ignore[misc]
        """Upstream's control messages on sockets that exist."""

        def __init__(self) -> None:
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

    unused: Any = None
    seams.bind(rank=unused, controller=supervisor.Supervisor(config), front=unused)
    run_controller(Controller())
