"""A router that lost events for good has the rank publish its blocks once more."""

import asyncio
from collections import deque
from typing import cast

import pytest
from vertumnus_router.clock import VirtualClock
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io import snapshots
from vertumnus_router.io.config import Limits
from vertumnus_router.io.event_stream import EventStream
from vertumnus_router.io.fronts import Fronts
from vertumnus_router.io.kv_batch import Batch
from vertumnus_router.io.metrics import RouterMetrics
from vertumnus_router.io.snapshots import Snapshots
from vertumnus_router.protocol import SnapshotCommand, SnapshotReport

from tests.router.io import fake_kv
from tests.router.io.fake_kv import hang_up, say
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import Running, run, running, until

REFUSED = say(200, {"outcome": "refused", "reason": "busy"})


def forgetful(*blocks: int, copies: bool = True) -> "Forgetful":
    return Forgetful(blocks, copies)


class Forgetful(FakePool):
    """One rank that has stored ``blocks``, a batch each, and remembers the last two of them."""

    def __init__(self, blocks: tuple[int, ...], copies: bool) -> None:
        super().__init__(1, copies=copies)
        self._blocks = blocks

    async def __aenter__(self) -> "Forgetful":
        await super().__aenter__()
        (rank,) = self.ranks
        rank.buffer = deque(rank.buffer, maxlen=2)
        for parent, block in zip((None, *self._blocks), self._blocks, strict=False):
            rank.store([block], parent)
        return self

    @property
    def asked(self) -> int:
        return len(self.kv.of(SnapshotCommand))

    def lose(self, *blocks: int) -> None:
        """More than is remembered, and the last of them arrives."""
        for block in blocks:
            self.ranks[0].store([block], lose=block != blocks[-1])


def indexed(it: Running, blocks: int) -> bool:
    return it.router.core.index_nodes == blocks


def test_a_late_joiner_is_ready_when_it_has_the_snapshot() -> None:
    async def scenario() -> None:
        async with forgetful(1, 2, 3, 4, 5) as pool:
            may_publish = asyncio.Event()
            pool.kv.snapshot = fake_kv.after(may_publish, fake_kv.snapshot)
            async with running(pool.url, control_key="secret") as it:
                await until(lambda: pool.asked, "asked")
                assert pool.kv.commands == [
                    (SnapshotCommand(rank=0, incarnation="life"), "Bearer secret")
                ]
                await until(it.router.core.is_ready, "serves")
                assert "the cache of fake [0] is not known" in it.router.not_ready()
                may_publish.set()
                await it.ready()
                assert indexed(it, 5)
                pool.ranks[0].store([6], 5)
                await until(lambda: indexed(it, 6), "follows")
                assert pool.asked == 1
                assert (await it.samples())['vertumnus_snapshots_total{outcome="done"}'] == 1

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (REFUSED, "refused"),
        (say(409, {"error": "another life"}), "refused"),
        (say(503, {"error": "starting"}), "failed"),
        (say(200, {"outcome": "maybe"}), "failed"),
        (say(200, {"outcome": "done", "blocks": -1}), "failed"),
        (hang_up, "failed"),
    ],
)
def test_a_rank_that_does_not_publish_is_asked_again(
    answer: fake_kv.Answer, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_BACKOFF_S", (0.01,))

    async def scenario() -> None:
        async with forgetful(1, 2, 3, 4, 5) as pool:
            pool.kv.snapshot = answer
            async with running(pool.url) as it:
                await until(lambda: pool.asked >= 3, "asked")
                assert it.router.not_ready()
                pool.kv.snapshot = fake_kv.snapshot
                await it.ready()
                assert indexed(it, 5)
                samples = await it.samples()
                assert samples[f'vertumnus_snapshots_total{{outcome="{outcome}"}}'] >= 3
                assert samples['vertumnus_snapshots_total{outcome="done"}'] == 1

    run(scenario())


def test_every_loss_has_a_snapshot_of_its_own() -> None:
    async def scenario() -> None:
        async with forgetful() as pool, running(pool.url) as it:
            await it.ready()
            assert pool.asked == 0
            pool.lose(1, 2, 3, 4)
            await until(lambda: indexed(it, 4), "the snapshot has come")
            assert pool.asked == 1
            # One more while the rank has not answered the first.
            may_publish = asyncio.Event()
            pool.kv.snapshot = fake_kv.after(may_publish, fake_kv.snapshot)
            pool.lose(11, 12, 13, 14)
            await until(lambda: pool.asked == 2, "asked")
            pool.lose(21, 22, 23, 24)
            await until(lambda: it.router.pools[0].counters.resets == 3, "lost once more")
            may_publish.set()
            await until(lambda: indexed(it, 12), "all has come")
            await until(lambda: pool.asked == 3, "the second is not known to hold everything")

    run(scenario())


def test_a_pool_without_snapshots_is_ready_with_what_is_left() -> None:
    async def scenario() -> None:
        async with forgetful(1, 2, 3, 4, 5, copies=False) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: it.router.core.index_nodes == 3, "two blocks and a parent")
            assert pool.asked == 0

    run(scenario())


def test_readiness_does_not_wait_for_a_snapshot_for_ever() -> None:
    async def scenario() -> None:
        limits = Limits(stop_s=1.0, probe_s=0.2, warm_s=0.5)
        async with forgetful(1, 2, 3, 4, 5) as pool:
            pool.kv.snapshot = REFUSED
            async with running(pool.url, limits=limits) as it:
                await until(it.router.core.is_ready, "serves")
                assert it.router.not_ready()
                await it.ready()
                assert not indexed(it, 5)

    run(scenario())


def test_a_rank_that_is_lost_is_asked_no_more_and_its_next_life_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "_BACKOFF_S", (0.01,))

    async def scenario() -> None:
        async with forgetful(1, 2, 3, 4, 5) as pool:
            pool.kv.snapshot = REFUSED
            async with running(pool.url) as it:
                await until(lambda: pool.asked, "asked")
                pool.lose_rank(0, "killed")
                await until(lambda: not it.router.core.is_ready(), "lost")
                # What had been sent by then may still arrive.
                await asyncio.sleep(0.05)
                asked = pool.asked
                await asyncio.sleep(0.1)
                assert pool.asked == asked
                pool.ranks[0].begin_new_life()
                pool.ranks[0].silent = False
                await it.ready()
                assert pool.asked == asked

    run(scenario())


def test_snapshots_that_are_lost_themselves_are_not_asked_for_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = EventStream(Rank(PoolId("p"), 0), 16)
    stream.start()
    stream.replayed(7, Batch(1.0, ()))
    stream.replay_ended()
    assert stream.is_incomplete
    clock, asked_at = VirtualClock(), list[float]()

    async def lost_again(*_: object) -> SnapshotReport:
        asked_at.append(clock.now())
        if len(asked_at) < 4:
            stream.losses += 1
        return SnapshotReport(outcome="done", blocks=1)

    async def scenario() -> None:
        monkeypatch.setattr(snapshots, "command", lost_again)
        tasks: list[asyncio.Task[None]] = []
        asker = Snapshots(
            cast(Fronts, None),
            RouterMetrics(),
            clock,
            lambda work: tasks.append(asyncio.create_task(work)),
        )
        asker.want(stream, lambda: "life")
        await asyncio.gather(*tasks)
        assert not stream.is_incomplete
        assert asked_at == pytest.approx([0.0, 0.1, 0.6, 1.6])

    run(scenario())
