"""The settings of the control plane, validated where they are made."""

import math
from dataclasses import dataclass, field

from vertumnus_router.core.model import CorrectionConfig

POLICIES = ("paper", "late", "fluid")
CONTROLLER_MODES = ("off", "observe", "on")
PREFIX_MODES = ("off", "observe", "on")


class ConfigError(ValueError):
    """A setting that cannot work; the message names it and the values that can."""


@dataclass(frozen=True, slots=True)
class LateConfig:
    """Late binding. λ = min(``lam_cap``, lam + ``lam_gain``·EMA(queued requests per rank));
    the EMA has the time constant ``backlog_tau_s``. The queue is ordered by g − ``ageing``·wait
    (GPU-seconds, seconds) and its first ``window`` requests are planned. ``in_flight``: a prefix
    that is being computed at a worker, or copied to it, counts as cached there."""

    lam_gain: float = 4.0
    lam_cap: float = 1.2
    ageing: float = 0.2
    window: int = 15
    backlog_tau_s: float = 1.0
    in_flight: bool = True

    def __post_init__(self) -> None:
        _at_least("late.lam_gain", self.lam_gain, 0)
        _at_least("late.lam_cap", self.lam_cap, 0)
        _at_least("late.ageing", self.ageing, 0)
        _at_least("late.window", self.window, 1)
        if not self.backlog_tau_s > 0:
            raise ConfigError(f"late.backlog_tau_s {self.backlog_tau_s}: must be above 0 s")


@dataclass(frozen=True, slots=True)
class FluidConfig:
    """Fluid composition. λ = min(``late.lam_cap``, ``lam`` + ``lam_busy``·busy² +
    ``late.lam_gain``·EMA(queued requests per rank)), busy the part of the serving ranks that have
    prefills to do; ``ageing`` takes the place of that of late binding. Until moves have been
    measured, one of a step keeps its ranks for ``step_s``; a pool whose last move went wrong is not
    moved for ``rest_s``, for twice as long if that was the second in a row, and so on.
    """

    lam: float = 0.4
    lam_busy: float = 0.8
    ageing: float = 0.05
    step_s: float = 0.02
    rest_s: float = 1.0

    def __post_init__(self) -> None:
        _at_least("fluid.lam", self.lam, 0)
        _at_least("fluid.lam_busy", self.lam_busy, 0)
        _at_least("fluid.ageing", self.ageing, 0)
        _at_least("fluid.step_s", self.step_s, 0)
        _at_least("fluid.rest_s", self.rest_s, 0)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """When the composition changes (section 6). ``observe`` decides and does not act.

    Demand above ``upper`` of capacity for ``persistence`` windows of ``window_s`` splits, below
    ``lower`` merges. In between, the fraction of requests of more than ``long_tokens`` decides
    when it has changed by ``long_change`` of itself and by ``long_floor`` at least. ``rho``: the
    work that a worker may be given per second where the profile has no κ for its degree.

    Against flapping: after a change ``cooldown`` windows do not count; a move must leave the
    utilisation ``margin`` inside the band; and what chance explains within ``sigmas`` standard
    deviations is neither room for a merge nor a change of the long fraction. ``remember``:
    verdicts kept for operators.
    """

    mode: str = "observe"
    window_s: float = 20.0
    upper: float = 0.75
    lower: float = 0.35
    persistence: int = 2
    cooldown: int = 1
    margin: float = 0.05
    sigmas: float = 3.0
    long_tokens: int = 32_768
    long_change: float = 0.3
    long_floor: float = 0.02
    rho: float = 0.7
    remember: int = 20

    def __post_init__(self) -> None:
        if self.mode not in CONTROLLER_MODES:
            modes = ", ".join(CONTROLLER_MODES)
            raise ConfigError(f"controller.mode {self.mode!r}: choose one of {modes}")
        for name in ("window_s", "upper", "long_change", "rho"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"controller.{name} {value}: must be above 0, and finite")
        for name in ("lower", "margin", "sigmas", "long_floor"):
            _at_least(f"controller.{name}", getattr(self, name), 0)
        for name in ("persistence", "cooldown", "long_tokens", "remember"):
            _at_least(f"controller.{name}", getattr(self, name), 1)
        if not self.lower + 2 * self.margin < self.upper:
            raise ConfigError(
                f"controller: lower {self.lower} and upper {self.upper} leave no band between "
                f"them: set them more than twice the margin of {self.margin} apart"
            )


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Which prefixes are copied to where they are wanted, and deleted where they are not (section
    7). ``observe`` decides and does not act. ``pull``: a request may have its prefix copied to
    the worker that it goes to, whatever the mode.

    A scan begins every ``scan_s``; each tick spends ``slice_blocks`` on it, the cost of a visit to
    so many blocks. Above ``theta_inter_s`` seconds that the missing part of a path would have
    saved at a degree, it is copied there; above ``theta_intra`` accesses per replica there is one
    more; below ``theta_reclaim`` one less. ``decay`` is what is left of all counts after a scan. A
    scan orders ``per_scan`` transfers of each of the three kinds.

    A scan begins no copy while ``copies_in_flight``, pulls included, or another one at either of
    its ranks; a pull, while ``pulls_per_rank`` at either of its ranks. One that has not ended after
    ``timeout_s`` is given up, and one that failed is not tried between the same ranks for
    ``retry_s``.

    Until copies have been measured, one takes ``latency_s`` and moves ``local_bytes_per_s`` within
    a pool, ``remote_bytes_per_s`` between pools; each report weighs ``gain``. ``remember``:
    decisions kept for operators, ``hot``: prefixes shown to them.
    """

    mode: str = "observe"
    pull: bool = True
    scan_s: float = 20.0
    slice_blocks: int = 10_000
    theta_inter_s: float = 1.0
    theta_intra: float = 8.0
    theta_reclaim: float = 0.5
    decay: float = 0.5
    per_scan: int = 20
    copies_in_flight: int = 8
    pulls_per_rank: int = 2
    timeout_s: float = 30.0
    retry_s: float = 10.0
    latency_s: float = 0.02
    local_bytes_per_s: float = 2e9
    remote_bytes_per_s: float = 1e9
    gain: float = 0.2
    remember: int = 50
    hot: int = 20

    def __post_init__(self) -> None:
        if self.mode not in PREFIX_MODES:
            modes = ", ".join(PREFIX_MODES)
            raise ConfigError(f"prefix.mode {self.mode!r}: choose one of {modes}")
        for name in ("scan_s", "timeout_s", "local_bytes_per_s", "remote_bytes_per_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"prefix.{name} {value}: must be above 0, and finite")
        for name in ("theta_inter_s", "theta_intra", "theta_reclaim", "retry_s", "latency_s"):
            _at_least(f"prefix.{name}", getattr(self, name), 0)
        for name in (
            "slice_blocks",
            "per_scan",
            "copies_in_flight",
            "pulls_per_rank",
            "remember",
            "hot",
        ):
            _at_least(f"prefix.{name}", getattr(self, name), 1)
        for name in ("decay", "gain"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(
                    f"prefix.{name} {getattr(self, name)}: must lie between 0 and 1, exclusive"
                )
        if not self.theta_reclaim < self.theta_intra:
            raise ConfigError(
                f"prefix.theta_reclaim {self.theta_reclaim}: must be below theta_intra "
                f"{self.theta_intra}, or what was just copied is deleted again"
            )


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """A worker whose last ``failure_threshold`` attempts all failed, within ``window_s``, or half
    of its last four times as many, gets none for ``open_s``, and then one at a time until
    ``success_threshold`` of them went well."""

    enabled: bool = True
    failure_threshold: int = 10
    success_threshold: int = 3
    open_s: float = 60.0
    window_s: float = 120.0

    def __post_init__(self) -> None:
        _at_least("breaker.failure_threshold", self.failure_threshold, 1)
        _at_least("breaker.success_threshold", self.success_threshold, 1)
        _at_least("breaker.open_s", self.open_s, 0)
        _at_least("breaker.window_s", self.window_s, 0)


@dataclass(frozen=True, slots=True)
class BackoffConfig:
    """How long a worker that answers 429 or 503 is left alone, if it does not say itself:
    ``initial_s``, each time in a row ``multiplier`` times as long, up to ``longest_s``, which also
    bounds what it says; and up to ``jitter`` times that longer."""

    initial_s: float = 0.05
    longest_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2

    def __post_init__(self) -> None:
        _at_least("backoff.initial_s", self.initial_s, 0)
        _at_least("backoff.longest_s", self.longest_s, 0)
        _at_least("backoff.multiplier", self.multiplier, 1)
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"backoff.jitter {self.jitter}: must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """``beta`` and ``lam`` are the paper's β and λ (``late`` has β = 1 and raises λ with load).

    ``attempts``: dispatches of one request, the first included. ``retry_budget``: how many of the
    live requests may be in another attempt, as a share. ``queue_limit``: requests that
    wait at the router. ``queue_timeout_s``: how long a request waits while no serving worker
    could take it. Candidates within ``tie_s`` of the best price are equal, ``seed`` decides.
    ``index_mib`` caps the memory of the prefix index.
    """

    policy: str = "late"
    beta: float = 3.0
    lam: float = 0.3
    attempts: int = 3
    retry_budget: float = 0.2
    queue_limit: int = 1024
    queue_timeout_s: float = 30.0
    tie_s: float = 0.001
    seed: int = 0
    expected_manifest: str | None = None
    index_mib: float = 256.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    late: LateConfig = field(default_factory=LateConfig)
    fluid: FluidConfig = field(default_factory=FluidConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    backoff: BackoffConfig = field(default_factory=BackoffConfig)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if self.policy == "fluid" and self.controller.mode == "on":
            raise ConfigError(
                "policy fluid moves the pools itself: set the controller to observe or off"
            )
        if self.policy == "fluid" and self.prefix.mode == "on":
            raise ConfigError(
                "policy fluid has no degrees that last, which the prefix manager counts by: set "
                "it to observe or off; prefixes can still be pulled"
            )
        if not self.beta > 0:
            raise ConfigError(f"beta {self.beta}: must be above 0, or service time has no price")
        _at_least("lam", self.lam, 0)
        _at_least("attempts", self.attempts, 1)
        _at_least("retry_budget", self.retry_budget, 0)
        _at_least("queue_limit", self.queue_limit, 1)
        _at_least("queue_timeout_s", self.queue_timeout_s, 0)
        _at_least("tie_s", self.tie_s, 0)
        if not 0.001 <= self.index_mib < math.inf:
            raise ConfigError(f"index_mib {self.index_mib}: must be 0.001 or more, and finite")
        if self.expected_manifest == "":
            raise ConfigError("expected_manifest is empty: leave it out to accept any")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # refuses NaN too
        raise ConfigError(f"{name} {value}: must be {least} or more")
