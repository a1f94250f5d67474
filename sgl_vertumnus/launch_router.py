"""``python -m sgl_vertumnus.launch_router``: the router alone, in front of running pools.

Needs neither torch nor sglang.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from vertumnus_patches.install import manifest
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_router.core.config import (
    POLICIES,
    ConfigError,
    FluidConfig,
    LateConfig,
    PolicyConfig,
)
from vertumnus_router.core.profile import ProfileError
from vertumnus_router.io.config import DEFAULT_PORT, Limits, RouterConfig
from vertumnus_router.profiles import DEFAULT, shipped

from sgl_vertumnus.controller_flags import add_controller_flags, controller_config
from sgl_vertumnus.discovery_flags import add_discovery_flags, discovery_config
from sgl_vertumnus.fault_flags import (
    add_fault_flags,
    backoff_config,
    breaker_config,
    fault_limits,
)
from sgl_vertumnus.guard_flags import add_guard_flags, admission_config, api_keys, tls_config
from sgl_vertumnus.observe_flags import add_observe_flags, observe_config
from sgl_vertumnus.prefix_flags import add_prefix_flags, prefix_config
from sgl_vertumnus.server_flags import (
    add_server_flags,
    policy_name,
    prefill_urls,
    prometheus_address,
    worker_urls,
)

_POLICY, _LIMITS = PolicyConfig(), Limits()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Exits 2 on a usage error, 1 when it cannot serve."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        config = router_config(options)
    except ConfigError as exc:
        parser.error(str(exc))
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from vertumnus_router.io.server import run_router

    try:
        run_router(config)
    except (OSError, ProfileError, ConfigError) as exc:
        sys.exit(f"launch_router: {exc}")


def router_config(options: argparse.Namespace) -> RouterConfig:
    """The configuration that the options name. Raises ``ConfigError``."""
    return RouterConfig(
        discovery=discovery_config(options),
        pool_urls=options.pool_urls,
        worker_urls=worker_urls(options),
        prefill_urls=prefill_urls(options),
        decode_urls=tuple(options.decode),
        host=options.host,
        port=options.port,
        policy=PolicyConfig(
            policy=options.policy,
            beta=options.beta,
            lam=options.lam,
            attempts=options.attempts,
            retry_budget=options.retry_budget,
            queue_limit=options.queue_limit,
            queue_timeout_s=options.queue_timeout_s,
            seed=options.seed,
            expected_manifest=options.expected_manifest,
            index_mib=options.index_mib,
            late=LateConfig(in_flight=options.in_flight),
            fluid=FluidConfig(lam=options.fluid_lam),
            controller=controller_config(options),
            prefix=prefix_config(options),
            breaker=breaker_config(options),
            backoff=backoff_config(options),
        ),
        profile=options.profile,
        control_key=options.control_key,
        api_keys=api_keys(options),
        upstream_api_key=options.upstream_api_key,
        tls=tls_config(options),
        admission=admission_config(options),
        prometheus=prometheus_address(options),
        tokenizer_path=options.tokenizer_path,
        ready_file=options.ready_file,
        limits=Limits(
            body_bytes=options.max_body_bytes,
            tokenize_threads=options.tokenize_threads,
            tokenize_s=options.tokenize_timeout_s,
            tokenize_cache_mib=options.tokenize_cache_mib,
            warm_s=options.warm_timeout_s,
            stop_s=options.stop_timeout_s,
            pull_s=options.pull_timeout_s,
            **fault_limits(options),
        ),
        observe=observe_config(options),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vertumnus.launch_router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--pool-urls",
        type=_urls,
        default=(),
        metavar="URL[,URL...]",
        help="the HTTP fronts of the pools, such as http://127.0.0.1:30000",
    )
    add_server_flags(parser)
    add(
        "--decode",
        action="append",
        default=[],
        metavar="URL",
        help="a decode server for pools that prefill only: plain SGLang with "
        "--disaggregation-mode decode, which fetches the KV from the host that the pool's URL "
        "names; may be given several times",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default %(default)s)")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add("--ready-file", type=Path, help="write {url, port} here once the router listens")
    add("--control-key", help="admin key of the fronts, and of operators elsewhere")
    add("--tokenizer-path", help="directory of the model's tokenizer, if not as the pools say")
    policy = parser.add_argument_group("policy")
    add = policy.add_argument
    add(
        "--policy",
        type=policy_name,
        choices=POLICIES,
        default=_POLICY.policy,
        help=f"({_POLICY.policy})",
    )
    add("--beta", type=float, default=_POLICY.beta, help=f"weight β ({_POLICY.beta})")
    add(
        "--lam",
        type=float,
        default=_POLICY.lam,
        help=f"weight λ of the policies paper and late ({_POLICY.lam})",
    )
    add(
        "--fluid-lam",
        type=float,
        default=_POLICY.fluid.lam,
        help=f"weight λ of the policy fluid while all ranks are idle ({_POLICY.fluid.lam})",
    )
    add(
        "--profile",
        default=DEFAULT,
        help=f"prefill-time profile: a JSON file or one of {', '.join(shipped())}",
    )
    add(
        "--queue-limit",
        type=int,
        default=_POLICY.queue_limit,
        help=f"requests that may wait at the router ({_POLICY.queue_limit})",
    )
    add(
        "--queue-timeout-s",
        type=float,
        default=_POLICY.queue_timeout_s,
        help=f"longest wait while no worker could serve ({_POLICY.queue_timeout_s:g})",
    )
    add(
        "--in-flight",
        action=argparse.BooleanOptionalAction,
        default=_POLICY.late.in_flight,
        help="with --policy late or fluid, count blocks that are being computed or copied as "
        f"soon to be there ({'on' if _POLICY.late.in_flight else 'off'})",
    )
    add("--seed", type=int, default=_POLICY.seed, help="decides between equal workers")
    add(
        "--expected-manifest",
        default=manifest(ALL_PATCHES),
        help="refuse ranks that run other patches than this digest (default: this "
        "installation's, %(default)s)",
    )
    add_discovery_flags(parser)
    add_controller_flags(parser)
    add_prefix_flags(parser)
    add_guard_flags(parser)
    add_fault_flags(parser)
    add_observe_flags(parser)
    limits = parser.add_argument_group("limits")
    add = limits.add_argument
    add(
        "--max-body-bytes",
        "--max-payload-size",
        type=int,
        default=_LIMITS.body_bytes,
        help=f"({_LIMITS.body_bytes})",
    )
    add(
        "--tokenize-threads",
        type=int,
        default=_LIMITS.tokenize_threads,
        help=f"({_LIMITS.tokenize_threads})",
    )
    add(
        "--tokenize-timeout-s",
        type=float,
        default=_LIMITS.tokenize_s,
        help=f"then a prompt's length is estimated ({_LIMITS.tokenize_s:g})",
    )
    add(
        "--tokenize-cache-mib",
        type=int,
        default=_LIMITS.tokenize_cache_mib,
        help="memory for the beginnings of prompts, so that the next turn of a conversation costs "
        f"its new tokens only ({_LIMITS.tokenize_cache_mib})",
    )
    add(
        "--warm-timeout-s",
        type=float,
        default=_LIMITS.warm_s,
        help=f"longest that readiness waits for the prefix index ({_LIMITS.warm_s:g})",
    )
    add(
        "--stop-timeout-s",
        type=float,
        default=_LIMITS.stop_s,
        help=f"how long streams may go on after SIGTERM ({_LIMITS.stop_s:g})",
    )
    add(
        "--pull-timeout-s",
        type=float,
        default=_LIMITS.pull_s,
        help=f"longest that a request waits for its pull ({_LIMITS.pull_s:g})",
    )
    return parser


def _urls(text: str) -> tuple[str, ...]:
    return tuple(url for part in text.split(",") if (url := part.strip()))


if __name__ == "__main__":
    main()
