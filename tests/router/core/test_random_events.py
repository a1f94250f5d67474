"""Whatever happens in whatever order: every request ends once and leaves nothing behind.

Pools regroup all the time, rank by rank; requests stay with their home through it. Prefixes are
copied, pulled and deleted meanwhile, or said to have been.

A twin is fed the same events but is never asked anything. Equal effects prove that the control
plane is deterministic and that asking changes nothing.
"""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vertumnus_router.core.config import BreakerConfig, PolicyConfig, PrefixConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import (
    Abort,
    BreakerChanged,
    Copy,
    Dispatch,
    Effect,
    Life,
    Reclaim,
    Reject,
    TransferRefused,
)
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    CopyEnded,
    DecodeJoined,
    DecodeLost,
    Event,
    Failure,
    HandedOver,
    IndexReset,
    Leg,
    PoolLost,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    ReclaimEnded,
    ReclaimRequested,
    ReplicateRequested,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
    TransferOutcome,
)
from vertumnus_router.core.trie import NODE_BYTES
from vertumnus_router.core.types import (
    DecodeId,
    PoolId,
    Rank,
    Request,
    RequestId,
    TransferId,
    WorkerId,
    worker_id,
)
from vertumnus_router.core.verdict import Verdict
from vertumnus_router.lattice import Block, lattice, parse_composition

from tests.router.core.scene import chain, joined, reported, request, with_overhead

POOLS = {"p": "2x1,1x2", "q": "1x4"}  # as launched
RANKS = [(pool, rank) for pool in POOLS for rank in range(4)]
WORKERS = [WorkerId(f"{p}/{b.first}x{b.degree}") for p in POOLS for b in lattice(4, (1, 2, 4))]
COMPOSITIONS = ["4x1", "2x1,1x2", "1x2,2x1", "2x2", "1x4"]

At = tuple[str, int]  # a rank


def assigned(machine: "Events") -> bool:
    return any(worker is not None for worker in machine.live.values())


def overlap(one: Block, other: Block) -> bool:
    return one.first in other or other.first in one


class Events(RuleBasedStateMachine):
    policy = "paper"
    prefill_only = False

    def __init__(self) -> None:
        super().__init__()
        config: dict[str, Any] = {
            "queue_limit": 4,
            "queue_timeout_s": 5.0,
            "breaker": BreakerConfig(failure_threshold=2, success_threshold=1, open_s=1.0),
            "index_mib": 40.5 * NODE_BYTES / 2**20,
            "prefix": PrefixConfig(
                mode="on",
                pull=self.policy == "late",
                scan_s=1.0,
                slice_blocks=30,
                theta_inter_s=0.02,
                theta_intra=0.45,
                theta_reclaim=0.4,
                latency_s=0.1,
                timeout_s=8.0,
                retry_s=2.0,
            ),
        }
        self.control, self.twin = (
            ControlPlane(PolicyConfig(self.policy, **config), with_overhead(0.1)) for _ in range(2)
        )
        self.now = 0.0
        self.names = 0
        self.life = 0
        self.joined: set[str] = set()
        self.epochs = dict.fromkeys(POOLS, 1)
        self.target = {p: parse_composition(text, 4, (1, 2, 4)) for p, text in POOLS.items()}
        self.claims: dict[At, tuple[int, Block]] = {}  # what each rank said last
        self.lives: dict[At, int] = {}  # ranks that are up
        self.dead: list[tuple[str, int, int]] = []
        self.served: dict[WorkerId, list[int]] = {}  # the workers and the lives of their ranks
        self.live: dict[RequestId, WorkerId | None] = {}  # and the attempt of each one
        self.home: dict[RequestId, At] = {}
        self.place: dict[RequestId, tuple[Block, list[int]]] = {}  # where it was last served
        self.tried: dict[RequestId, list[WorkerId]] = {}
        self.barred: dict[RequestId, set[str]] = {}  # workers and pools where it has failed
        self.aborted: dict[RequestId, Leg] = {}  # by the loss of a worker or decode server
        self.handed_over: set[RequestId] = set()
        self.prompts: dict[RequestId, int] = {}
        self.decodes: dict[DecodeId, tuple[int, int]] = {}  # those that are up: limit and life
        self.doubted: set[DecodeId] = set()
        self.at_decode: dict[RequestId, DecodeId] = {}  # where it has rooms
        self.room_numbers: set[int] = set()
        self.losing: DecodeId | None = None
        self.ended: set[RequestId] = set()
        self.transfers: dict[TransferId, Copy | Reclaim] = {}  # ordered, and nothing heard of yet

    # -- carrying out what the control plane wants ----------------------------------------------

    def feed(self, event: Event) -> list[Effect]:
        effects = self.control.on_event(event, self.now)
        assert self.twin.on_event(event, self.now) == effects
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.carry_out_dispatch(effect)
            elif isinstance(effect, Reject):
                self.end(effect.request_id)
                assert 400 <= effect.status < 600 and effect.code and effect.message
            elif isinstance(effect, Abort) and not isinstance(event, RequestCancelled):
                self.carry_out_abort(effect)
            elif isinstance(effect, Copy | Reclaim):
                self.carry_out_transfer(effect)
        for request_id in self.running():
            if request_id not in self.handed_over:
                assert not self.is_lost(request_id), "its home is lost and it was not aborted"
        return effects

    def carry_out_dispatch(self, effect: Dispatch) -> None:
        request_id, worker = effect.request_id, effect.worker
        assert self.live[request_id] is None, "it was somewhere already"
        assert worker in self.served
        assert not self.barred[request_id] & {worker, effect.pool}
        block = self.block_named(worker)
        busy = Counter(
            self.home[other] for other in self.running() if other not in self.handed_over
        )
        at = (effect.pool, effect.home.index)
        assert at == min(((effect.pool, rank) for rank in block.ranks), key=busy.__getitem__)
        self.home[request_id] = at
        self.place[request_id] = block, self.served[worker]
        self.live[request_id] = worker
        self.tried[request_id].append(worker)
        assert effect.attempt == len(self.tried[request_id]) <= 3
        assert (effect.pair is not None) == self.prefill_only
        if effect.pair is not None:
            decode, room = effect.pair.decode, effect.pair.room
            assert decode in self.decodes and decode not in self.doubted
            assert 0 < room < 2**62 and room % 4 == effect.home.index
            assert room not in self.room_numbers
            self.room_numbers.add(room)
            taken, prompts = self.rooms_at(decode), self.prompts[request_id]
            assert not taken or taken + prompts <= self.decodes[decode][0]
            self.at_decode[request_id] = decode
        if effect.pull is not None:
            assert self.policy == "late"
            assert effect.pull.destination.rank.index in block.ranks
        chosen = effect.decision.chosen
        assert (chosen.pull_tokens > 0) == (chosen.pull_s > 0)
        if chosen.pull_tokens:
            assert effect.pull is not None
            self.carry_out_transfer(effect.pull)
        elif effect.pull is not None:
            assert self.transfers[effect.pull.transfer] == effect.pull, "it is in progress"
        assert chosen.worker == worker
        assert chosen.queue_s >= 0 and chosen.service_s > 0
        assert chosen.total <= min(c.total for c in effect.decision.candidates) + 0.001
        named = [c.worker for c in effect.decision.candidates]
        named += [excluded for excluded, _ in effect.decision.excluded]
        assert len(set(named)) == len(named)
        assert set(named) >= set(self.served)

    def carry_out_abort(self, effect: Abort) -> None:
        request_id = effect.request_id
        assert self.live[request_id] == effect.worker
        assert effect.attempt == len(self.tried[request_id])
        assert request_id not in self.aborted
        if effect.leg is Leg.PREFILL:
            assert self.is_lost(request_id) and request_id not in self.handed_over
        else:
            assert self.at_decode[request_id] == self.losing
        self.at_decode.pop(request_id, None)
        self.aborted[request_id] = effect.leg

    def carry_out_transfer(self, effect: Copy | Reclaim) -> None:
        assert effect.transfer not in self.transfers
        assert effect.blocks and len(set(effect.blocks)) == len(effect.blocks)
        if isinstance(effect, Copy):
            assert effect.source.rank != effect.destination.rank
            assert self.is_current(effect.source) and self.is_current(effect.destination)
        else:
            assert 0 <= effect.keep < len(effect.blocks)
            assert self.is_current(effect.holder)
        self.transfers[effect.transfer] = effect

    def is_current(self, life: Life) -> bool:
        return f"{self.lives.get((life.rank.pool, life.rank.index))}" == life.incarnation

    def rooms_at(self, decode: DecodeId) -> int:
        return sum(self.prompts[r] for r, where in self.at_decode.items() if where == decode)

    def end(self, request_id: RequestId) -> None:
        assert request_id not in self.ended
        del self.live[request_id]
        self.at_decode.pop(request_id, None)
        self.handed_over.discard(request_id)
        self.aborted.pop(request_id, None)
        self.ended.add(request_id)

    # -- what the ranks' reports come to --------------------------------------------------------

    def block_named(self, worker: WorkerId) -> Block:
        first, _, degree = worker.partition("/")[2].partition("x")
        return Block(int(first), int(degree))

    def is_down(self, at: At) -> bool:
        return at in self.claims and at not in self.lives

    def is_overtaken(self, pool: str, block: Block, at_least: int) -> bool:
        """Whether a living rank claims, in a later epoch, another block that needs these ranks."""
        claims = [
            self.claims[pool, rank] for p, rank in RANKS if p == pool and (p, rank) in self.lives
        ]
        return any(
            epoch >= at_least and other != block and overlap(block, other)
            for epoch, other in claims
        )

    def ranks_have_news(self) -> None:
        """Work out anew which workers serve, and take the requests along."""
        before, self.served = self.served, {}
        for worker in WORKERS:
            pool, block = worker.partition("/")[0], self.block_named(worker)
            members = [(pool, rank) for rank in block.ranks]
            if not all(at in self.lives and self.claims[at][1] == block for at in members):
                continue
            epochs = {self.claims[at][0] for at in members}
            lives = [self.lives[at] for at in members]
            if self.is_overtaken(pool, block, max(epochs)):
                continue
            if len(epochs) == 1 or before.get(worker) == lives:
                self.served[worker] = lives
        for request_id in self.running():
            pool = (at := self.home[request_id])[0]
            if request_id not in self.handed_over and not self.is_lost(request_id):
                here = self.claims[at][1]
                lives_now = self.served.get(worker_id(PoolId(pool), here))
                if lives_now is not None:
                    self.place[request_id] = here, lives_now

    def running(self) -> list[RequestId]:
        """The requests that have an attempt which is wanted."""
        return [
            r for r, worker in self.live.items() if worker is not None and r not in self.aborted
        ]

    def is_lost(self, request_id: RequestId) -> bool:
        pool, rank = at = self.home[request_id]
        block, lives = self.place[request_id]
        if at not in self.lives or self.lives[at] != lives[rank - block.first]:
            return True
        here = self.claims[at][1]
        if here == block:
            return lives != [self.lives.get((pool, index)) for index in block.ranks]
        followers = [(pool, index) for index in here.ranks]
        newest = max(self.claims[f][0] for f in followers if self.claims.get(f, at)[1] == here)
        return any(map(self.is_down, followers)) and not self.is_overtaken(pool, here, newest + 1)

    # -- pools and ranks ------------------------------------------------------------------------

    @initialize(up=st.booleans())
    def launch(self, up: bool) -> None:
        if up:
            for pool in POOLS:
                self.join(pool)
            for at in RANKS:
                self.rank_is_up(at)

    @rule(pool=st.sampled_from(sorted(POOLS)))
    def join(self, pool: str) -> None:
        self.joined.add(pool)
        context_tokens = 9000 if pool == "p" else 20_000
        self.feed(
            joined(
                pool,
                4,
                context_tokens=context_tokens,
                prefill_only=self.prefill_only,
                kv_token_bytes=1,
            )
        )

    @rule(pool=st.sampled_from(sorted(POOLS)))
    def pool_lost(self, pool: str) -> None:
        self.joined.discard(pool)
        for at in [at for at in self.claims if at[0] == pool]:
            self.lives.pop(at, None)
            del self.claims[at]
        self.dead = [dead for dead in self.dead if dead[0] != pool]  # it is forgotten
        self.ranks_have_news()
        self.feed(PoolLost(PoolId(pool), "front dead"))

    @rule(at=st.sampled_from(RANKS))
    def rank_is_up(self, at: At) -> None:
        if at not in self.lives:
            self.life += 1
        self.report(at, self.claims.get(at, self.ordered(at)), self.lives.get(at, self.life))

    def ordered(self, at: At) -> tuple[int, Block]:
        """The epoch and block that the rank was last told to serve in."""
        pool, rank = at
        return self.epochs[pool], next(block for block in self.target[pool] if rank in block)

    def report(self, at: At, claim: tuple[int, Block], life: int) -> None:
        pool, rank = at
        if pool in self.joined:
            self.lives[at], self.claims[at] = life, claim
            self.ranks_have_news()
        self.feed(reported(rank, claim[1], pool=pool, life=f"{life}", epoch=claim[0]))

    @rule(pool=st.sampled_from(sorted(POOLS)), composition=st.sampled_from(COMPOSITIONS))
    def regroup(self, pool: str, composition: str) -> None:
        """All its ranks are told; each one follows in its own time."""
        self.epochs[pool] += 1
        self.target[pool] = parse_composition(composition, 4, (1, 2, 4))

    @precondition(lambda self: self.behind())
    @rule(data=st.data())
    def rank_follows(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(self.behind()))
        self.report(at, self.ordered(at), self.lives[at])

    def behind(self) -> list[At]:
        return sorted(at for at in self.lives if self.claims[at] != self.ordered(at))

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), named=st.booleans())
    def rank_is_lost(self, data: st.DataObject, named: bool) -> None:
        pool, rank = at = data.draw(st.sampled_from(sorted(self.lives)))
        life = self.lives.pop(at)
        if named:
            self.dead.append((pool, rank, life))
        self.ranks_have_news()
        self.feed(RankLost(Rank(PoolId(pool), rank), "gone", f"{life}" if named else None))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def rank_restarts(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.lives)))
        self.dead.append((*at, self.lives[at]))
        self.life += 1
        self.report(at, self.claims[at], self.life)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def a_dead_life_reports(self, data: st.DataObject) -> None:
        pool, rank, life = data.draw(st.sampled_from(self.dead))
        if pool in self.joined and (pool, rank) in self.lives:
            epoch, block = self.ordered((pool, rank))
            self.feed(reported(rank, block, pool=pool, life=f"{life}", epoch=epoch))

    @rule(
        at=st.sampled_from(RANKS),
        name=st.integers(0, 2),
        length=st.integers(1, 20),
        what=st.sampled_from(["store", "store", "remove", "reset"]),
    )
    def index_event(self, at: At, name: int, length: int, what: str) -> None:
        rank = Rank(PoolId(at[0]), at[1])
        blocks = chain(name, length)
        if what == "store":
            self.feed(BlocksStored(rank, None, blocks))
        elif what == "remove":
            self.feed(BlocksRemoved(rank, blocks[::-1]))
        else:
            self.feed(IndexReset(rank, "a gap"))

    # -- prefixes -------------------------------------------------------------------------------

    @precondition(lambda self: self.lives)
    @rule(
        data=st.data(),
        prompt=st.integers(0, 2),
        length=st.integers(3, 20),
        requests=st.integers(1, 4),
        end=st.booleans(),
    )
    def a_prefix_is_popular(
        self, data: st.DataObject, prompt: int, length: int, requests: int, end: bool
    ) -> None:
        """Some ranks hold it, and requests come for it."""
        ranks = st.lists(st.sampled_from(sorted(self.lives)), min_size=1, max_size=3, unique=True)
        for pool, rank in data.draw(ranks):
            self.feed(BlocksStored(Rank(PoolId(pool), rank), None, chain(prompt, length)))
        for _ in range(requests):
            self.arrive_one(2100, prompt, True, 1)
            request_id = RequestId(f"r{self.names}")
            if end and self.live.get(request_id) is not None:
                self.end(request_id)
                self.feed(RequestFinished(request_id))

    @rule()
    def a_scan_goes_through(self) -> None:
        self.now += 1.0
        self.feed(Tick())
        while self.control.scanning:
            self.now += 0.01
            self.feed(Tick())

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), outcome=st.sampled_from(TransferOutcome), told=st.booleans())
    def transfer_ends(self, data: st.DataObject, outcome: TransferOutcome, told: bool) -> None:
        """However late, and whoever is gone by then; ``told``: the rank's own events come too."""
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        effect = self.transfers.pop(transfer)
        rank = (effect.destination if isinstance(effect, Copy) else effect.holder).rank
        if isinstance(effect, Copy):
            if told:
                self.feed(BlocksStored(rank, None, effect.blocks))
            assert self.feed(CopyEnded(transfer, outcome, 1, 100, 0.2, 0.1)) == []
            assert self.feed(CopyEnded(transfer, outcome, 1, 100, 0.2, 0.1)) == []
        else:
            if told:
                self.feed(BlocksRemoved(rank, effect.blocks[effect.keep :][::-1]))
            assert self.feed(ReclaimEnded(transfer, outcome, 1)) == []
        pending = self.control.prefixes(self.now).transfers
        assert transfer not in {one.transfer for one in pending}

    @rule(
        name=st.integers(0, 2),
        depth=st.integers(0, 19),
        worker=st.sampled_from(WORKERS),
        copies=st.booleans(),
    )
    def operator_asks(self, name: int, depth: int, worker: WorkerId, copies: bool) -> None:
        self.names += 1
        transfer, tip = TransferId(f"by hand {self.names}"), chain(name, 20)[depth]
        asked = ReplicateRequested if copies else ReclaimRequested
        effects = self.feed(asked(transfer, tip, worker))
        first = effects[0]
        assert isinstance(first, TransferRefused | (Copy if copies else Reclaim))
        assert first.transfer == transfer
        if isinstance(first, TransferRefused):
            assert first.reason and len(effects) == 1

    # -- requests -------------------------------------------------------------------------------

    def make_request(
        self, name: str, tokens: int, prompt: int, exact: bool, prompts: int = 1
    ) -> Request:
        blocks = chain(prompt, tokens // 100) if exact else ()
        client = ("a", "b", "c")[len(blocks) % 3]
        return request(name, tokens, blocks=blocks, exact=exact, prompts=prompts, client=client)

    @rule(
        tokens=st.sampled_from([50, 500, 2000, 8000, 15_000, 30_000]),
        prompt=st.integers(0, 2),
        exact=st.booleans(),
        prompts=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def arrive(self, tokens: int, prompt: int, exact: bool, prompts: int) -> None:
        self.arrive_one(tokens, prompt, exact, prompts)

    def arrive_one(self, tokens: int, prompt: int, exact: bool, prompts: int) -> None:
        self.names += 1
        arrived = self.make_request(f"r{self.names}", tokens, prompt, exact, prompts)
        self.prompts[arrived.id] = prompts
        self.live[arrived.id] = None
        self.tried[arrived.id] = []
        self.barred[arrived.id] = set()
        self.feed(RequestArrived(arrived))

    def draw_assigned(self, data: st.DataObject) -> RequestId:
        found = [r for r, worker in self.live.items() if worker is not None]
        return data.draw(st.sampled_from(found))

    @precondition(assigned)
    @rule(data=st.data())
    def prefill_starts(self, data: st.DataObject) -> None:
        request_id = self.draw_assigned(data)
        worker = self.live[request_id]
        assert worker is not None
        assert self.feed(PrefillStarted(request_id, worker)) == []

    @precondition(assigned)
    @rule(data=st.data(), compute_s=st.sampled_from([None, 0.3, 5.0]))
    def prefill_finishes(self, data: st.DataObject, compute_s: float | None) -> None:
        request_id = self.draw_assigned(data)
        worker = self.live[request_id]
        assert worker is not None
        self.feed(PrefillFinished(request_id, worker, 0 if compute_s else None, compute_s))

    @precondition(assigned)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = self.draw_assigned(data)
        self.end(request_id)
        self.feed(RequestFinished(request_id))

    @precondition(assigned)
    @rule(
        data=st.data(),
        failure=st.sampled_from(Failure),
        streamed=st.booleans(),
        leg=st.sampled_from(Leg),
    )
    def fail(self, data: st.DataObject, failure: Failure, streamed: bool, leg: Leg) -> None:
        request_id = self.draw_assigned(data)
        worker = self.live[request_id]
        assert worker is not None
        leg = self.aborted.get(request_id, leg if self.prefill_only else Leg.PREFILL)
        if leg is Leg.PREFILL:
            pool, block = self.home[request_id][0], self.place[request_id][0]
            self.barred[request_id] |= {worker, worker_id(PoolId(pool), block)}
            if failure is Failure.UNREACHABLE:
                self.barred[request_id].add(pool)
        elif failure in (Failure.UNREACHABLE, Failure.DISCONNECTED):
            self.doubted |= {d for d in (self.at_decode.get(request_id),) if d is not None}
        self.live[request_id] = None
        self.at_decode.pop(request_id, None)
        self.handed_over.discard(request_id)
        self.aborted.pop(request_id, None)
        attempt = len(self.tried[request_id])
        self.feed(RequestFailed(request_id, failure, "it broke", streamed, worker, attempt, leg))
        if streamed or failure is Failure.CLIENT_ERROR:
            assert request_id in self.ended

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        worker = self.live[request_id]
        was_aborted = request_id in self.aborted
        self.end(request_id)
        effects = self.feed(RequestCancelled(request_id))
        aborts = [effect for effect in effects if isinstance(effect, Abort)]
        if worker is None or was_aborted:
            assert aborts == []
        else:
            assert [(a.request_id, a.worker) for a in aborts] == [(request_id, worker)]

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS), which=st.integers(0, 4))
    def something_about_a_request_that_is_over(
        self, data: st.DataObject, worker: WorkerId, which: int
    ) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.ended)))
        stale: tuple[Event, ...] = (
            PrefillStarted(request_id, worker),
            PrefillFinished(request_id, worker, 0, 1.0),
            RequestFinished(request_id),
            RequestFailed(request_id, Failure.UNREACHABLE, "late"),
            RequestCancelled(request_id),
        )
        assert self.feed(stale[which]) == []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), which=st.integers(0, 2))
    def something_about_another_attempt(self, data: st.DataObject, which: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        others = [worker for worker in WORKERS if worker != self.live[request_id]]
        worker = data.draw(st.sampled_from(others))
        before = self.control.workers(self.now)
        stale: tuple[Event, ...] = (
            PrefillStarted(request_id, worker),
            PrefillFinished(request_id, worker, 0, 1.0),
            RequestFailed(request_id, Failure.UNREACHABLE, "late", worker=worker),
        )
        assert self.feed(stale[which]) == []
        assert self.control.workers(self.now) == before

    # -- decode servers -------------------------------------------------------------------------

    @precondition(lambda self: self.prefill_only)
    @rule(name=st.sampled_from("de"), limit=st.sampled_from([1, 2, 4]), anew=st.booleans())
    def decode_joins(self, name: str, limit: int, anew: bool) -> None:
        """It starts, or starts again, or is still there."""
        decode = DecodeId(name)
        if anew or decode not in self.decodes:
            self.life += 1
            self.decodes[decode] = limit, self.life
            self.losing = decode
        self.doubted.discard(decode)
        limit, life = self.decodes[decode]
        self.feed(DecodeJoined(decode, f"{life}", limit))

    @precondition(lambda self: self.decodes)
    @rule(data=st.data())
    def decode_is_lost(self, data: st.DataObject) -> None:
        self.losing = data.draw(st.sampled_from(sorted(self.decodes)))
        del self.decodes[self.losing]
        self.doubted.discard(self.losing)
        self.feed(DecodeLost(self.losing, "gone"))
        assert self.losing not in self.at_decode.values()

    @precondition(lambda self: self.at_decode)
    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.at_decode)))
        worker = self.live[request_id]
        assert worker is not None
        self.handed_over.add(request_id)
        self.feed(HandedOver(request_id, worker, len(self.tried[request_id])))

    # -- time and questions ---------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for effect in self.feed(Tick()):
            known = Dispatch | Reject | Verdict | Copy | Reclaim | BreakerChanged
            assert isinstance(effect, known)

    @rule(tokens=st.sampled_from([50, 2000, 15_000]), prompt=st.integers(0, 2))
    def ask(self, tokens: int, prompt: int) -> None:
        asked = self.make_request("asked", tokens, prompt, True)
        decision = self.control.explain(asked, self.now)
        named = {c.worker for c in decision.candidates} | {w for w, _ in decision.excluded}
        assert named == {worker.id for worker in self.control.workers(self.now)}
        self.control.prefixes(self.now)

    # -- what must always hold ------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.control.violations() == []
        assert self.control.pending_count == len(self.live)
        waiting = sum(worker is None for worker in self.live.values())
        assert self.control.queued_count == waiting
        rooms = {terms.decode: terms.rooms for terms in self.control.decodes()}
        assert rooms == {decode: self.rooms_at(decode) for decode in self.decodes}

    @invariant()
    def workers_are_as_the_ranks_are(self) -> None:
        snapshot = self.control.workers(self.now)
        assert {w.id for w in snapshot if w.reason is None} == set(self.served)
        assert self.control.is_ready() == bool(self.served)
        for worker in snapshot:
            mine = {
                r
                for r in self.running()
                if r not in self.handed_over
                and worker_id(PoolId(self.home[r][0]), self.place[r][0]) == worker.id
            }
            assert set(worker.requests) == mine
            assert worker.queue_s >= 0.0
            if not mine:
                assert worker.queue_s == 0.0

    @invariant()
    def early_binding_leaves_nobody_waiting_for_a_free_worker(self) -> None:
        if self.policy == "paper" and "q/0x4" in self.served and not self.prefill_only:
            for request_id, worker in self.live.items():
                barred = {*self.barred[request_id], *self.tried[request_id]}
                assert worker is not None or {"q", "q/0x4"} & barred

    def teardown(self) -> None:
        """Whatever is still live can be brought to its end, and then nothing is reserved."""
        while self.live:
            request_id, worker = next(iter(self.live.items()))
            self.end(request_id)
            self.feed(
                RequestCancelled(request_id) if worker is None else RequestFinished(request_id)
            )
            self.books_are_in_order()
        assert (self.control.pending_count, self.control.queued_count) == (0, 0)
        assert all(worker.queue_s == 0.0 for worker in self.control.workers(self.now))


class LateEvents(Events):
    policy = "late"


class PairedEvents(Events):
    prefill_only = True


class LatePairedEvents(PairedEvents):
    policy = "late"


TestEarly = Events.TestCase
TestEarly.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLate = LateEvents.TestCase
TestLate.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPaired = PairedEvents.TestCase
TestPaired.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLatePaired = LatePairedEvents.TestCase
TestLatePaired.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
