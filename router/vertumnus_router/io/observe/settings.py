"""What is observed, and where it goes."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from vertumnus_router.core.config import ConfigError

#: Prompts of fewer tokens are short, of fewer than the second medium, all others long.
_BOUNDS_TOKENS = (8192, 32768)


@dataclass(frozen=True, slots=True)
class TtftTargets:
    """The time to the first token that short, medium and long prompts should see, seconds.

    The defaults are the paper's for Qwen3-30B-A3B (section 9).
    """

    short_s: float = 1.0
    medium_s: float = 5.0
    long_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.short_s <= self.medium_s <= self.long_s:
            given = f"{self.short_s:g},{self.medium_s:g},{self.long_s:g}"
            raise ConfigError(
                f"slo_ttft_s {given}: give three times above 0 s that do not fall, such as 1,5,10"
            )

    def target_s(self, input_tokens: int) -> float:
        """What a prompt of that length should see."""
        short, medium = _BOUNDS_TOKENS
        if input_tokens < short:
            return self.short_s
        return self.medium_s if input_tokens < medium else self.long_s


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """``request_log`` is a file, or ``-`` for standard output; ``otlp_traces_endpoint`` is where a
    collector takes OTLP over gRPC, ``HOST:PORT``. None means that neither is wanted."""

    request_log: str | None = None
    otlp_traces_endpoint: str | None = None
    slo: TtftTargets = field(default_factory=TtftTargets)

    def __post_init__(self) -> None:
        if self.request_log == "":
            raise ConfigError("request_log: name a file, or - for standard output")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not _is_host_port(endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint {endpoint!r}: give HOST:PORT, such as localhost:4317"
            )


def _is_host_port(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and parts.port is not None and parts.netloc == text
    except ValueError:  # a port that is no number
        return False
