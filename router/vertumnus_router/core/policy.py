"""What tells one policy from another: the order of the queue, the price, when to bind.

Everything else (the queue, eligibility, picking, reservations) is common to all policies. With
``paper`` and ``late`` the candidates are the committed workers, with ``fluid`` all blocks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from vertumnus_router.core.config import LateConfig, PolicyConfig
from vertumnus_router.core.events import PoolJoined
from vertumnus_router.core.membership import Membership
from vertumnus_router.core.workers import Candidates


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def beta(self) -> float:
        """Weight of the request's own service time."""

    @property
    def lam(self) -> float:
        """Weight of the GPU-seconds spent beyond those of the smallest degree."""

    @property
    def window(self) -> int | None:
        """How many queued requests one pass plans; None for all."""

    @property
    def counts_in_flight(self) -> bool:
        """Whether a prefix that is being computed at a candidate, or copied to it, counts as
        cached there."""

    @property
    def charges_recomputing(self) -> bool:
        """Whether GPU time counts as extra beyond what the request would need at the smallest
        degree with the longest prefix that any candidate has, with a weight of 1 at least where
        that is being computed at this moment; else beyond that with the prefix at hand."""

    def candidates(self, membership: Membership) -> Candidates:
        """The blocks that a request may run on."""

    def urgency(self, arrived_s: float, gpu_s: Callable[[], float]) -> float:
        """Rank in the queue, lowest first. ``gpu_s`` gives g, the request's GPU-seconds at
        the smallest degree with its best prefix hit."""

    def may_bind(self, pool: PoolJoined, load: tuple[int, int]) -> bool:
        """Whether a request may go to a block of the pool now whose unfinished prefills, all and
        without the last, have ``load`` uncached tokens."""

    def observe(self, queued: int, ranks: int, now: float) -> None:
        """``queued`` requests have waited for ``ranks`` ranks since the last call."""


class PaperPolicy:
    """Early binding over persistent workers (section 5): first come, bound on arrival to the
    argmin of J = q_w + β·s + λ·(C_w·s − C_min·Ê_Cmin(R, P))."""

    name = "paper"
    window = None
    counts_in_flight = False
    charges_recomputing = False

    def __init__(self, config: PolicyConfig) -> None:
        self.beta = config.beta
        self.lam = config.lam

    def candidates(self, membership: Membership) -> Candidates:
        return membership.candidates

    def urgency(self, arrived_s: float, gpu_s: Callable[[], float]) -> float:
        return arrived_s

    def may_bind(self, pool: PoolJoined, load: tuple[int, int]) -> bool:
        return True

    def observe(self, queued: int, ranks: int, now: float) -> None:
        pass


class LatePolicy:
    """Late binding: requests wait at the router until their worker can use them.

    J = wait + s + λ·(C·s − C_min·Ê_Cmin), λ rising with the backlog, P counting prefixes that
    are being computed at the worker now. Ê_Cmin is with the longest prefix that any candidate
    has, so a request pays for computing what another worker has; fully (λ = 1) where that is
    computing it now, or a burst on one document would be computed at every worker that is free.
    A worker is handed the prefill batch it can start, which is one chunk of uncached tokens,
    and one request more, so that its next step need not wait for the router.
    """

    name = "late"
    beta = 1.0
    charges_recomputing = True

    def __init__(self, config: PolicyConfig) -> None:
        self._config: LateConfig = config.late
        self.counts_in_flight = config.late.in_flight
        self._base_lam = config.lam
        self._backlog = 0.0
        self._observed_s: float | None = None

    @property
    def window(self) -> int | None:
        return self._config.window

    @property
    def lam(self) -> float:
        # A fixed λ fails across loads, an uncapped one can lock up.
        return min(self._config.lam_cap, self._base_lam + self._config.lam_gain * self._backlog)

    def candidates(self, membership: Membership) -> Candidates:
        return membership.candidates

    def urgency(self, arrived_s: float, gpu_s: Callable[[], float]) -> float:
        # g − ageing·(now − arrived) without the now, which is the same for everyone.
        return gpu_s() + self._config.ageing * arrived_s

    def may_bind(self, pool: PoolJoined, load: tuple[int, int]) -> bool:
        return load[1] < pool.chunk_tokens

    def observe(self, queued: int, ranks: int, now: float) -> None:
        # Without a queue then and now the average stays 0.
        if self._observed_s is not None and ranks and (queued or self._backlog):
            weight = -math.expm1(-(now - self._observed_s) / self._config.backlog_tau_s)
            self._backlog += weight * (queued / ranks - self._backlog)
        self._observed_s = now


class FluidPolicy(LatePolicy):
    """Late binding to any block of the lattice: the pools follow the requests.

    J = wait + switch + s + λ·(C·s + idle − C_min·Ê_Cmin): who wants another block pays for what its
    ranks stand still, to wait for each other, to switch, and to switch back some time.
    """

    name = "fluid"

    def __init__(self, config: PolicyConfig) -> None:
        late = replace(config.late, ageing=config.fluid.ageing)
        super().__init__(replace(config, lam=config.fluid.lam, late=late))
        self._lam_busy = config.fluid.lam_busy
        self._busy = 0.0

    @property
    def lam(self) -> float:
        # Any request may take many ranks at any moment. That costs the others nothing while ranks
        # are idle, and delays them all when none is.
        idle_lam = self._base_lam + self._lam_busy * self._busy * self._busy
        return min(self._config.lam_cap, idle_lam + self._config.lam_gain * self._backlog)

    def look(self, busy: float) -> None:
        """Of the ranks that serve now, ``busy`` (0 to 1) have prefills to do."""
        self._busy = busy

    def candidates(self, membership: Membership) -> Candidates:
        return membership.lattice


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that ``config`` names."""
    known: tuple[type[PaperPolicy] | type[LatePolicy], ...] = (PaperPolicy, LatePolicy, FluidPolicy)
    (policy,) = (one for one in known if one.name == config.policy)
    return policy(config)
