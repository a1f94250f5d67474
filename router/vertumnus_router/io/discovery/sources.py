"""From the configuration to what finds servers."""

import random
from typing import Protocol

from vertumnus_router.clock import Clock
from vertumnus_router.io.discovery.config import Discovery, FileDiscovery, KubernetesDiscovery
from vertumnus_router.io.discovery.file import FileSource
from vertumnus_router.io.discovery.following import Following, Joins
from vertumnus_router.io.discovery.kubernetes import KubernetesSource
from vertumnus_router.io.fleet import Role


class Source(Protocol):
    """Finds servers and makes the fleet follow them."""

    @property
    def name(self) -> str: ...

    @property
    def trouble(self) -> str | None: ...

    @property
    def following(self) -> list[Following]: ...

    async def run(self) -> None: ...


def sources(
    configs: tuple[Discovery, ...], fleet: Joins, clock: Clock, source: random.Random
) -> list[Source]:
    """Build it anywhere; ``run`` each on the event loop."""
    found: list[Source] = []
    for config in configs:
        match config:
            case FileDiscovery():
                found.append(FileSource(config.path, fleet, clock))
            case KubernetesDiscovery():
                for role, selector in (
                    (Role.WORKER, config.workers),
                    (Role.PREFILL, config.prefills),
                    (Role.DECODE, config.decodes),
                ):
                    if selector:
                        found.append(KubernetesSource(config, selector, role, fleet, clock, source))
    return found
