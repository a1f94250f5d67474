"""Whatever happens in whatever order: every request ends once and leaves nothing behind.

A twin is fed the same events but is never asked anything. Equal effects prove that the control
plane is deterministic and that asking changes nothing.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.effects import Abort, Dispatch, Effect, Reject
from vertumnus_router.core.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    Failure,
    IndexReset,
    PoolLost,
    PrefillFinished,
    PrefillStarted,
    RankLost,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
)
from vertumnus_router.core.types import PoolId, Rank, Request, RequestId, WorkerId
from vertumnus_router.lattice import Block

from tests.router.core.scene import chain, joined, reported, request, with_overhead

POOLS = {"p": (Block(0, 1), Block(1, 1), Block(2, 2)), "q": (Block(0, 4),)}
RANKS = [(pool, rank) for pool, blocks in POOLS.items() for b in blocks for rank in b.ranks]
WORKERS = [WorkerId(f"{p}/{b.first}x{b.degree}") for p, blocks in POOLS.items() for b in blocks]


def assigned(machine: "Events") -> bool:
    return any(worker is not None for worker in machine.live.values())


def block_of(pool: str, rank: int) -> Block:
    return next(block for block in POOLS[pool] if rank in block)


class Events(RuleBasedStateMachine):
    policy = "paper"

    def __init__(self) -> None:
        super().__init__()
        config: dict[str, Any] = {"queue_limit": 4, "queue_timeout_s": 5.0, "index_nodes": 40}
        self.control, self.twin = (
            ControlPlane(PolicyConfig(self.policy, **config), with_overhead(0.1)) for _ in range(2)
        )
        self.now = 0.0
        self.names = 0
        self.life = 0
        self.joined: set[str] = set()
        self.lives: dict[tuple[str, int], int] = {}  # ranks that are up
        self.dead: list[tuple[str, int, int]] = []
        self.live: dict[RequestId, WorkerId | None] = {}  # and where each one is
        self.tried: dict[RequestId, list[WorkerId]] = {}
        self.aborted: dict[RequestId, WorkerId] = {}  # by the loss of a worker
        self.ended: set[RequestId] = set()

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
            elif not isinstance(event, RequestCancelled):
                self.carry_out_abort(effect)
        return effects

    def carry_out_dispatch(self, effect: Dispatch) -> None:
        request_id, worker = effect.request_id, effect.worker
        assert self.live[request_id] is None, "it was somewhere already"
        assert worker in self.serving()
        assert worker not in self.tried[request_id]
        self.live[request_id] = worker
        self.tried[request_id].append(worker)
        assert effect.attempt == len(self.tried[request_id]) <= 3
        chosen = effect.decision.chosen
        assert chosen.worker == worker
        assert chosen.queue_s >= 0 and chosen.service_s > 0
        assert chosen.total <= min(c.total for c in effect.decision.candidates) + 0.001
        named = [c.worker for c in effect.decision.candidates]
        named += [excluded for excluded, _ in effect.decision.excluded]
        assert len(set(named)) == len(named)
        assert set(named) >= self.serving()

    def carry_out_abort(self, effect: Abort) -> None:
        assert self.live[effect.request_id] == effect.worker
        assert effect.request_id not in self.aborted
        self.aborted[effect.request_id] = effect.worker

    def end(self, request_id: RequestId) -> None:
        assert request_id not in self.ended
        del self.live[request_id]
        self.aborted.pop(request_id, None)
        self.ended.add(request_id)

    def serving(self) -> set[WorkerId]:
        return {
            WorkerId(f"{pool}/{block.first}x{block.degree}")
            for pool in self.joined
            for block in POOLS[pool]
            if all((pool, rank) in self.lives for rank in block.ranks)
        }

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
        self.feed(joined(pool, 4, context_tokens=9000 if pool == "p" else 20_000))

    @rule(pool=st.sampled_from(sorted(POOLS)))
    def pool_lost(self, pool: str) -> None:
        self.joined.discard(pool)
        for at in [at for at in self.lives if at[0] == pool]:
            del self.lives[at]
        self.feed(PoolLost(PoolId(pool), "front dead"))

    @rule(at=st.sampled_from(RANKS))
    def rank_is_up(self, at: tuple[str, int]) -> None:
        pool, rank = at
        if at not in self.lives:
            self.life += 1
        life = self.lives.get(at, self.life)
        if pool in self.joined:
            self.lives[at] = life
        self.feed(reported(rank, block_of(pool, rank), pool=pool, life=f"{life}"))

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), named=st.booleans())
    def rank_is_lost(self, data: st.DataObject, named: bool) -> None:
        pool, rank = at = data.draw(st.sampled_from(sorted(self.lives)))
        life = self.lives.pop(at)
        if named:
            self.dead.append((pool, rank, life))
        self.feed(RankLost(Rank(PoolId(pool), rank), "gone", f"{life}" if named else None))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def rank_restarts(self, data: st.DataObject) -> None:
        pool, rank = at = data.draw(st.sampled_from(sorted(self.lives)))
        self.dead.append((pool, rank, self.lives[at]))
        self.life += 1
        self.lives[at] = self.life
        self.feed(reported(rank, block_of(pool, rank), pool=pool, life=f"{self.life}"))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def a_dead_life_reports(self, data: st.DataObject) -> None:
        pool, rank, life = data.draw(st.sampled_from(self.dead))
        if pool in self.joined and (pool, rank) in self.lives:
            self.feed(reported(rank, block_of(pool, rank), pool=pool, life=f"{life}"))

    @rule(
        at=st.sampled_from(RANKS),
        name=st.integers(0, 2),
        length=st.integers(1, 20),
        what=st.sampled_from(["store", "store", "remove", "reset"]),
    )
    def index_event(self, at: tuple[str, int], name: int, length: int, what: str) -> None:
        rank = Rank(PoolId(at[0]), at[1])
        blocks = chain(name, length)
        if what == "store":
            self.feed(BlocksStored(rank, None, blocks))
        elif what == "remove":
            self.feed(BlocksRemoved(rank, blocks[::-1]))
        else:
            self.feed(IndexReset(rank, "a gap"))

    # -- requests -------------------------------------------------------------------------------

    def make_request(self, name: str, tokens: int, prompt: int, exact: bool) -> Request:
        blocks = chain(prompt, tokens // 100) if exact else ()
        return request(name, tokens, blocks=blocks, exact=exact)

    @rule(
        tokens=st.sampled_from([50, 500, 2000, 8000, 15_000, 30_000]),
        prompt=st.integers(0, 2),
        exact=st.booleans(),
    )
    def arrive(self, tokens: int, prompt: int, exact: bool) -> None:
        self.names += 1
        arrived = self.make_request(f"r{self.names}", tokens, prompt, exact)
        self.live[arrived.id] = None
        self.tried[arrived.id] = []
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
    @rule(data=st.data(), failure=st.sampled_from(Failure), streamed=st.booleans())
    def fail(self, data: st.DataObject, failure: Failure, streamed: bool) -> None:
        request_id = self.draw_assigned(data)
        worker = self.live[request_id]
        self.live[request_id] = None
        self.aborted.pop(request_id, None)
        self.feed(RequestFailed(request_id, failure, "it broke", streamed, worker))
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

    # -- time and questions ---------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for effect in self.feed(Tick()):
            assert isinstance(effect, (Dispatch, Reject))

    @rule(tokens=st.sampled_from([50, 2000, 15_000]), prompt=st.integers(0, 2))
    def ask(self, tokens: int, prompt: int) -> None:
        asked = self.make_request("asked", tokens, prompt, True)
        decision = self.control.explain(asked, self.now)
        named = {c.worker for c in decision.candidates} | {w for w, _ in decision.excluded}
        assert named == {worker.id for worker in self.control.workers(self.now)}

    # -- what must always hold ------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.control.violations() == []
        assert self.control.pending_count == len(self.live)
        waiting = sum(worker is None for worker in self.live.values())
        assert self.control.queued_count == waiting

    @invariant()
    def workers_are_as_the_ranks_are(self) -> None:
        snapshot = self.control.workers(self.now)
        assert {w.id for w in snapshot if w.reason is None} == self.serving()
        assert self.control.is_ready() == bool(self.serving())
        for worker in snapshot:
            mine = {r for r, at in self.live.items() if at == worker.id and r not in self.aborted}
            assert set(worker.requests) == mine
            assert worker.queue_s >= 0.0
            if not mine:
                assert worker.queue_s == 0.0

    @invariant()
    def early_binding_leaves_nobody_waiting_for_a_free_worker(self) -> None:
        if self.policy == "paper" and "q/0x4" in self.serving():
            for request_id, worker in self.live.items():
                assert worker is not None or "q/0x4" in self.tried[request_id]

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


TestEarly = Events.TestCase
TestEarly.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLate = LateEvents.TestCase
TestLate.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
