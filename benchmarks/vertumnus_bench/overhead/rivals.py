"""The routers that ours is compared with, from a virtual environment of their own."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sgl_vertumnus.demo.checkpoint_cache import cache_root


class RivalError(Exception):
    """It cannot be had, and why."""


@dataclass(frozen=True, slots=True)
class Rival:
    """``requirement`` as pip takes it; ``program`` in the environment's ``bin``."""

    name: str
    requirement: str
    program: str

    def command(self, peers: Path, worker_url: str, port: int, metrics_port: int) -> list[str]:
        """Before one worker, with the placement that it has by default."""
        return [
            *(str(peers / "bin" / self.program), "launch", "--worker-urls", worker_url),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            # Ours does not limit what is in flight at this load either.
            *("--max-concurrent-requests", "4096", "--log-level", "warn"),
        ]


SGLANG_ROUTER = Rival("sglang_router", "sglang-router==0.3.2", "sglang-router")
SMG = Rival("smg", "smg==1.13.0", "smg")


def peers(rival: Rival, chosen: Path | None, say: Callable[[str], None]) -> Path:
    """The environment that has ``rival``: ``chosen``, or one in the cache, made when it is not
    there. Raises ``RivalError``."""
    folder = chosen if chosen is not None else cache_root() / "peers"
    if (folder / "bin" / rival.program).exists():
        return folder
    if chosen is not None:
        raise RivalError(f"{chosen} has no bin/{rival.program}: pip install {rival.requirement}")
    say(f"installing {rival.requirement} into {folder}")
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", rival.requirement],
    ):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            raise RivalError(made.stderr.strip().splitlines()[-1] if made.stderr else "pip failed")
    return folder
