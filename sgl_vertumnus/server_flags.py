"""Flags of ``launch_router`` that sglang-router has as well, by its names."""

import argparse

from vertumnus_router.core.config import POLICIES, ConfigError

#: sglang-router's policies, and what comes nearest.
_ELSEWHERE = {
    "cache_aware": "every policy here is, by the caches' own events: leave --policy out",
    "power_of_two": "every policy here counts predicted work: leave --policy out",
    "bucket": "every policy here weighs prompt lengths: leave --policy out",
    "random": "there is none that ignores load: leave --policy out",
    "round_robin": "there is none that ignores load: leave --policy out",
    "manual": "there is no routing by key: a conversation follows its cached prefix",
}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers, as sglang-router has it")
    add = group.add_argument
    add(
        "--worker-urls",
        nargs="*",
        action="extend",
        metavar="URL",
        help="servers of plain SGLang, or pools: which kind each is, is found out. Without a "
        "URL the router starts empty, and servers join by POST /workers",
    )
    add(
        "--prefill",
        nargs="+",
        action="append",
        default=[],
        metavar=("URL", "BOOTSTRAP_PORT"),
        help="a server of plain SGLang, or a pool, with --disaggregation-mode prefill, and its "
        "bootstrap port (default: as it says); may be given several times",
    )
    add(
        "--pd-disaggregation",
        action="store_true",
        help="insist that there are --decode servers, and --prefill servers or pools",
    )
    add("--prometheus-port", type=int, help="serve metrics on a port of their own, too")
    add(
        "--prometheus-host",
        default="127.0.0.1",
        help="address for --prometheus-port (default %(default)s)",
    )


def policy_name(text: str) -> str:
    """One of ours; of sglang-router's it is said what to do instead."""
    if text in _ELSEWHERE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a policy of sglang-router; {_ELSEWHERE[text]}, or choose one of "
            f"{', '.join(POLICIES)}"
        )
    return text


def worker_urls(options: argparse.Namespace) -> tuple[str, ...]:
    """``ConfigError`` if no server is named, or --pd-disaggregation has not got what it needs."""
    if options.worker_urls is None:
        if not (options.pool_urls or options.prefill or _discovers(options)):
            raise ConfigError(
                "name at least one pool or worker with --pool-urls or --worker-urls, or what finds "
                "them with --service-discovery or --discovery-file; without a URL, --worker-urls "
                "starts the router empty"
            )
        return ()
    return tuple(url for text in options.worker_urls for url in text.split(",") if url.strip())


def prefill_urls(options: argparse.Namespace) -> tuple[tuple[str, int | None], ...]:
    """URLs and bootstrap ports. ``ConfigError`` for what is no port, or if --pd-disaggregation has
    not got what it needs."""
    if options.pd_disaggregation and not _discovers(options):
        if not options.decode:
            raise ConfigError("--pd-disaggregation: name the decode servers with --decode URL")
        if not (options.prefill or options.pool_urls or options.worker_urls):
            raise ConfigError("--pd-disaggregation: name the prefill servers with --prefill URL")
    return tuple(_prefill(*given) for given in options.prefill)


def _discovers(options: argparse.Namespace) -> bool:
    return bool(options.service_discovery or options.discovery_file)


def _prefill(url: str, port: str = "none", *more: str) -> tuple[str, int | None]:
    if port.lower() == "none" and not more:
        return url, None
    if more or not port.isdecimal() or not 0 < int(port) < 65536:
        words = " ".join((port, *more))
        raise ConfigError(f"--prefill {url} {words}: give a URL and its bootstrap port, or none")
    return url, int(port)


def prometheus_address(options: argparse.Namespace) -> tuple[str, int] | None:
    port = options.prometheus_port
    return None if port is None else (options.prometheus_host, port)
