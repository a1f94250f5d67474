"""``python -m sgl_vertumnus.launch_server``: one pool of SGLang ranks, and the router before it.

The flags below are ours; every other flag goes to SGLang unchanged (``sglang serve --help``).
"""

import argparse
import os
import secrets
import sys
from collections.abc import Sequence

from vertumnus_router.core.config import POLICIES
from vertumnus_router.core.profile import ProfileError
from vertumnus_router.io.config import DEFAULT_PORT
from vertumnus_router.profiles import DEFAULT as DEFAULT_PROFILE
from vertumnus_router.profiles import load_profile, shipped

from sgl_vertumnus.config import (
    PoolConfig,
    Ports,
    check_geometry,
    check_host,
    check_pool_id,
    new_pool_id,
)
from sgl_vertumnus.environment import hide_gpus, publish_pool_config, set_defaults
from sgl_vertumnus.errors import ConfigurationError, VertumnusError
from sgl_vertumnus.ports import FIRST, free_range

#: Where the search for free ports may begin: pools that start together begin apart.
_PORT_SPREAD = 8000


def main(argv: Sequence[str] | None = None) -> None:
    """Run until interrupted. Exits 2 on a usage error, before any process starts."""
    options, passed = _parse(sys.argv[1:] if argv is None else argv)
    try:
        config = _pool_config(options, passed)
        _prepare_environment(config)
        from sgl_vertumnus.worker.launch import serve

        serve(config, passed, router_flags=_router_flags(options))
    except ConfigurationError as exc:
        print(f"launch_server: {exc}", file=sys.stderr)
        sys.exit(2)
    except VertumnusError as exc:
        sys.exit(f"launch_server: the pool stopped: {exc}")


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vertumnus.launch_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    pool = parser.add_argument_group("pool")
    pool.add_argument("--model-path", "--model", required=True, help="as SGLang's --model-path")
    pool.add_argument("--pool-size", type=int, required=True, help="number of ranks")
    pool.add_argument(
        "--cp-degrees",
        type=_degrees,
        help="context-parallel degrees the pool can form, powers of two (default 1,2, or 1 for "
        "a pool of one)",
    )
    pool.add_argument(
        "--composition",
        help="workers after start as COUNTxDEGREE, such as 2x1,1x2 "
        "(default: every rank a worker of the smallest degree)",
    )
    pool.add_argument("--pool-id", help="name of this pool (default: a random one)")
    pool.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of the front and of the ranks' event sockets, which carry every prompt's "
        "tokens without authentication: loopback or a private network only",
    )
    router = parser.add_argument_group("router")
    router.add_argument(
        "--router-port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port of the router that is started in front (default {DEFAULT_PORT})",
    )
    router.add_argument("--no-router", action="store_true", help="start the pool alone")
    router.add_argument(
        "--policy", choices=POLICIES, default="paper", help="placement policy (paper)"
    )
    router.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        help=f"prefill-time profile: a JSON file or one of {', '.join(shipped())}",
    )
    return parser.parse_known_args(argv)


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,4") from None


def _pool_config(options: argparse.Namespace, passed: list[str]) -> PoolConfig:
    size = options.pool_size
    asked = options.cp_degrees or ((1, 2) if size > 1 else (1,))
    degrees, composition = check_geometry(size, asked, options.composition)
    check_host(options.host)
    check_pool_id(options.pool_id)
    passed[:0] = ["--model-path", options.model_path, "--host", options.host]
    if not options.no_router:
        _check_profile(options.profile, degrees)
    start = FIRST + secrets.randbelow(_PORT_SPREAD)
    kv_events = free_range(options.host, 3 * size + 2, start=start)
    return PoolConfig(
        pool_id=options.pool_id or new_pool_id(),
        size=size,
        degrees=degrees,
        composition=composition,
        host=options.host,
        device=_device(passed),
        threads=max(1, len(os.sched_getaffinity(0)) // size),
        ports=Ports(
            kv_events=kv_events,
            kv_replay=kv_events + size,
            reports=kv_events + 2 * size,
            store=kv_events + 3 * size + 1,
        ),
    )


def _device(passed: Sequence[str]) -> str:
    """SGLang's --device if given, else cuda where there is a GPU, else cpu."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    given = parser.parse_known_args(passed)[0].device
    if given is not None:
        return str(given)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _prepare_environment(config: PoolConfig) -> None:
    publish_pool_config(config)
    # The router names rank and request id in headers, so that it never rewrites a body.
    set_defaults({"SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1"})
    if config.device != "cpu":
        return
    hide_gpus()  # one in sight would change SGLang's code paths
    set_defaults(
        {
            "SGLANG_PLATFORM": "vertumnus_cpu",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                _cores_of(config, r) for r in range(config.size)
            ),
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


def _cores_of(config: PoolConfig, rank: int) -> str:
    """SGLang insists on a list of cores for each rank when there are more ranks than NUMA
    nodes. Neighbours, which form the small blocks, get different cores."""
    cores = sorted(os.sched_getaffinity(0))
    first = rank * config.threads
    return ",".join(str(cores[(first + i) % len(cores)]) for i in range(config.threads))


def _router_flags(options: argparse.Namespace) -> list[str] | None:
    if options.no_router:
        return None
    flags = ["--host", options.host, "--port", str(options.router_port)]
    return [*flags, "--policy", options.policy, "--profile", options.profile]


def _check_profile(name: str, degrees: tuple[int, ...]) -> None:
    """The router cannot price a degree that its profile does not know."""
    try:
        profile = load_profile(name)
        for degree in degrees:
            profile.coefficients(degree)
    except ProfileError as exc:
        raise ConfigurationError(f"--profile {name}: {exc}") from exc


if __name__ == "__main__":
    main()
