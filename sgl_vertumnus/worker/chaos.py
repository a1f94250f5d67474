"""Faults on demand, for tests of what a pool does when a rank fails in the middle of a move.

``VERTUMNUS_CHAOS=EPOCH:RANK:STAGE:ACTION[,...]`` in the environment of a pool arms them;
without it nothing here does anything. Every fault happens once.
"""

import logging
import os
import signal
import time
from enum import Enum

from sgl_vertumnus.environment import CHAOS_VARIABLE

logger = logging.getLogger(__name__)


class Stage(Enum):
    """Where a rank is in a move."""

    PREPARE = "prepare"  # PREPARE has come
    READY = "ready"  # it has answered
    COMMIT = "commit"  # COMMIT has come
    SUSPENDED = "suspended"  # it has let go of its requests and not yet met the others
    SERVING = "serving"  # it serves in its new block and has not said so


class Chaos:
    """The faults of one rank. Raises ``ValueError`` for a specification that names none."""

    def __init__(self, specification: str, rank: int) -> None:
        self._due: dict[tuple[int, Stage], str] = {}
        for fault in filter(None, specification.split(",")):
            epoch, number, stage, action = fault.split(":")
            if action not in ("kill", "stop", "drop") and not action.startswith("slow"):
                raise ValueError(f"{CHAOS_VARIABLE}: {fault!r}: kill, stop, drop or slowSECONDS")
            if int(number) == rank:
                self._due[int(epoch), Stage(stage)] = action
        if self._due:
            logger.warning("rank %d will fail on purpose: %s", rank, self._due)

    def at(self, epoch: int, stage: Stage) -> bool:
        """Suffer what is due here; whether the command that led here is to be ignored."""
        action = self._due.pop((epoch, stage), None)
        if action is None:
            return False
        logger.warning("chaos: %s at %s of epoch %d", action, stage.value, epoch)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action.startswith("slow"):
            time.sleep(float(action.removeprefix("slow")))
        return action == "drop"
