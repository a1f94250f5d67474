"""Flags that say what the router does when workers fail, under sglang-router's names.

What these mean there and cannot mean here is refused with the reason, so that nobody relies on
it. Retries differ most: another attempt goes to another worker, and there at once, so what waits
between attempts is the worker that had no room, not the request.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from vertumnus_router.core.config import BackoffConfig, BreakerConfig, PolicyConfig
from vertumnus_router.io.config import Limits

_POLICY, _LIMITS = PolicyConfig(), Limits()
_BREAKER, _BACKOFF = _POLICY.breaker, _POLICY.backoff

#: Flags of sglang-router that are refused: whether they take a value, and why.
REFUSED = {
    "--health-success-threshold": (
        1,
        "a server is back as soon as it answers and says that it is the same; one that answers and "
        "fails is what the circuit breaker is for: see --cb-success-threshold",
    ),
    "--health-check-endpoint": (
        1,
        "pools are asked for /vertumnus/pool and decode servers for /ready, which cost the engine "
        "nothing and tell a restart",
    ),
    "--disable-health-check": (
        0,
        "a server that is not asked cannot be found, nor its end be noticed; ask it less often "
        "with --health-check-interval-secs",
    ),
}


class Refused(argparse.Action):
    """A flag that cannot be honoured; ``reason`` is what the user reads."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, nargs: int, reason: str
    ) -> None:
        super().__init__(option_strings, dest, nargs=nargs, help=argparse.SUPPRESS)
        self._reason = reason

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} has no meaning here, leave it out: {self._reason}")


def add_fault_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to ``launch_router``."""
    group = parser.add_argument_group("retries, before the first byte of an answer only")
    add = group.add_argument
    add(
        "--attempts",
        "--retry-max-retries",
        type=int,
        default=_POLICY.attempts,
        help="workers a request may be sent to, the first included, none of them twice "
        f"({_POLICY.attempts})",
    )
    add(
        "--disable-retries",
        dest="attempts",
        action="store_const",
        const=1,
        help="the same as --attempts 1",
    )
    add(
        "--retry-budget",
        type=float,
        default=_POLICY.retry_budget,
        metavar="SHARE",
        help="of the live requests so many may be in a further attempt, or ten if that is more; "
        f"further failures are answered as they are ({_POLICY.retry_budget:g})",
    )
    add(
        "--retry-initial-backoff-ms",
        type=int,
        default=_ms(_BACKOFF.initial_s),
        help="how long a worker that answers 429 or 503 is left alone, if it does not say with "
        f"Retry-After ({_ms(_BACKOFF.initial_s)})",
    )
    add(
        "--retry-backoff-multiplier",
        type=float,
        default=_BACKOFF.multiplier,
        help=f"so many times as long each time in a row ({_BACKOFF.multiplier:g})",
    )
    add(
        "--retry-max-backoff-ms",
        type=int,
        default=_ms(_BACKOFF.longest_s),
        help=f"and never longer than this, whatever it says ({_ms(_BACKOFF.longest_s)})",
    )
    add(
        "--retry-jitter-factor",
        type=float,
        default=_BACKOFF.jitter,
        help=f"up to this share longer, by --seed ({_BACKOFF.jitter:g})",
    )
    group = parser.add_argument_group(
        "circuit breakers, one for each worker; 4xx, 429 and 503 do not count"
    )
    add = group.add_argument
    add(
        "--cb-failure-threshold",
        type=int,
        default=_BREAKER.failure_threshold,
        help=f"so many failures in a row open it ({_BREAKER.failure_threshold}), or twice as many "
        "among four times as many attempts",
    )
    add(
        "--cb-window-duration-secs",
        type=float,
        default=_BREAKER.window_s,
        help=f"if they lie within so many seconds ({_BREAKER.window_s:g})",
    )
    add(
        "--cb-timeout-duration-secs",
        type=float,
        default=_BREAKER.open_s,
        help="the worker gets no requests for so long, and then one at a time, as a probe "
        f"({_BREAKER.open_s:g})",
    )
    add(
        "--cb-success-threshold",
        type=int,
        default=_BREAKER.success_threshold,
        help=f"first tokens of probes that close it ({_BREAKER.success_threshold})",
    )
    add("--disable-circuit-breaker", action="store_true", help="let workers fail as they like")
    group = parser.add_argument_group("what is waited for")
    add = group.add_argument
    add(
        "--request-timeout-secs",
        type=float,
        default=_LIMITS.answer_s,
        help="how long an attempt may go on without a byte of its answer, which of a request that "
        f"does not stream comes with the last; inf: for ever ({_LIMITS.answer_s:g})",
    )
    add(
        "--stream-idle-timeout-secs",
        type=float,
        default=_LIMITS.stream_idle_s,
        help="how long a stream may go on without another byte; inf: for ever "
        f"({_LIMITS.stream_idle_s:g})",
    )
    add(
        "--client-idle-timeout-secs",
        type=float,
        default=_LIMITS.client_idle_s,
        help="how long a client may leave unread what was sent to it, on Linux; inf: for ever "
        f"({_LIMITS.client_idle_s:g})",
    )
    add(
        "--health-check-interval-secs",
        type=float,
        default=_LIMITS.probe_s,
        help="how often servers are asked whether they live, decode servers every second or as "
        f"often ({_LIMITS.probe_s:g})",
    )
    add(
        "--health-check-timeout-secs",
        type=float,
        default=_LIMITS.probe_timeout_s,
        help=f"how long they have to answer ({_LIMITS.probe_timeout_s:g})",
    )
    add(
        "--health-failure-threshold",
        type=int,
        default=_LIMITS.missed_probes,
        help="how often in a row they may not answer before they are lost; a refused connection "
        f"is enough by itself ({_LIMITS.missed_probes})",
    )
    for flag, (values, reason) in REFUSED.items():
        parser.add_argument(flag, action=Refused, nargs=values, reason=reason)


def breaker_config(options: argparse.Namespace) -> BreakerConfig:
    """Raises ``ConfigError``."""
    return BreakerConfig(
        enabled=not options.disable_circuit_breaker,
        failure_threshold=options.cb_failure_threshold,
        success_threshold=options.cb_success_threshold,
        open_s=options.cb_timeout_duration_secs,
        window_s=options.cb_window_duration_secs,
    )


def backoff_config(options: argparse.Namespace) -> BackoffConfig:
    """Raises ``ConfigError``."""
    return BackoffConfig(
        initial_s=options.retry_initial_backoff_ms / 1000,
        longest_s=options.retry_max_backoff_ms / 1000,
        multiplier=options.retry_backoff_multiplier,
        jitter=options.retry_jitter_factor,
    )


def fault_limits(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``Limits`` that these flags set."""
    return {
        "answer_s": options.request_timeout_secs,
        "stream_idle_s": options.stream_idle_timeout_secs,
        "client_idle_s": options.client_idle_timeout_secs,
        "probe_s": options.health_check_interval_secs,
        "probe_timeout_s": options.health_check_timeout_secs,
        "missed_probes": options.health_failure_threshold,
    }


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
