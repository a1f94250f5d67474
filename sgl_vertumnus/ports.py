"""Free TCP ports for a pool."""

import errno
import socket
from contextlib import ExitStack

from sgl_vertumnus.errors import ConfigurationError, PoolStartError

#: Below the ephemeral range of common kernels (32768), so that a port found free stays free.
FIRST, LAST = 12000, 32000
#: From here SGLang takes ports at random, and its ranks bind them before some of ours.
SGLANG = range(22000, 30000)


def free_range(host: str, count: int, *, start: int = FIRST) -> int:
    """The first port of ``count`` consecutive ports that nothing listens on, nor will soon.

    Raises:
        ConfigurationError: when ``host`` is no address of this machine.
        PoolStartError: when there is no such range.
    """
    base = start
    while base + count <= LAST:
        if base < SGLANG.stop and base + count > SGLANG.start:
            base = SGLANG.stop
            continue
        taken = _first_taken(host, base, count)
        if taken is None:
            return base
        base = taken + 1
    raise PoolStartError(
        f"no {count} consecutive free ports on {host} between {start} and {LAST}; "
        f"stop other pools on this machine"
    )


def _first_taken(host: str, base: int, count: int) -> int | None:
    with ExitStack() as held:
        for port in range(base, base + count):
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                probe.bind((host, port))
            except OSError as exc:
                if exc.errno == errno.EADDRNOTAVAIL:
                    raise ConfigurationError(f"{host} is no address of this machine") from exc
                return port
    return None
