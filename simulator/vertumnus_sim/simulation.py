"""One run: a router's own policy objects over simulated pools, and what came of each request."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vertumnus_router.core.effects import (
    Abort,
    Copy,
    Dispatch,
    Effect,
    PlanEnded,
    Reclaim,
    Regroup,
    Reject,
    TransferRefused,
)
from vertumnus_router.core.events import (
    CopyEnded,
    DecodeJoined,
    Event,
    MoveOutcome,
    RequestArrived,
    Tick,
)
from vertumnus_router.core.profile import Profile
from vertumnus_router.core.types import BlockHash, DecodeId, PoolId, Request, RequestId, TransferId
from vertumnus_router.core.verdict import Verdict

from vertumnus_sim.jobs import Job
from vertumnus_sim.network import Network
from vertumnus_sim.pool import Pool
from vertumnus_sim.scenario import Cluster
from vertumnus_sim.timeline import Timeline
from vertumnus_sim.workloads.traces import TraceRequest

#: Of each ``(event, now, effects)``.
Log = Callable[[Event, float, list[Effect]], None]


#: No timer of a router is longer.
STUCK_S = 600.0


class Router(Protocol):
    """What decides: ``ControlPlane``, or a baseline."""

    @property
    def scanning(self) -> bool:
        """Whether it wants its timer often."""

    def on_event(self, event: Event, now: float) -> list[Effect]:
        """Take in what happened; what is to be done about it."""


@dataclass(slots=True)
class Outcome:
    """What came of the requests that were counted, in the order of their first tokens, and of the
    cluster. Times in seconds, ``gpu_s`` GPU-seconds of steps; ``refused`` by the error
    code that a client would get."""

    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    input_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    requests_by_degree: dict[int, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    gpu_s: float = 0.0
    ended_s: float = 0.0
    moves: int = 0
    copies: int = 0
    copied_blocks: int = 0
    pulls: int = 0
    reclaims: int = 0
    extrapolated: int = 0


class Simulation:
    """Runs a workload once. The same arguments give the same outcome, bit by bit."""

    def __init__(
        self,
        cluster: Cluster,
        profile: Profile,
        router: Router,
        requests: Sequence[TraceRequest],
        seed: int,
        *,
        warm_up: int = 0,
        log: Log | None = None,
    ) -> None:
        """``profile`` is what steps really take; the router has its own. The first ``warm_up``
        requests are served and not counted. ``log`` is shown all that the router is told and
        wants. Raises ``ValueError`` for a workload that the cluster cannot take."""
        if not requests:
            raise ValueError("no requests to simulate")
        sizes = {request.block_tokens for request in requests}
        if len(sizes) > 1:
            raise ValueError(f"blocks of {sorted(sizes)} tokens cannot be mixed in one cluster")
        (self._block_tokens,) = sizes
        self._router, self._requests, self._log = router, requests, log
        self._profile, self._warm_up = profile, warm_up
        self._timeline = Timeline()
        network = Network(self._timeline)
        self._delays = cluster.delays
        self._pools: dict[PoolId, Pool] = {}
        for number in range(len(cluster.compositions)):
            pool = Pool(
                number,
                cluster,
                self._block_tokens,
                profile,
                seed,
                self._timeline,
                network,
                self._report,
                self,
            )
            self._pools[pool.id] = pool
        self._deaths = cluster.deaths
        self._live: dict[RequestId, tuple[int, Request, float]] = {}
        self._waiting: dict[TransferId, list[Dispatch]] = {}
        self._left = len(requests)
        self._alive_s = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """To the end of the last request. Raises ``RuntimeError`` if one is never answered."""
        self._tell(DecodeJoined(DecodeId("decode"), "1", 10**9))
        for pool in self._pools.values():
            self._tell(pool.describe())
            pool.report()
        for death in self._deaths:
            pool = self._pools[PoolId(f"node-{death.node}")]
            self._timeline.at(death.at_s, pool.kill, death.rank)
        first_s = self._requests[0].arrival_s
        # Once the ranks have reported.
        self._start_s = 1.0 - first_s
        self._timeline.at(1.0, self._arrive, 0)
        self._timeline.after(self._delays.tick_s, self._tick)
        self._timeline.run()
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests were never answered: {self._stuck()}")
        return self.outcome

    # -- what the router is told ------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        now = self._timeline.now
        effects = self._router.on_event(event, now)
        if self._log is not None:
            self._log(event, now, effects)
        for effect in effects:
            self._carry_out(effect)
        if isinstance(event, CopyEnded):
            self._copied(event)

    def _report(self, event: Event) -> None:
        """From a rank."""
        self._timeline.after(self._delays.report_s, self._tell, event)

    def _arrive(self, number: int) -> None:
        of = self._requests[number]
        whole = of.input_tokens // of.block_tokens
        blocks = tuple(map(BlockHash, of.blocks[:whole]))
        # One token: the pool prefills.
        request = Request(RequestId(str(number)), of.input_tokens, 1, blocks)
        self._live[request.id] = number, request, self._timeline.now
        if number + 1 < len(self._requests):
            at_s = self._start_s + self._requests[number + 1].arrival_s
            self._timeline.at(max(at_s, self._timeline.now), self._arrive, number + 1)
        self._tell(RequestArrived(request))

    def _tick(self) -> None:
        if not self._left:
            return
        if len(self._timeline):
            self._alive_s = self._timeline.now
        elif self._timeline.now - self._alive_s > STUCK_S:
            return  # nothing will ever come of it but ticks
        self._tell(Tick())
        delays = self._delays
        delay_s = delays.scan_tick_s if self._router.scanning else delays.tick_s
        self._timeline.after(delay_s, self._tick)

    # -- what it wants ----------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dispatch(pull=None):
                self._forward(effect)
            case Dispatch(pull=Copy() as pull):
                self._pull(effect, pull)
            case Copy():
                self.outcome.copies += 1
                self._copy(effect)
            case Reclaim(holder=holder):
                self.outcome.reclaims += 1
                pool = self._pools[holder.rank.pool]
                self._timeline.after(self._delays.dispatch_s, pool.reclaim, effect)
            case Regroup(pool=name):
                pool = self._pools[name]
                self._timeline.after(self._delays.dispatch_s, pool.regroup, effect)
            case Reject(request_id=request_id):
                del self._live[request_id]
                self._left -= 1
                refused = self.outcome.refused
                refused[effect.code] = refused.get(effect.code, 0) + 1
            case PlanEnded():
                committed = (one.outcome is MoveOutcome.COMMITTED for one in effect.ended)
                self.outcome.moves += sum(committed)
            case Abort() | Verdict() | TransferRefused():
                pass  # the end of an attempt follows by itself, the others are for operators

    def _forward(self, order: Dispatch) -> None:
        live = self._live.get(order.request_id)
        if live is not None:  # else it was given up while it waited for its copy
            pool = self._pools[order.pool]
            self._timeline.after(self._delays.dispatch_s, pool.submit, order, live[1])

    def _pull(self, order: Dispatch, pull: Copy) -> None:
        """The request follows the copy, whatever comes of it."""
        waiting = self._waiting.get(pull.transfer)
        if waiting is None:
            self._waiting[pull.transfer] = [order]
            self.outcome.pulls += 1
            self._copy(pull)
        else:
            waiting.append(order)

    def _copy(self, copy: Copy) -> None:
        self._waiting.setdefault(copy.transfer, [])
        pool = self._pools[copy.destination.rank.pool]
        source = self._pools[copy.source.rank.pool]
        self._timeline.after(self._delays.dispatch_s, pool.copy, copy, source)

    def _copied(self, event: CopyEnded) -> None:
        self.outcome.copied_blocks += event.blocks
        for order in self._waiting.pop(event.transfer, ()):
            self._forward(order)

    # -- what comes of it -------------------------------------------------------------------------

    def stepped(self, degree: int, seconds: float) -> None:
        self.outcome.gpu_s += degree * seconds

    def first_token(self, job: Job, degree: int) -> None:
        number, request, arrived_s = self._live.pop(job.request.id)
        self._left -= 1
        outcome = self.outcome
        outcome.ended_s = self._timeline.now
        if number < self._warm_up:
            return
        assert job.cached is not None
        outcome.ttft_s.append(self._timeline.now - arrived_s)
        outcome.input_tokens.append(request.input_tokens)
        outcome.cached_tokens.append(job.cached)
        by_degree = outcome.requests_by_degree
        by_degree[degree] = by_degree.get(degree, 0) + 1
        uncached = request.input_tokens - job.cached
        if self._profile.extrapolates(degree, uncached, job.cached):
            outcome.extrapolated += 1

    def _stuck(self) -> str:
        return ", ".join(list(self._live)[:5])
