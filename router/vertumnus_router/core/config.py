"""The settings of the control plane, validated where they are made."""

from dataclasses import dataclass, field

from vertumnus_router.core.model import CorrectionConfig

POLICIES = ("paper", "late")


class ConfigError(ValueError):
    """A setting that cannot work; the message names it and the values that can."""


@dataclass(frozen=True, slots=True)
class LateConfig:
    """Late binding. λ = min(``lam_cap``, lam + ``lam_gain``·EMA(queued requests per rank));
    the EMA has the time constant ``backlog_tau_s``. The queue is ordered by g − ``ageing``·wait
    (GPU-seconds, seconds) and its first ``window`` requests are planned."""

    lam_gain: float = 4.0
    lam_cap: float = 1.2
    ageing: float = 0.2
    window: int = 15
    backlog_tau_s: float = 1.0

    def __post_init__(self) -> None:
        _at_least("late.lam_gain", self.lam_gain, 0)
        _at_least("late.lam_cap", self.lam_cap, 0)
        _at_least("late.ageing", self.ageing, 0)
        _at_least("late.window", self.window, 1)
        if not self.backlog_tau_s > 0:
            raise ConfigError(f"late.backlog_tau_s {self.backlog_tau_s}: must be above 0 s")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """``beta`` and ``lam`` are the paper's β and λ (``late`` has β = 1 and raises λ with load).

    ``attempts``: dispatches of one request, the first included. ``queue_limit``: requests that
    wait at the router. ``queue_timeout_s``: how long a request waits while no serving worker
    could take it. Candidates within ``tie_s`` of the best price are equal, ``seed`` decides.
    ``index_nodes`` caps the prefix index.
    """

    policy: str = "paper"
    beta: float = 3.0
    lam: float = 0.3
    attempts: int = 3
    queue_limit: int = 1024
    queue_timeout_s: float = 30.0
    tie_s: float = 0.001
    seed: int = 0
    expected_manifest: str | None = None
    index_nodes: int = 1_000_000
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    late: LateConfig = field(default_factory=LateConfig)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if not self.beta > 0:
            raise ConfigError(f"beta {self.beta}: must be above 0, or service time has no price")
        _at_least("lam", self.lam, 0)
        _at_least("attempts", self.attempts, 1)
        _at_least("queue_limit", self.queue_limit, 1)
        _at_least("queue_timeout_s", self.queue_timeout_s, 0)
        _at_least("tie_s", self.tie_s, 0)
        _at_least("index_nodes", self.index_nodes, 1)
        if self.expected_manifest == "":
            raise ConfigError("expected_manifest is empty: leave it out to accept any")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # refuses NaN too
        raise ConfigError(f"{name} {value}: must be {least} or more")
