"""The connection to a pool: joining, losing events, ranks and fronts, coming back."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from vertumnus_router.core.events import Event, IndexReset, PoolLost, RankLost, RankReported
from vertumnus_router.core.profile import PoolKind
from vertumnus_router.core.types import PoolId, Rank
from vertumnus_router.io import rank_feed, reports
from vertumnus_router.io.config import Limits
from vertumnus_router.profiles import DEFAULT, load_profile

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool, pools
from tests.router.io.harness import Running, run, running, until


def held(it: Running, rank: int = 0, pool: str = "fake") -> int:
    """Blocks that the control plane believes a rank to hold."""
    for worker in it.router.core.workers(it.router.clock.now()):
        for at, one in enumerate(worker.ranks):
            if one == Rank(PoolId(pool), rank):
                return worker.rank_blocks[at]
    return -1


def serving(it: Running) -> list[str]:
    found = it.router.core.workers(it.router.clock.now())
    return [str(worker.id) for worker in found if worker.state.value == "serving"]


async def holds(it: Running, blocks: int, rank: int = 0) -> None:
    await until(lambda: held(it, rank) == blocks, f"rank {rank} holds {blocks} blocks")


def record(it: Running) -> list[Event]:
    """Every event that reaches the control plane from now on."""
    events: list[Event] = []
    on_event = it.router.core.on_event

    def recording(event: Event, now: float) -> object:
        events.append(event)
        return on_event(event, now)

    it.router.control._core.on_event = recording  # type: ignore[method-assign,assignment]
    return events


def test_a_late_joiner_knows_what_was_cached_before() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool:
            pool.ranks[0].store([1, 2, 3])
            pool.ranks[1].store([1])
            pool.ranks[0].remove([3])
            async with running(pool.url) as it:
                await it.ready()
                assert (held(it, 0), held(it, 1)) == (2, 1), "ready means the index is read"
                pool.ranks[0].store([3, 4], 2)
                await holds(it, 4)

    run(scenario())


def test_a_router_that_restarts_knows_it_too() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool:
            for _ in range(2):
                async with running(pool.url) as it:
                    await it.ready()
                    pool.ranks[0].store([len(pool.ranks[0].buffer) * 10])
                    await holds(it, len(pool.ranks[0].buffer) - 1)

    run(scenario())


def test_a_gap_is_replayed() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            rank = pool.ranks[0]
            rank.store([1])
            await holds(it, 1)
            events = record(it)
            rank.store([2], 1, lose=True)
            rank.remove([1, 2], lose=True)
            rank.store([7])
            await until(lambda: it.router.pools[0].counters.gaps == 1, "noticed")
            await holds(it, 1)
            assert not [event for event in events if isinstance(event, IndexReset)]
            samples = await it.samples()
            assert samples[f'vertumnus_event_gaps_total{{pool="{pool.url}"}}'] == 1

    run(scenario())


def test_a_lost_last_batch_is_found_by_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_feed, "_PROBE_AFTER_S", 0.5)

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.ranks[0].store([1, 2], lose=True)
            await holds(it, 2)

    run(scenario())


def test_a_wrapped_buffer_resets_the_index() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            rank = pool.ranks[0]
            rank.store([1, 2, 3])
            await holds(it, 3)
            rank.store([4], 3, lose=True)
            rank.store([50], lose=True)
            rank.buffer.clear()  # nobody remembers them
            rank.store([60, 61])
            await until(lambda: it.router.pools[0].counters.resets, "reset")
            await holds(it, 2)

    run(scenario())


def test_a_new_incarnation_forgets_first_and_then_reads_the_new_life() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            rank = pool.ranks[0]
            rank.store([1, 2, 3])
            await holds(it, 3)
            events = record(it)
            rank.begin_new_life()
            rank.store([9])
            await until(
                lambda: any(
                    isinstance(e, RankReported) and e.incarnation == "life'" for e in events
                ),
                "the new life reports",
            )
            await holds(it, 1)
            new = next(
                at
                for at, event in enumerate(events)
                if isinstance(event, RankReported) and event.incarnation == "life'"
            )
            assert any(isinstance(event, IndexReset) for event in events[:new])

    run(scenario())


def test_a_silent_rank_takes_its_worker_out_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "SILENCE_S", 0.8)

    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2", beat_s=0.05) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(serving(it)) == 3, "all serve")
            pool.ranks[3].silent = True
            await until(lambda: len(serving(it)) == 2, "the worker left")
            assert serving(it) == ["fake/0x1", "fake/1x1"]
            for _ in range(6):
                async with await it.chat() as response:
                    assert response.status == 200
            assert {seen.rank for seen in pool.seen} <= {0, 1}
            async with it.client.get("/workers") as response:
                states = {w["id"]: w for w in (await response.json())["workers"]}
            assert states["fake/2x2"]["state"] == "lost"
            assert "silent" in states["fake/2x2"]["reason"]
            pool.ranks[3].silent = False
            await until(lambda: len(serving(it)) == 3, "it is back")

    run(scenario())


def test_a_rank_that_its_supervisor_reports_dead_is_out_at_once() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: held(it, 1) == 0, "both ranks report")
            pool.ranks[0].store([1, 2])
            await holds(it, 2)
            pool.lose_rank(0, "its process exited")
            await until(lambda: held(it, 0) == 0, "its cache is void")
            async with await it.chat() as response:
                assert response.headers["x-vertumnus-worker"] == "fake/1x1"

    run(scenario())


def test_a_dead_rank_is_left_in_peace_until_its_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_feed, "_PROBE_AFTER_S", 0.0)
    monkeypatch.setattr(reports, "SILENCE_S", 0.6)

    async def scenario() -> None:
        async with FakePool(2, beat_s=0.05) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: held(it, 1) == 0, "both ranks report")
            dead, alive = pool.ranks
            dead.store([1])
            await holds(it, 1)
            events = record(it)
            pool.lose_rank(0, "its process exited")
            await until(lambda: held(it, 0) == 0, "its cache is void")
            dead.beat()  # still in the socket when the process died
            asked = len(dead.replays_asked)
            probed = len(alive.replays_asked) + 2
            await until(lambda: len(alive.replays_asked) > probed, "the others are probed")
            assert len(dead.replays_asked) == asked
            causes = {e.cause for e in events if isinstance(e, RankLost) and e.rank.index == 0}
            assert causes == {"its process exited"}
            dead.begin_new_life()
            dead.store([8, 9])
            dead.silent = False
            await holds(it, 2)

    run(scenario())


def test_a_silent_rank_that_speaks_again_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "SILENCE_S", 0.5)

    async def scenario() -> None:
        async with FakePool(2, beat_s=0.05) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(serving(it)) == 2, "both serve")
            rank = pool.ranks[0]
            rank.store([1, 2])
            await holds(it, 2)
            rank.silent = True
            await until(lambda: serving(it) == ["fake/1x1"], "out")
            rank.store([3], 2)
            rank.silent = False
            await holds(it, 3)
            assert it.router.pools[0].counters.resets == 0

    run(scenario())


def test_a_pool_of_which_no_rank_is_heard_serves_on_as_it_was_and_that_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its front answers: most likely the reports do not get here."""
    monkeypatch.setattr(reports, "SILENCE_S", 0.6)
    monkeypatch.setattr(reports, "HEARTBEAT_S", 0.25)

    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2", beat_s=0.05) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(serving(it)) == 3, "all serve")
            events = record(it)
            pool.answer = fake_pool.stream_slowly(tokens=1000, gap_s=0.02)
            stream = await it.chat(stream=True)
            pool.beating = False
            await until(lambda: it.router.pools[0].stale_s is not None, "stale")
            reader = it.router.pools[0]._reports
            assert reader is not None
            checked_s = reader._checked_s
            await until(lambda: reader._checked_s > checked_s + 1.5, "looked at again")
            assert len(serving(it)) == 3
            assert await stream.content.readany(), "the stream goes on"
            pool.answer = fake_pool.stream
            async with await it.chat() as response:
                assert response.status == 200
            async with it.client.get("/workers") as response:
                assert (await response.json())["pools"][0]["stale_s"] > 0.6
            assert (await it.samples())[f'vertumnus_pool_stale{{pool="{pool.url}"}}'] == 1
            pool.ranks[0].beat()
            await until(reader.heard_lately, "one is heard")
            reader.check()
            assert len(serving(it)) == 3, "the others will be, a moment later"
            pool.ranks[3].silent = True
            pool.beating = True
            await until(lambda: len(serving(it)) == 2, "only who is silent while others are not")
            assert it.router.pools[0].stale_s is None
            lost = {event.rank.index for event in events if isinstance(event, RankLost)}
            assert lost == {3}
            stream.close()

    run(scenario())


def test_a_front_that_hangs_while_its_ranks_report_stays() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            events = record(it)
            link = it.router.pools[0]

            async def unanswered() -> str:
                return "no answer: TimeoutError"

            link._server.describe = unanswered  # type: ignore[method-assign]
            await asyncio.sleep(1.5)
            assert link.description is not None
            pool.beating = False
            await until(lambda: link.description is None, "gone once nobody reports")
            assert any(isinstance(event, PoolLost) for event in events)

    run(scenario())


def test_a_pool_that_was_started_again_under_the_same_address_is_joined_anew() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.ranks[0].store([1])
            await holds(it, 1)
            pool.description = fake_pool.msgspec.structs.replace(pool.description, manifest="new")
            await until(lambda: it.router.pools[0].joins == 2, "joined again")
            await it.ready()
            await holds(it, 1)

    run(scenario())


def test_pools_that_do_not_fit_together_are_kept_out() -> None:
    async def scenario() -> None:
        one, two = FakePool(1, pool_id="one"), FakePool(1, pool_id="two")
        model = fake_pool.msgspec.structs.replace(two.description.model, served_name="another")
        two.description = fake_pool.msgspec.structs.replace(two.description, model=model)
        same = FakePool(1, pool_id="one")
        async with pools(one, two, same), running(one.url) as it:
            await it.ready()
            for other in (two, same):
                trouble = it.router.model.misfit(other.description)
                assert trouble
            async with running(two.url, one.url) as both:
                await both.ready()
                await until(
                    lambda: [link.trouble is None for link in both.router.pools].count(True) == 1,
                    "one of them joined",
                )
                refused = next(link for link in both.router.pools if link.trouble)
                assert "one router serves one model" in str(refused.trouble)

    run(scenario())


def test_a_pool_of_another_kind_than_the_profile_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    kind = PoolKind(device="a GPU", model="a shape")
    known = load_profile(DEFAULT)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, measured_on=kind)))

    async def scenario() -> None:
        fake = FakePool(1)
        fake.description = msgspec.structs.replace(fake.description, device="a CPU")
        async with fake as pool, running(pool.url, profile=str(path)) as it:
            says = "the profile was measured on the device 'a GPU', not on 'a CPU'; measure it"
            await until(lambda: says in str(it.router.pools[0].trouble), "refused")
            pool.description = msgspec.structs.replace(pool.description, device="a GPU")
            await it.ready()

    run(scenario())


def test_something_that_is_no_pool_is_named() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url + "/elsewhere") as it:
            await until(lambda: "404" in str(it.router.pools[0].trouble), "named")
            assert any("is this a pool" in reason for reason in it.router.not_ready())

    run(scenario())


def test_a_pool_that_is_starting_is_waited_for_in_its_own_words() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool:
            pool.starting = True
            async with running(pool.url) as it:
                await until(lambda: "is starting" in str(it.router.pools[0].trouble), "said so")
                pool.starting = False
                await it.ready()

    run(scenario())


def test_readiness_waits_for_the_index_but_not_for_ever() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool:
            pool.ranks[0].replay._on_frames = lambda frames: None  # nobody replays
            limits = Limits(stop_s=1.0, probe_s=0.2, warm_s=1.0)
            async with running(pool.url, limits=limits) as it:
                await until(it.router.core.is_ready, "a worker serves")
                reasons = it.router.not_ready()
                assert any("cache" in reason for reason in reasons), reasons
                await until(lambda: not it.router.not_ready(), "the deadline passed")

    run(scenario())


def test_reports_reach_the_metrics() -> None:
    async def answer(
        pool: FakePool, request: fake_pool.web.Request, seen: fake_pool.Seen
    ) -> fake_pool.web.StreamResponse:
        pool.prefill_started(seen)
        pool.prefill_finished(seen, input_tokens=100, cached_tokens=64)
        await asyncio.sleep(0.2)
        return await fake_pool.stream(pool, request, seen)

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = answer
            async with await it.chat(stream=True) as response:
                await response.read()
            samples = await it.samples()
            assert samples['vertumnus_cached_tokens_total{degree="1",source="actual"}'] == 64
            assert samples['vertumnus_cached_tokens_total{degree="1",source="predicted"}'] == 0
            assert samples['vertumnus_prompt_tokens_total{degree="1"}'] == 100
            ratio = 'vertumnus_prefill_actual_over_predicted_count{degree="1"}'
            assert samples[ratio] == 1
            assert samples['vertumnus_ttft_seconds_count{degree="1"}'] == 1

    run(scenario())


def kv_used(it: Running) -> list[int | None]:
    workers = it.router.core.workers(it.router.clock.now())
    return [tokens for worker in workers for tokens in worker.rank_kv_used_tokens]


def test_whichever_rank_leads_reports_a_prefill_and_only_of_the_current_attempt() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.hang
            task = asyncio.create_task(it.chat())
            await until(lambda: pool.running, "running")
            seen = pool.seen[0]
            leads = fake_pool.Seen(seen.path, "", dict(seen.headers), b"")
            leads.headers["x-override-routed-dp-rank"] = str(1 - seen.rank)
            later = fake_pool.Seen(seen.path, "", dict(leads.headers), b"")
            later.headers["x-override-rid"] = seen.rid[:30] + "02"
            pool.prefill_finished(later, input_tokens=5, cached_tokens=1)
            pool.prefill_finished(leads, input_tokens=9, cached_tokens=3)
            pool.prefill_finished(leads, input_tokens=12, cached_tokens=9)  # resumed
            name = 'vertumnus_cached_tokens_total{degree="1",source="actual"}'

            async def actual() -> float:
                return (await it.samples()).get(name, 0.0)

            for _ in range(100):
                if await actual():
                    break
                await asyncio.sleep(0.01)
            assert await actual() == 3
            pool.ranks[leads.rank].load = {"kv_used_tokens": 77}
            pool.ranks[leads.rank].beat()
            await until(lambda: 77 in kv_used(it), "all that the rank has said")
            assert await actual() == 3
            task.cancel()
            await until(it.settled, "settled")

    run(scenario())
