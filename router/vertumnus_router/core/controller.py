"""The cluster controller (section 6): when a pool splits or merges, and which blocks.

Each window of H seconds gives one ``Verdict``. Demand above the upper threshold of capacity for
some windows wants a split, below the lower one a merge; in between the fraction of long requests
decides. Prefills share a degree less than perfectly, so two C workers have more capacity than one
2C worker, which in turn serves one request sooner.

What keeps it from flapping:

- Demand is counted in seconds at one reference degree, so no move changes it.
- A merge must leave room for the demand *and its noise*: the prediction interval of one more
  window has to stay below the upper threshold of the merged composition. Without that, a load that
  chance alone lifts over the threshold would be split again. A split for overload is never held
  back, so every cycle has to pass this gate.
- The long fraction is compared with the one that the composition was chosen at, not with the
  window before, and only a difference that chance does not explain counts.
- A change of the composition, by whomever, voids the evidence and starts a cool-down: the window
  in which it happened mixes two compositions.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from vertumnus_router.core.config import ControllerConfig
from vertumnus_router.core.demand import Demand, ServiceTime, Window
from vertumnus_router.core.evidence import Evidence, Forecast, LongShare
from vertumnus_router.core.types import PoolId
from vertumnus_router.core.verdict import Action, Candidate, MoveOption, PoolView, Reason, Verdict
from vertumnus_router.lattice import Block

_Composition = dict[PoolId, tuple[Block, ...]]

_ACTIONS = {
    Reason.OVERLOAD: Action.SPLIT,
    Reason.UNDERLOAD: Action.MERGE,
    Reason.LONG_RISE: Action.MERGE,
    Reason.LONG_FALL: Action.SPLIT,
}


class Controller:
    """Pure: told of arrivals and of the time, it answers with verdicts and carries out nothing.

    ``service_s`` is Ê_C(R, P); ``limits`` are measured κ by degree, see ``Profile.kappa``.
    """

    def __init__(
        self, config: ControllerConfig, service_s: ServiceTime, limits: Mapping[int, float]
    ) -> None:
        self.config = config
        self._service_s = service_s
        self._limits = limits
        self._window: Window | None = None
        self._index = 0
        self._resumes_at = 0  # the first window that counts again
        self._kappa: dict[int, float] = {}
        self._composition: _Composition | None = None
        self._expected: _Composition | None = None  # where our own last move leads
        self._evidence = Evidence(config)
        self._long_before: LongShare | None = None
        self._last_action: Action | None = None
        self._decisions: deque[Verdict] = deque(maxlen=config.remember)
        self._counts: Counter[tuple[Action, Reason]] = Counter()

    def arrived(
        self,
        ladder: tuple[int, ...],
        input_tokens: int,
        uncached_tokens: int,
        cached_tokens: int,
        now: float,
    ) -> None:
        """Count an arrival. ``ladder``: the degrees that the pools offer and the profile prices,
        ascending; the first is the reference. Another ladder than before starts over."""
        window = self._open(now)
        if window.ladder != ladder:
            if window.ladder:
                self._evidence, self._long_before = Evidence(self.config), None
                window = self._window = Window(now)
            window.ladder = ladder
        is_long = input_tokens > self.config.long_tokens
        window.add(self._service_s, uncached_tokens, cached_tokens, is_long=is_long)

    def tick(self, now: float, look: Callable[[], Sequence[PoolView]]) -> Verdict | None:
        """The verdict on the window, once it is over; ``look`` is called only then."""
        window = self._open(now)
        if now - window.start_s < self.config.window_s:
            return None
        self._window = Window(now, window.ladder)
        self._index += 1
        verdict = self._judge(window, look(), now)
        self._decisions.append(verdict)
        self._counts[verdict.action, verdict.reason] += 1
        return verdict

    @property
    def decisions(self) -> tuple[Verdict, ...]:
        """The last verdicts, oldest first."""
        return tuple(self._decisions)

    @property
    def counts(self) -> Mapping[tuple[Action, Reason], int]:
        """How many verdicts there were of each kind."""
        return self._counts

    def _open(self, now: float) -> Window:
        if self._window is None:
            self._window = Window(now)
        return self._window

    # -- one window --------------------------------------------------------------------------------

    def _judge(self, window: Window, pools: Sequence[PoolView], now: float) -> Verdict:
        config, evidence = self.config, self._evidence
        demand = window.demand(config.window_s, now)
        # An idle window says nothing about the mix: the last one known stands.
        self._kappa = window.kappa(self._limits, config.rho, config.window_s) or self._kappa
        capacity_s = self._capacity_s(pools)
        reason, detail = self._reason(demand, capacity_s, pools)
        wanted = _ACTIONS.get(reason, Action.KEEP)
        forecast = evidence.forecast()
        before, recent = self._long_before, evidence.long_now()
        above, below, patience = evidence.above, evidence.below, evidence.patience
        candidates: tuple[Candidate, ...] = ()
        chosen: MoveOption | None = None
        if wanted is not Action.KEEP and capacity_s is not None:
            candidates = self._candidates(reason, pools, capacity_s, forecast)
            eligible = (one.option for one in candidates if one.excluded is None)
            chosen = min(eligible, key=lambda option: option.preference, default=None)
            if chosen is None:
                reason, detail = Reason.NO_MOVE, f"{detail}; {_why_none(wanted, candidates)}"
            else:
                self._chose(chosen, pools)
        return Verdict(
            window=self._index,
            at_s=now,
            mode=config.mode,
            action=Action.KEEP if chosen is None else wanted,
            wanted=wanted,
            reason=reason,
            detail=detail,
            requests=demand.requests,
            reference_degree=window.ladder[0] if window.ladder else None,
            demand_s=demand.seconds,
            capacity_s=capacity_s,
            utilisation=_ratio(demand.seconds, capacity_s),
            mean=_ratio(forecast.mean, capacity_s),
            peak=_ratio(forecast.peak, capacity_s),
            kappa_s=tuple(sorted(self._kappa.items())),
            lower=config.lower,
            upper=config.upper,
            persistence=config.persistence,
            patience=patience,
            windows_above=above,
            windows_below=below,
            long_before=None if before is None else before.fraction,
            long_now=None if recent is None else recent.fraction,
            candidates=candidates,
            chosen=chosen,
        )

    def _reason(
        self, demand: Demand, capacity_s: float | None, pools: Sequence[PoolView]
    ) -> tuple[Reason, str]:
        """What the window and those before it call for, and in words why."""
        unsettled = [f"pool {pool.pool}: {pool.unsettled}" for pool in pools if pool.unsettled]
        if unsettled:
            self._rest(1)
            return Reason.UNSETTLED, "; ".join(unsettled)
        if self._changed(pools):
            self._rest(self.config.cooldown)
            self._long_before = None
            return Reason.CHANGED, "the composition was changed in this window"
        if self._index < self._resumes_at:
            return Reason.COOL_DOWN, "too soon after the last change of the composition"
        if not demand.requests:
            # To merge in a pause of the clients would meet their return with a composition that
            # nothing they did has called for.
            self._evidence.add_idle()
            return Reason.IDLE, "nothing arrived, which is no evidence: the composition stays"
        if capacity_s is None:
            self._evidence.forget()
            return Reason.NO_WORKER, "no block serves that the profile can price"
        return self._weigh(demand, demand.seconds / capacity_s)

    def _changed(self, pools: Sequence[PoolView]) -> bool:
        """Whether somebody else changed the composition since the last window."""
        seen = {pool.pool: pool.blocks for pool in pools}
        known = self._composition is None or seen in (self._composition, self._expected)
        self._composition, self._expected = seen, None
        return not known

    def _weigh(self, demand: Demand, utilisation: float) -> tuple[Reason, str]:
        """Capacity first, then the long requests."""
        config, evidence = self.config, self._evidence
        evidence.add(demand, utilisation)
        where = f"demand is {utilisation:.0%} of capacity"
        if evidence.above:
            found, windows, needed = Reason.OVERLOAD, evidence.above, config.persistence
            where += f", above {config.upper:.0%}"
        elif evidence.below:
            found, windows, needed = Reason.UNDERLOAD, evidence.below, evidence.patience
            where += f", below {config.lower:.0%}"
        else:
            return self._weigh_long(f"{where}, inside the band")
        where += f" for {windows} window(s), {needed} are needed"
        return (found if windows >= needed else Reason.NOT_YET), where

    def _weigh_long(self, where: str) -> tuple[Reason, str]:
        """Whether the fraction of long requests has changed since the composition was chosen."""
        config = self.config
        now = self._evidence.long_now()
        if now is None:
            return Reason.IN_BAND, where
        before = self._long_before = self._long_before or now
        was = before.fraction
        where += f"; {now.fraction:.1%} of requests are long, {was:.1%} were"
        least = max(config.long_change * was, config.long_floor)
        chance = config.sigmas * before.deviation(now)
        for reason, sign in ((Reason.LONG_RISE, 1), (Reason.LONG_FALL, -1)):
            changes = [sign * (fraction - was) for fraction in self._evidence.long_each()]
            if min(changes) >= least and sign * (now.fraction - was) > chance:
                return reason, where
        return Reason.IN_BAND, where

    # -- the moves ---------------------------------------------------------------------------------

    def _candidates(
        self, reason: Reason, pools: Sequence[PoolView], capacity_s: float, forecast: Forecast
    ) -> tuple[Candidate, ...]:
        """Every move in the wanted direction, the most preferred first."""
        found = []
        for option in (option for pool in pools for option in pool.options):
            if option.action is not _ACTIONS[reason]:
                continue
            after_s = self._capacity_after_s(option, capacity_s)
            found.append(
                Candidate(
                    option,
                    after_s,
                    _ratio(forecast.mean, after_s),
                    _ratio(forecast.peak, after_s),
                    self._excluded(reason, capacity_s, after_s, forecast),
                )
            )
        return tuple(sorted(found, key=lambda one: one.option.preference))

    def _excluded(
        self, reason: Reason, before_s: float, after_s: float | None, forecast: Forecast
    ) -> str | None:
        """Why a move to the capacity ``after_s`` is not eligible, or None."""
        config = self.config
        if after_s is None:
            return "its degrees have no price"
        if _ACTIONS[reason] is Action.MERGE:
            most = config.upper - config.margin
            if forecast.peak <= most * after_s:
                return None
            return f"demand may reach {forecast.peak / after_s:.0%} of what remains, not {most:.0%}"
        if after_s <= before_s:
            return "it adds no capacity for these requests"
        least = config.lower + config.margin
        if reason is Reason.LONG_FALL and forecast.mean < least * after_s:
            return f"demand would be {forecast.mean / after_s:.0%} of capacity, below {least:.0%}"
        return None

    def _chose(self, option: MoveOption, pools: Sequence[PoolView]) -> None:
        """Begin the cool-down, and expect the composition that the move leads to."""
        if self._last_action not in (None, option.action):
            self._evidence.reversed()
        self._last_action = option.action
        self._evidence.moved()
        self._long_before = self._evidence.long_now()
        self._rest(self.config.cooldown)
        if self.config.mode == "on":
            self._expected = {pool.pool: pool.blocks for pool in pools}
            self._expected[option.pool] = option.move.after

    def _rest(self, windows: int) -> None:
        self._resumes_at = max(self._resumes_at, self._index + windows + 1)
        self._evidence.forget()

    def _capacity_s(self, pools: Sequence[PoolView]) -> float | None:
        """Σ κ of the serving blocks; None if none of them can be priced."""
        known = [self._kappa.get(block.degree) for pool in pools for block in pool.serving]
        priced = [kappa for kappa in known if kappa is not None]
        return sum(priced) if priced else None

    def _capacity_after_s(self, option: MoveOption, capacity_s: float) -> float | None:
        gone, come = option.move.leaving, option.move.arriving
        if not {block.degree for block in gone + come} <= self._kappa.keys():
            return None
        lost_s = sum(self._kappa[block.degree] for block in gone)
        return capacity_s - lost_s + sum(self._kappa[block.degree] for block in come)


def _ratio(seconds: float, capacity_s: float | None) -> float | None:
    return None if not capacity_s else seconds / capacity_s


def _why_none(wanted: Action, candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return f"no pool can {wanted.value} any further"
    return f"no {wanted.value} is eligible: {candidates[0].excluded}"
