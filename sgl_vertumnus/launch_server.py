"""``python -m sgl_vertumnus.launch_server``: one pool of SGLang ranks, and the router before it.

The flags below are ours; every other flag goes to SGLang unchanged (``sglang serve --help``).
"""

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vertumnus_router.core.config import POLICIES, ConfigError, PolicyConfig
from vertumnus_router.core.policy import FluidPolicy
from vertumnus_router.core.profile import ProfileError
from vertumnus_router.io.config import DEFAULT_PORT, check_urls
from vertumnus_router.io.keys import check_api_keys
from vertumnus_router.io.tls import server_context, upstream_context
from vertumnus_router.profiles import DEFAULT as DEFAULT_PROFILE
from vertumnus_router.profiles import load_profile, shipped

from sgl_vertumnus.auto_composition import AUTO, auto_composition
from sgl_vertumnus.config import (
    PoolConfig,
    Ports,
    check_geometry,
    check_host,
    check_pool_id,
    new_pool_id,
)
from sgl_vertumnus.controller_flags import (
    add_controller_flags,
    controller_config,
    controller_flags,
)
from sgl_vertumnus.environment import (
    check_collectives_end,
    hide_gpus,
    publish_pool_config,
    set_defaults,
)
from sgl_vertumnus.errors import ConfigurationError, VertumnusError
from sgl_vertumnus.guard_flags import (
    add_guard_flags,
    admission_config,
    api_keys,
    guard_flags,
    tls_config,
)
from sgl_vertumnus.observe_flags import add_observe_flags, observe_flags, trace_flags
from sgl_vertumnus.ports import FIRST, free_range
from sgl_vertumnus.prefix_flags import add_prefix_flags, prefix_config, prefix_flags

#: Where the search for free ports may begin: pools that start together begin apart.
_PORT_SPREAD = 8000
FLUID = FluidPolicy.name


def main(argv: Sequence[str] | None = None) -> None:
    """Run until interrupted. Exits 2 on a usage error, before any process starts."""
    options, passed = _parse(sys.argv[1:] if argv is None else argv)
    try:
        config = _pool_config(options, passed)
        _prepare_environment(config)
        from sgl_vertumnus.worker.launch import serve

        serve(config, passed, router_flags=_router_flags(options, passed))
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
        help="context-parallel degrees the pool can form, powers of two (default 1,2)",
    )
    pool.add_argument(
        "--composition",
        help="workers after start as COUNTxDEGREE, such as 2x1,1x2 "
        "(default: every rank a worker of the smallest degree), or auto: the most large workers "
        "that bear the --history by the kappa of the --profile; or fluid, of a pool that prefills "
        "only: each request gets the degree that is best for it then, as --policy fluid",
    )
    pool.add_argument(
        "--history",
        type=Path,
        metavar="TRACE",
        help="for --composition auto: past requests in Mooncake's format, a JSON object a line "
        "with timestamp (ms), input_length, output_length, hash_ids",
    )
    pool.add_argument("--pool-id", help="name of this pool (default: a random one)")
    pool.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of the front and of the ranks' event sockets, which carry every prompt's "
        "tokens without authentication: loopback or a private network only",
    )
    pool.add_argument(
        "--allow-unproven-gpu",
        action="store_true",
        help="try a pool on GPUs, on which none has been proven yet (docs/support-matrix.md)",
    )
    router = parser.add_argument_group("router")
    router.add_argument(
        "--router-port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port of the router that is started in front (default {DEFAULT_PORT})",
    )
    router.add_argument(
        "--decode",
        action="append",
        default=[],
        metavar="URL",
        help="a decode server for the router to pair this pool with, which must prefill only; "
        "may be given several times",
    )
    router.add_argument("--no-router", action="store_true", help="start the pool alone")
    router.add_argument(
        "--policy",
        choices=POLICIES,
        help="placement policy (paper; with --composition fluid, fluid)",
    )
    router.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        help=f"prefill-time profile: a JSON file or one of {', '.join(shipped())}",
    )
    router.add_argument(
        "--queue-timeout-s",
        type=float,
        help="longest wait of a request while no worker, or no decode server, could serve it; "
        "default: the router's",
    )
    add_controller_flags(parser)
    add_prefix_flags(parser)
    add_guard_flags(parser)
    add_observe_flags(parser, traces=False)
    return parser.parse_known_args(argv)


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,4") from None


def _pool_config(options: argparse.Namespace, passed: list[str]) -> PoolConfig:
    size = options.pool_size
    asked = options.cp_degrees or (1, 2)
    degrees, composition = check_geometry(size, asked, _composition(options, asked))
    check_host(options.host)
    check_pool_id(options.pool_id)
    passed[:0] = ["--model-path", options.model_path, "--host", options.host]
    if not options.no_router:
        _check_profile(options.profile, degrees)
        _check_policy(options)
    _check_guard(options)
    start = FIRST + secrets.randbelow(_PORT_SPREAD)
    kv_events = free_range(options.host, 4 * size + 5, start=start)
    bootstrap_port = _bootstrap_port(passed, kv_events + 3 * size + 4)
    _check_decode(options, is_prefill=bootstrap_port is not None)
    if options.policy == FLUID and bootstrap_port is None and not options.no_router:
        raise ConfigurationError(
            "policy fluid needs --disaggregation-mode prefill: in a pool that decodes as well, a "
            "merge would interrupt every stream. Choose a composition, and --policy late"
        )
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
            control=kv_events + 3 * size + 2,
            kv_service=kv_events + 3 * size + 5,
        ),
        bootstrap_port=bootstrap_port,
        allow_unproven_gpu=options.allow_unproven_gpu,
    )


def _composition(options: argparse.Namespace, degrees: tuple[int, ...]) -> str | None:
    if options.composition == FLUID:
        if options.no_router:
            raise ConfigurationError(
                "--composition fluid needs the router: start that with --policy fluid, and this "
                "pool with a composition"
            )
        if options.policy not in (None, FLUID):
            raise ConfigurationError(
                f"--composition fluid is --policy fluid, not {options.policy}: choose one of them"
            )
        options.policy, options.composition = FLUID, None
    if options.composition != AUTO:
        if options.history is not None:
            raise ConfigurationError("--history is for --composition auto")
        given: str | None = options.composition
        return given
    _check_policy(options)
    chosen = auto_composition(
        options.pool_size,
        degrees,
        profile=options.profile,
        history=options.history,
        controller=controller_config(options),
    )
    print(f"launch_server: --composition auto\n{chosen}", file=sys.stderr, flush=True)
    return chosen.composition


def _bootstrap_port(passed: list[str], free: int) -> int | None:
    """Of a pool that prefills only: SGLang's --disaggregation-bootstrap-port if given, else
    ``free``, because SGLang's default is one port for all pools of a machine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--disaggregation-mode")
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    given = parser.parse_known_args(passed)[0]
    if given.disaggregation_mode != "prefill":
        return None
    if given.disaggregation_bootstrap_port is not None:
        return int(given.disaggregation_bootstrap_port)
    passed += ["--disaggregation-bootstrap-port", str(free)]
    return free


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
    if config.bootstrap_port is not None:
        _prepare_transfers(config)
    if config.device != "cpu":
        check_collectives_end()
        # The driver's numbers, by which ranks are placed; CUDA would put the fastest first.
        set_defaults({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
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


def _prepare_transfers(config: PoolConfig) -> None:
    defaults = {
        # A decode server that was given up once is tried again soon.
        "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "2",
        # By default Mooncake queues 1024 pieces for each decode server, and drops those that come
        # when the queue is full; a long prompt whose pages lie apart has more.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    }
    if config.host != "0.0.0.0":
        # Where ranks tell decode servers to reach them; SGLang would take any interface's.
        defaults["SGLANG_HOST_IP"] = config.host
    if config.device == "cpu":
        # Otherwise SGLang hands page numbers over in memory that a GPU driver pins. Every rank is
        # registered as a CP group of one, so "all CP ranks" is the rank itself.
        defaults["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1"
    set_defaults(defaults)


def _cores_of(config: PoolConfig, rank: int) -> str:
    """SGLang insists on a list of cores for each rank when there are more ranks than NUMA
    nodes. Neighbours, which form the small blocks, get different cores."""
    cores = sorted(os.sched_getaffinity(0))
    first = rank * config.threads
    return ",".join(str(cores[(first + i) % len(cores)]) for i in range(config.threads))


def _router_flags(options: argparse.Namespace, passed: Sequence[str]) -> list[str] | None:
    if options.no_router:
        return None
    flags = ["--host", options.host, "--port", str(options.router_port)]
    flags += ["--policy", options.policy or PolicyConfig().policy, "--profile", options.profile]
    if options.queue_timeout_s is not None:
        flags += ["--queue-timeout-s", str(options.queue_timeout_s)]
    flags += [flag for url in options.decode for flag in ("--decode", url)]
    flags += [*observe_flags(options), *trace_flags(passed), *guard_flags(options)]
    return [*flags, *controller_flags(options), *prefix_flags(options)]


def _check_decode(options: argparse.Namespace, *, is_prefill: bool) -> None:
    """The router would refuse it, or wait for ever, after the pool has started."""
    if options.no_router:
        if options.decode:
            raise ConfigurationError("--decode is for the router, and --no-router starts none")
        return
    try:
        check_urls("--decode", tuple(options.decode), "decode server")
    except ConfigError as exc:
        raise ConfigurationError(str(exc)) from exc
    if is_prefill != bool(options.decode):
        raise ConfigurationError(
            "--disaggregation-mode prefill needs a --decode URL for the router, or --no-router"
            if is_prefill
            else "--decode is for a pool that only prefills: add --disaggregation-mode prefill"
        )
    elsewhere = [url for url in options.decode if not _is_here(urlsplit(url).hostname)]
    if elsewhere and (options.host == "0.0.0.0" or _is_here(options.host)):
        raise ConfigurationError(
            f"--decode {elsewhere[0]} cannot reach this pool by --host {options.host}: give --host "
            f"the address of this machine that decode servers use"
        )


def _is_here(host: str | None) -> bool:
    return host == "localhost" or (host or "").startswith("127.")


def _check_policy(options: argparse.Namespace) -> None:
    """The router would refuse it, after the pool has started."""
    try:
        PolicyConfig(
            policy=options.policy or PolicyConfig().policy,
            index_mib=options.index_mib,
            controller=controller_config(options),
            prefix=prefix_config(options),
        )
    except ConfigError as exc:
        raise ConfigurationError(str(exc)) from exc


def _check_guard(options: argparse.Namespace) -> None:
    """The router would refuse it, after the pool has started."""
    if options.no_router:
        if given := guard_flags(options):
            raise ConfigurationError(f"{given[0]} is for the router, and --no-router starts none")
        return
    try:
        check_api_keys(api_keys(options), None)
        server_context(tls := tls_config(options))
        upstream_context(tls)
        admission_config(options)
    except ConfigError as exc:
        raise ConfigurationError(str(exc)) from exc


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
