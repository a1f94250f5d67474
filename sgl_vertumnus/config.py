"""The pool's configuration: one frozen object, validated once, handed to every process."""

import ipaddress
import secrets

import msgspec
from vertumnus_router.lattice import (
    Block,
    CompositionError,
    check_degrees,
    format_composition,
    parse_composition,
)

from sgl_vertumnus.errors import ConfigurationError

#: A Unix socket's address has 108 bytes; the block's name goes behind the pool's.
MAX_POOL_ID_BYTES = 64


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """First port of each range; rank r uses base + r. ``reports`` has one more, for the
    controller; ``store`` is a single port; ``control`` is two, of which the first hears the
    ranks and the second the front."""

    kv_events: int
    kv_replay: int
    reports: int
    store: int
    control: int
    kv_service: int


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a pool knows. Travels to SGLang's children as JSON in the
    environment, so it holds no secret."""

    pool_id: str
    size: int
    degrees: tuple[int, ...]
    composition: str
    host: str
    device: str
    #: compute threads of a rank on a CPU pool
    threads: int
    ports: Ports
    #: of SGLang's bootstrap server; None: the pool decodes, too
    bootstrap_port: int | None = None
    #: whether the operator wants GPUs tried, on which no pool has been proven
    allow_unproven_gpu: bool = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that serve after start."""
        return parse_composition(self.composition, self.size, self.degrees)


def check_geometry(
    size: int, degrees: tuple[int, ...], composition: str | None
) -> tuple[tuple[int, ...], str]:
    """The ladder of degrees and the composition in canonical form.

    Without a composition every rank is a worker of the smallest degree.

    Raises:
        ConfigurationError: when the pool cannot be laid out so.
    """
    if size < 2:
        raise ConfigurationError(
            f"--pool-size {size}: a pool has at least two ranks; one alone is plain SGLang, "
            "sglang serve"
        )
    try:
        ladder = check_degrees(size, degrees)
        if composition is None:
            smallest = ladder[0]
            if size % smallest:
                raise CompositionError(
                    f"a pool of {size} cannot be filled with degree {smallest}; "
                    f"name a --composition or add degree 1 to --cp-degrees"
                )
            composition = f"{size // smallest}x{smallest}"
        return ladder, format_composition(parse_composition(composition, size, ladder))
    except CompositionError as exc:
        raise ConfigurationError(str(exc)) from exc


def check_host(host: str) -> None:
    """Raises ``ConfigurationError`` when the pool's sockets cannot be bound to ``host``."""
    try:
        ipaddress.IPv4Address(host)
    except ipaddress.AddressValueError as exc:
        raise ConfigurationError(
            f"--host {host}: give an IPv4 address of this machine, such as 127.0.0.1, or 0.0.0.0 "
            f"for all of them"
        ) from exc


def check_pool_id(pool_id: str | None) -> None:
    """Raises ``ConfigurationError`` for a name that would not fit into a socket's address."""
    if pool_id is not None and not 0 < len(pool_id.encode()) <= MAX_POOL_ID_BYTES:
        raise ConfigurationError(f"--pool-id: a name of 1 to {MAX_POOL_ID_BYTES} bytes")


def new_pool_id() -> str:
    """A name that tells two lives of a pool apart."""
    return f"pool-{secrets.token_hex(4)}"
