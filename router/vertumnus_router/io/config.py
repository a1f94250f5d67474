"""The router's configuration: one frozen object, checked where it is made, printed at start."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vertumnus_router.core.admission import AdmissionConfig
from vertumnus_router.core.config import ConfigError, PolicyConfig
from vertumnus_router.io.access import listens_on_loopback
from vertumnus_router.io.discovery.config import Discovery
from vertumnus_router.io.keys import ApiKey, check_api_keys
from vertumnus_router.io.observe.settings import ObserveConfig
from vertumnus_router.io.tls import TlsConfig
from vertumnus_router.profiles import DEFAULT as DEFAULT_PROFILE

DEFAULT_PORT = 30080

_SECRET = frozenset(("control_key", "upstream_api_key", "keyfile_password"))


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes and tokens, times in seconds.

    ``tokenize_s``: after that a prompt is estimated. ``tokenize_cache_mib``: for what is known of
    the beginnings of prompts. ``warm_s``: how long readiness waits for
    the prefix index of pools that have joined. ``stop_s``: how long streams may go on after
    SIGTERM. ``probe_s``: how often a pool's front is asked whether it lives; decode servers are
    asked every second, or as often. ``probe_timeout_s``: how long they have to answer, and
    ``missed_probes`` how often they may not in a row. ``pull_s``: how long a request waits for the
    copy of cached KV that goes before it. ``answer_s``: how long an attempt may go on without a
    byte of its answer, ``stream_idle_s`` without another one. ``client_idle_s``: how long a client
    may leave what was sent to it unread. The last three may be infinite.
    """

    body_bytes: int = 64 * 1024 * 1024
    tokenize_threads: int = 2
    tokenize_s: float = 2.0
    tokenize_cache_mib: int = 128
    connect_s: float = 5.0
    warm_s: float = 30.0
    stop_s: float = 30.0
    pull_s: float = 2.0
    probe_s: float = 2.0
    probe_timeout_s: float = 2.0
    missed_probes: int = 3
    answer_s: float = 1800.0
    stream_idle_s: float = 300.0
    client_idle_s: float = 120.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if not getattr(self, one.name) > 0:
                raise ConfigError(f"limits.{one.name} {getattr(self, one.name)}: must be above 0")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """``pool_urls`` must be pools; ``worker_urls`` may be servers of plain SGLang as well, and so
    may ``prefill_urls``, each with its bootstrap port if it does not say it itself.
    ``decode_urls`` are the decode servers of what prefills only. ``discovery`` finds more of all
    these. ``profile`` is the name of a shipped profile or the path of a file. ``control_key`` is
    sent to the fronts as a bearer token with commands (aborts), and lets clients on other hosts
    give commands of operators.
    ``prometheus`` is another address, host and port, to serve metrics at.
    ``api_keys`` are those of clients: with none, nobody needs one. ``upstream_api_key`` is sent to
    the servers with requests of clients, in place of the clients' own keys.
    ``tokenizer_path`` replaces the path that the pools name. ``ready_file`` is written once the
    router listens."""

    pool_urls: tuple[str, ...] = ()
    worker_urls: tuple[str, ...] = ()
    prefill_urls: tuple[tuple[str, int | None], ...] = ()
    decode_urls: tuple[str, ...] = ()
    discovery: tuple[Discovery, ...] = ()
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    profile: str = DEFAULT_PROFILE
    control_key: str | None = field(default=None, repr=False)
    api_keys: tuple[ApiKey, ...] = ()
    upstream_api_key: str | None = field(default=None, repr=False)
    tls: TlsConfig = field(default_factory=TlsConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    prometheus: tuple[str, int] | None = None
    tokenizer_path: str | None = None
    ready_file: Path | None = None
    limits: Limits = field(default_factory=Limits)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        prefills = tuple(url for url, _ in self.prefill_urls)
        check_urls("pool_urls", self.pool_urls, "pool")
        check_urls("worker_urls", self.worker_urls, "worker")
        check_urls("prefill_urls", prefills, "prefill server")
        check_urls("decode_urls", self.decode_urls, "decode server")
        every = (*self.pool_urls, *self.worker_urls, *prefills, *self.decode_urls)
        check_urls("pools, workers, prefill and decode servers", every, "server")
        if self.prometheus is not None and not 0 <= self.prometheus[1] <= 65535:
            raise ConfigError(f"prometheus port {self.prometheus[1]}: must be 0 to 65535")
        check_api_keys(self.api_keys, self.control_key)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port}: must be 0 (any free one) to 65535")

    @property
    def warning(self) -> str | None:
        """What an operator should know about who can use the router, or None."""
        if self.api_keys or listens_on_loopback(self.host):
            return None
        return (
            f"the router listens on {self.host} and needs no key: whoever reaches it can use the "
            f"model. Give it --api-keys-file"
        )

    def describe(self) -> str:
        """One setting a line, nested ones dotted, secrets masked."""
        return "\n".join(_lines(self, ""))


def check_urls(name: str, urls: tuple[str, ...], what: str) -> None:
    """``ConfigError`` unless they are URLs of different servers."""
    for url in urls:
        if not _is_url(url):
            raise ConfigError(f"{name}: {url!r} is not an http:// or https:// URL")
        if "@" in urlsplit(url).netloc:
            # It would be shown to everyone who may see the workers.
            raise ConfigError(
                f"{name}: a URL with a user name or a password in it: give servers their key by "
                f"--upstream-api-key"
            )
    if len({url.rstrip("/") for url in urls}) != len(urls):
        raise ConfigError(f"{name}: a {what} is named twice")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises for what is no number, and for what is behind a space
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in text


def _lines(value: Any, prefix: str) -> list[str]:
    lines: list[str] = []
    for one in fields(value):
        inner, name = getattr(value, one.name), prefix + one.name
        if hasattr(inner, "__dataclass_fields__"):
            lines += _lines(inner, f"{name}.")
        elif one.name in _SECRET and inner is not None:
            lines.append(f"{name} = (set)")
        elif one.name == "api_keys":
            lines.append(f"{name} = {', '.join(key.name for key in inner) or '(none)'}")
        else:
            lines.append(f"{name} = {inner}")
    return lines
