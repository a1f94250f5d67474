"""Small clusters and short workloads that tests simulate, with everything that was said kept."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import Effect
from vertumnus_router.core.events import Event, ReconfigureRequested
from vertumnus_router.core.profile import Coefficients, Profile
from vertumnus_router.core.types import BlockHash, PlanId, PoolId, Rank
from vertumnus_router.lattice import parse_composition
from vertumnus_sim.policies import policy_config
from vertumnus_sim.scenario import Cluster, Death, Delays, Hardware, lay_out
from vertumnus_sim.simulation import Outcome, Simulation
from vertumnus_sim.workloads.traces import TraceRequest

BLOCK_TOKENS = 100
DEGREES = (1, 2, 4)
Said = TypeVar("Said")

#: One GPU computes 10,000 tokens a second; a step costs 10 ms, at a larger degree more. All terms
#: of the formula are there.
PROFILE = Profile(
    version=1,
    device="paper and pencil",
    model="none",
    sglang_version="none",
    date="2026-01-01",
    measured=False,
    note="numbers that can be computed by hand",
    degrees={
        1: Coefficients(d_s=0.01, a_s_per_token=1e-5),
        2: Coefficients(d_s=0.02, a_s_per_token=2e-5),
        4: Coefficients(d_s=0.03, a_s_per_token=2e-5),
    },
    b_s_per_token=1e-6,
    c_s_per_token=9e-5,
    alpha_s_per_pair=1e-9,
)

#: Some noise, 100 blocks (10,000 tokens) a rank, and links that carry 10,000 tokens a second.
HARDWARE = Hardware(
    kv_blocks=100,
    kv_token_bytes=1_000,
    chunk_tokens=1_000,
    noise=0.1,
    local_bytes_per_s=1e8,
    remote_bytes_per_s=1e7,
)


@dataclass(frozen=True, slots=True)
class Ask:
    """At ``at_s``, that the pool ``node`` be composed as ``composition``."""

    at_s: float
    node: int
    composition: str


@dataclass(slots=True)
class Played:
    """A run that is over: what came of it, who took part, and all ``(event, now, effects)``."""

    outcome: Outcome
    router: ControlPlane
    simulation: Simulation
    log: list[tuple[Event, float, list[Effect]]]

    def events(self, kind: type[Said]) -> list[Said]:
        return [event for event, _, _ in self.log if isinstance(event, kind)]

    def effects(self, kind: type[Said]) -> list[Said]:
        return [one for _, _, effects in self.log for one in effects if isinstance(one, kind)]

    @property
    def refused(self) -> int:
        return sum(self.outcome.refused.values())


def cluster(
    composition: str = "4x1",
    *,
    gpus: int = 4,
    node_gpus: int = 4,
    hardware: Hardware = HARDWARE,
    delays: Delays | None = None,
    deaths: Iterable[Death] = (),
) -> Cluster:
    return Cluster(
        node_gpus=node_gpus,
        degrees=DEGREES,
        compositions=lay_out(composition, gpus, node_gpus, DEGREES),
        hardware=hardware,
        delays=delays or Delays(),
        deaths=tuple(deaths),
    )


def play(
    requests: list[TraceRequest],
    where: Cluster | None = None,
    *,
    policy: str = "late",
    settings: Mapping[str, str] | None = None,
    profile: Profile = PROFILE,
    seed: int = 0,
    asks: Iterable[Ask] = (),
    warm_up: int = 0,
    logged: bool = True,
) -> Played:
    """Run to the end. ``asks`` are what an operator wants meanwhile."""
    where = where or cluster()
    router = ControlPlane(policy_config(policy, settings or {}, where.hardware, seed), profile)
    log: list[tuple[Event, float, list[Effect]]] = []
    simulation = Simulation(
        where,
        profile,
        router,
        requests,
        seed,
        warm_up=warm_up,
        log=(lambda event, now, effects: log.append((event, now, effects))) if logged else None,
    )
    for number, ask in enumerate(asks):
        blocks = parse_composition(ask.composition, where.node_gpus, DEGREES)
        event = ReconfigureRequested(PlanId(f"ask-{number}"), PoolId(f"node-{ask.node}"), blocks)
        simulation._timeline.at(ask.at_s, simulation._tell, event)
    return Played(simulation.run(), router, simulation, log)


def conversations(
    count: int,
    rate_per_s: float,
    seed: int = 0,
    *,
    turns: int = 5,
    first_blocks: int = 8,
    turn_blocks: int = 4,
    systems: int = 2,
    after: list[TraceRequest] | None = None,
) -> list[TraceRequest]:
    """``count`` requests at random times, behind ``after``, with which they share nothing.

    Each goes on with one of ``count / turns`` conversations, with all of it so far; they begin
    with one of ``systems`` prompts. Every prompt ends in the middle of a block.
    """
    source = Random(f"conversations {seed}")
    before = after or []
    fresh = 1 + max((block for request in before for block in request.blocks), default=-1)

    def grown(chain: tuple[int, ...], most: int) -> tuple[int, ...]:
        nonlocal fresh
        length = source.randint(1, most)
        fresh += length
        return chain + tuple(range(fresh - length, fresh))

    prompts = [grown((), first_blocks) for _ in range(systems)]
    chains = [prompts[n % systems] for n in range(max(1, count // turns))]
    found = list(before)
    at_s = before[-1].arrival_s if before else 0.0
    for _ in range(count):
        at_s += source.expovariate(rate_per_s)
        which = source.randrange(len(chains))
        chains[which] = grown(chains[which], turn_blocks)
        tokens = len(chains[which]) * BLOCK_TOKENS + source.randint(1, BLOCK_TOKENS - 1)
        found.append(TraceRequest(at_s, tokens, 1, chains[which], BLOCK_TOKENS))
    return found


def strangers(times_s: Iterable[float], tokens: int) -> list[TraceRequest]:
    """Prompts of one length that share nothing."""
    blocks = tokens // BLOCK_TOKENS
    return [
        TraceRequest(at_s, tokens, 1, tuple(range(n * blocks, (n + 1) * blocks)), BLOCK_TOKENS)
        for n, at_s in enumerate(times_s)
    ]


def faults(played: Played, count: int) -> list[str]:
    """What a run of ``count`` requests has lost or left behind; empty when nothing."""
    found = [*played.router.violations()]
    outcome, router, simulation = played.outcome, played.router, played.simulation
    served = len(outcome.ttft_s)
    if served + played.refused != count:
        found.append(f"{served} served, {played.refused} refused, of {count}")
    if sum(outcome.requests_by_degree.values()) != served:
        found.append(f"{served} served, by degree {outcome.requests_by_degree}")
    if not len(outcome.input_tokens) == len(outcome.cached_tokens) == served:
        found.append("columns of different lengths")
    if simulation._live or simulation._left:
        found.append(f"{len(simulation._live)} live, {simulation._left} left")
    if any(simulation._waiting.values()):
        found.append("requests that wait for a copy")
    if router.pending_count or len(router._ledger):
        found.append(f"{router.pending_count} pending, {len(router._ledger)} reserved")
    return found + left_in_pools(simulation) + index_faults(router, simulation)


def left_in_pools(simulation: Simulation) -> list[str]:
    """Jobs, pins, reservations and flows of living ranks."""
    found = []
    for pool in simulation._pools.values():
        for rank, worker in pool._workers.items():
            if rank in pool._dead or rank not in pool.caches:
                continue
            cache, name = pool.caches[rank], Rank(pool.id, rank)
            if worker.queue or worker.step or worker.draining:
                found.append(f"{name}: {len(worker.queue)} jobs, draining {worker.draining}")
            if cache.pinned or cache.reserved:
                found.append(f"{name}: {cache.pinned} pinned, {cache.reserved} reserved")
            if len(cache) > cache.capacity:
                found.append(f"{name}: {len(cache)} blocks of {cache.capacity}")
        if pool._handing_over or pool._moving:
            found.append(f"{pool.id}: {len(pool._handing_over)} on their way, {pool._moving}")
        for links in pool.links.values():
            for link in (links.local_in, links.local_out, links.remote_in, links.remote_out):
                if link.flows:
                    found.append(f"{pool.id}: {len(link.flows)} flows")
    return found


def index_faults(router: ControlPlane, simulation: Simulation) -> list[str]:
    """Where the router's index and the caches differ. What is left of the dead does not count."""
    found = []
    chains = Counter[BlockHash]()
    for request in simulation._requests:
        chains.update(map(BlockHash, request.blocks))
    for pool in simulation._pools.values():
        for rank, cache in pool.caches.items():
            slot = router._membership.slot(Rank(pool.id, rank))
            assert slot is not None
            known = {
                block
                for block in chains
                if (node := router._index.find(block)) is not None and node.holders >> slot & 1
            }
            held = set() if rank in pool._dead else {block for block in chains if block in cache}
            if known != held:
                found.append(
                    f"{pool.id}/{rank}: {len(held - known)} cached that the index lacks, "
                    f"{len(known - held)} gone that it has"
                )
            if rank not in pool._dead and len(held) != len(cache):
                found.append(f"{pool.id}/{rank}: {len(cache) - len(held)} blocks of no request")
    return found
