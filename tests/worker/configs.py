"""Configurations of pools that are not started."""

from typing import Any

from sgl_vertumnus.config import PoolConfig, Ports
from sgl_vertumnus.ports import free_range


def config_of(size: int = 4, degrees: tuple[int, ...] = (1, 2, 4), **changes: Any) -> PoolConfig:
    """A CPU pool of ``size`` ranks on free ports, each rank alone unless told otherwise."""
    first = free_range("127.0.0.1", 4 * size + 4)
    fields: dict[str, Any] = {
        "pool_id": "pool-test",
        "size": size,
        "degrees": degrees,
        "composition": f"{size // degrees[0]}x{degrees[0]}",
        "host": "127.0.0.1",
        "device": "cpu",
        "threads": 1,
        "ports": Ports(
            kv_events=first,
            kv_replay=first + size,
            reports=first + 2 * size,
            store=first + 3 * size + 1,
            control=first + 3 * size + 2,
            kv_service=first + 3 * size + 4,
        ),
    }
    return PoolConfig(**fields | changes)
