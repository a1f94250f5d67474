"""What stands between the load and the engine: a router, or nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sgl_vertumnus.ports import free_range
from vertumnus_bench.overhead.child import Child, StartError, child
from vertumnus_bench.overhead.mock_pool import MANIFEST, MockPool
from vertumnus_bench.overhead.rivals import SGLANG_ROUTER, SMG, Rival, RivalError, peers

OURS, DIRECT = "vertumnus", "direct"
NAMES = (OURS, SGLANG_ROUTER.name, SMG.name, DIRECT)
_FIRST_PORT = 21500


@dataclass(frozen=True, slots=True)
class Target:
    """``router`` None: the engine itself."""

    name: str
    port: int
    router: Child | None


@contextmanager
def ours(pool: MockPool, folder: Path) -> Iterator[Target]:
    """This router with its default policy, before ``pool``."""
    port = free_range("127.0.0.1", 1, start=_FIRST_PORT)
    command = [
        *(sys.executable, "-m", "sgl_vertumnus.launch_router", "--pool-urls", pool.url),
        *("--port", str(port), "--log-level", "warning", "--expected-manifest", MANIFEST),
    ]
    with child(command, port, "/readiness", folder / "vertumnus.log") as router:
        yield Target(OURS, port, router)


@contextmanager
def targets(
    pool: MockPool, folder: Path, chosen: Path | None, say: Callable[[str], None]
) -> Iterator[list[Target]]:
    """All that can be had, side by side before the same ``pool``. ``chosen``: see ``peers``."""
    with ExitStack() as stack:
        found = [stack.enter_context(ours(pool, folder))]
        for rival in (SGLANG_ROUTER, SMG):
            try:
                found.append(stack.enter_context(_rival(rival, pool, folder, chosen, say)))
            except (RivalError, StartError) as exc:
                say(f"{rival.name} is left out: {exc}")
        yield [*found, Target(DIRECT, pool.port, None)]


@contextmanager
def _rival(
    rival: Rival, pool: MockPool, folder: Path, chosen: Path | None, say: Callable[[str], None]
) -> Iterator[Target]:
    where = peers(rival, chosen, say)
    port = free_range("127.0.0.1", 2, start=_FIRST_PORT)
    command = rival.command(where, pool.url, port, port + 1)
    with child(command, port, "/readiness", folder / f"{rival.name}.log") as router:
        yield Target(rival.name, port, router)
