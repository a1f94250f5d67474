"""The flags that say who may use the router, how much of it, and over what connections."""

import argparse
from pathlib import Path

from vertumnus_router.core.admission import AdmissionConfig
from vertumnus_router.io.keys import ApiKey, read_api_keys
from vertumnus_router.io.tls import TlsConfig


def add_guard_flags(parser: argparse.ArgumentParser) -> None:
    """Two groups of their own. ``--control-key`` is the launcher's: a pool's is SGLang's
    ``--admin-api-key``."""
    add = parser.add_argument_group("security").add_argument
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that lets a client in, named key-1, key-2, … in metrics; may be given several "
        "times. Other users of this host can read command lines: prefer the file",
    )
    add(
        "--api-keys-file",
        type=Path,
        metavar="FILE",
        help="keys of clients, one name:key a line; the name is a label of metrics",
    )
    add(
        "--upstream-api-key",
        metavar="KEY",
        help="sent to plain SGLang servers that were started with --api-key",
    )
    add("--ssl-certfile", type=Path, metavar="PEM", help="speak TLS: the certificate chain")
    add("--ssl-keyfile", type=Path, metavar="PEM", help="and its key")
    add("--ssl-keyfile-password", metavar="TEXT", help="if the key has one")
    add(
        "--upstream-ca-file",
        type=Path,
        metavar="PEM",
        help="who vouches for https:// servers behind the router (default: the system's)",
    )
    add(
        "--upstream-certfile",
        type=Path,
        metavar="PEM",
        help="shown to https:// servers that ask for a client's certificate (mTLS)",
    )
    add("--upstream-keyfile", type=Path, metavar="PEM", help="and its key")
    add = parser.add_argument_group(
        "admission",
        "For each API key, or all clients together if there are none. Who presents the control "
        "key is not limited.",
    ).add_argument
    add("--rate-limit-requests", type=float, metavar="N", help="requests a minute (no limit)")
    add("--rate-limit-tokens", type=float, metavar="N", help="prompt tokens a minute (no limit)")
    add(
        "--max-waiting-per-key",
        type=int,
        metavar="N",
        help="requests that may wait for the end of their prefill (no limit)",
    )
    add(
        "--reject-late",
        action="store_true",
        help="answer 429 at once if no worker is predicted to begin its answer within the "
        "request's x-request-deadline-ms",
    )


def api_keys(options: argparse.Namespace) -> tuple[ApiKey, ...]:
    """Those of the command line, then those of the file. Raises ``ConfigError``."""
    given = [ApiKey(f"key-{at}", key) for at, key in enumerate(options.api_key, 1)]
    if options.api_keys_file is not None:
        given += read_api_keys(options.api_keys_file)
    return tuple(given)


def tls_config(options: argparse.Namespace) -> TlsConfig:
    """What the options say. Raises ``ConfigError``."""
    return TlsConfig(
        certfile=options.ssl_certfile,
        keyfile=options.ssl_keyfile,
        keyfile_password=options.ssl_keyfile_password,
        upstream_ca_file=options.upstream_ca_file,
        upstream_certfile=options.upstream_certfile,
        upstream_keyfile=options.upstream_keyfile,
    )


def admission_config(options: argparse.Namespace) -> AdmissionConfig:
    """What the options say. Raises ``ConfigError``."""
    return AdmissionConfig(
        requests_per_minute=options.rate_limit_requests,
        tokens_per_minute=options.rate_limit_tokens,
        waiting=options.max_waiting_per_key,
        reject_late=options.reject_late,
    )


def guard_flags(options: argparse.Namespace) -> list[str]:
    """The same as arguments for a router."""
    given = {
        "--api-keys-file": options.api_keys_file,
        "--upstream-api-key": options.upstream_api_key,
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-keyfile-password": options.ssl_keyfile_password,
        "--upstream-ca-file": options.upstream_ca_file,
        "--upstream-certfile": options.upstream_certfile,
        "--upstream-keyfile": options.upstream_keyfile,
        "--rate-limit-requests": options.rate_limit_requests,
        "--rate-limit-tokens": options.rate_limit_tokens,
        "--max-waiting-per-key": options.max_waiting_per_key,
    }
    flags = [part for key in options.api_key for part in ("--api-key", key)]
    for flag, value in given.items():
        if value is not None:
            flags += [flag, str(value)]
    return [*flags, *(["--reject-late"] if options.reject_late else [])]
