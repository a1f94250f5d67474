"""The flags of what is observed, which the router and the pool that starts one both take."""

import argparse
from collections.abc import Sequence
from dataclasses import astuple

from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.observe.settings import ObserveConfig, TtftTargets

#: Where SGLang 0.5.23 sends traces unless told otherwise (``arg_groups/fields/observability.py``).
_SGLANG_COLLECTOR = "localhost:4317"
_SLO = TtftTargets()


def add_observe_flags(parser: argparse.ArgumentParser, *, traces: bool = True) -> None:
    """A group of their own. Without ``traces`` the flag for these is somebody else's."""
    add = parser.add_argument_group("observation").add_argument
    add(
        "--request-log",
        metavar="FILE|-",
        help="write a line of JSON for each request that has ended to this file, or with - to "
        "standard output (off)",
    )
    if traces:
        add(
            "--otlp-traces-endpoint",
            metavar="HOST:PORT",
            help="send traces to this OpenTelemetry collector, OTLP over gRPC as SGLang does with "
            "--enable-trace; needs the otel extra (off)",
        )
    add(
        "--slo-ttft-s",
        type=_targets,
        default=_SLO,
        metavar="S,S,S",
        help="time to the first token that prompts below 8K tokens, below 32K and above should "
        f"see, for metrics and GET /ui ({_text(_SLO)})",
    )


def observe_config(options: argparse.Namespace) -> ObserveConfig:
    """What the options say. Raises ``ConfigError``."""
    return ObserveConfig(
        request_log=options.request_log,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        slo=options.slo_ttft_s,
    )


def observe_flags(options: argparse.Namespace) -> list[str]:
    """The same as arguments for a router, but for traces."""
    flags = ["--slo-ttft-s", _text(options.slo_ttft_s)]
    return flags if options.request_log is None else [*flags, "--request-log", options.request_log]


def trace_flags(passed: Sequence[str]) -> list[str]:
    """The router of a pool that SGLang traces is traced by the same collector."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--enable-trace", action="store_true")
    parser.add_argument("--otlp-traces-endpoint", default=_SGLANG_COLLECTOR)
    found, _ = parser.parse_known_args(passed)
    return ["--otlp-traces-endpoint", found.otlp_traces_endpoint] if found.enable_trace else []


def _targets(text: str) -> TtftTargets:
    try:
        short_s, medium_s, long_s = map(float, text.split(","))
        return TtftTargets(short_s, medium_s, long_s)
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: give three times such as 1,5,10") from exc


def _text(targets: TtftTargets) -> str:
    return ",".join(f"{seconds:g}" for seconds in astuple(targets))
