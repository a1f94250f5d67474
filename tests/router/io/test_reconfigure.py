"""``POST /vertumnus/reconfigure`` and ``GET /vertumnus/composition`` over HTTP."""

import asyncio
from typing import Any

import pytest
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.types import PoolId
from vertumnus_router.io.config import Limits
from vertumnus_router.lattice import Block

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool, pools
from tests.router.io.harness import Running, run, running, until


async def reconfigure(
    it: Running, composition: str, headers: dict[str, str] | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    body = {"composition": composition, **more}
    async with it.client.post("/vertumnus/reconfigure", json=body, headers=headers) as response:
        return response.status, await response.json()


async def composition(it: Running) -> dict[str, Any]:
    async with it.client.get("/vertumnus/composition") as response:
        assert response.status == 200
        return dict(await response.json())


def degrees(it: Running) -> list[int]:
    return [w.degree for w in it.router.core.workers(it.router.clock.now()) if w.reason is None]


async def all_serve(it: Running, *expected: int) -> None:
    await it.ready()
    await until(lambda: degrees(it) == list(expected), f"{expected} serve")


def test_a_pool_goes_where_it_is_told_one_adjacent_move_at_a_time() -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url, control_key="secret") as it:
            await all_serve(it, 1, 1, 1, 1)
            status, answer = await reconfigure(it, "1x4")
            assert status == 200
            assert (answer["pool"], answer["composition"], answer["epoch"]) == ("fake", "1x4", 4)
            ways = [(move["from"], move["to"]) for move in answer["moves"]]
            assert ways == [("4x1", "1x2,2x1"), ("1x2,2x1", "2x2"), ("2x2", "1x4")]
            first = answer["moves"][0]
            assert (first["blocks"], first["into"]) == (["0x1", "1x1"], ["0x2"])
            assert (first["epoch"], first["outcome"], first["reason"]) == (2, "committed", None)
            stages = {"drain": 20.0, "vote": 2.0, "switch": 3.0, "publish": 1.0}
            assert (first["stages_ms"], first["total_ms"]) == (stages, 26.0)
            assert (first["predicted_drain_s"], first["reconcile_tokens"]) == (0.0, 0)
            asked = [(command.epoch, command.composition) for command, _ in pool.regroups]
            assert asked == [(1, "1x2,2x1"), (2, "2x2"), (3, "1x4")]
            assert {key for _, key in pool.regroups} == {"Bearer secret"}
            assert degrees(it) == [4]
            status, answer = await reconfigure(it, "2x1,1x2", pool="fake")
            assert (status, answer["composition"], len(answer["moves"])) == (200, "2x1,1x2", 2)
            assert degrees(it) == [1, 1, 2]
            status, answer = await reconfigure(it, "2x1,1x2")
            assert (status, answer["moves"]) == (200, [])

    run(scenario())


def test_a_dry_run_says_what_it_would_take_and_does_nothing() -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1, 1, 1)
            pool.ranks[0].store([1, 2, 3])
            await until(lambda: it.router.core.index_nodes == 3, "the index")
            status, answer = await reconfigure(it, "2x2", dry_run=True)
            assert status == 200
            assert (answer["composition"], answer["epoch"]) == ("4x1", 1)
            assert [
                (move["from"], move["to"], move["reconcile_tokens"]) for move in answer["moves"]
            ] == [("4x1", "1x2,2x1", 3 * fake_pool.BLOCK_TOKENS), ("1x2,2x1", "2x2", 0)]
            assert all("outcome" not in move for move in answer["moves"])
            assert pool.regroups == []
            assert degrees(it) == [1, 1, 1, 1]

    run(scenario())


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_streams_live_through_moves(policy: str) -> None:
    async def scenario() -> None:
        fake = FakePool(4)
        async with fake as pool, running(pool.url, policy=PolicyConfig(policy=policy)) as it:
            await all_serve(it, 1, 1, 1, 1)
            pool.answer = fake_pool.stream_slowly(tokens=40, gap_s=0.02)

            async def chat() -> str:
                async with await it.chat(stream=True) as response:
                    assert response.headers["x-vertumnus-attempts"] == "1"
                    return await response.text()

            tasks = [asyncio.create_task(chat()) for _ in range(12)]
            await until(lambda: len(pool.running) == 12, "all run")
            for target in ("1x4", "2x1,1x2", "4x1"):
                status, _ = await reconfigure(it, target)
                assert status == 200
                assert it.router.core.violations() == []
            assert len(pool.running) == 12, "the moves were faster than the streams"
            answers = await asyncio.gather(*tasks)
            assert set(answers) == {b"".join(fake_pool.sse_chunks(40)).decode()}
            assert len(pool.seen) == 12
            assert pool.aborted == []
            await until(it.settled, "settled")
            assert (await it.samples())["vertumnus_requests_moved_total"] >= 12

    run(scenario())


def test_a_move_blocks_neither_other_pools_nor_the_router() -> None:
    async def scenario() -> None:
        slow, other = FakePool(2, pool_id="slow"), FakePool(1, pool_id="other")
        async with pools(slow, other), running(slow.url, other.url) as it:
            await all_serve(it, 1, 1, 1)
            slow.regroup = fake_pool.answer_late
            moving = asyncio.create_task(reconfigure(it, "1x2", pool="slow"))
            await until(lambda: slow.regroups, "commanded")
            for _ in range(5):
                async with await it.chat() as response:
                    assert response.status == 200
                    assert response.headers["x-vertumnus-worker"] == "other/0x1"
            for path in ("/health", "/readiness", "/workers", "/metrics"):
                async with it.client.get(path) as response:
                    assert response.status == 200
            now = await composition(it)
            assert [pool["moving"] for pool in now["pools"]] == ["1x2", None]
            assert [w["state"] for w in now["pools"][0]["workers"]] == ["draining"] * 2
            status, refused = await reconfigure(it, "1x2", pool="slow")
            assert status == 409
            assert "is moving from 2x1 to 1x2" in refused["error"]["message"]
            assert not slow.seen
            slow.may_regroup.set()
            status, _ = await moving
            assert status == 200

    run(scenario())


def test_requests_wait_while_all_of_a_pool_moves() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1)
            pool.regroup = fake_pool.answer_late
            moving = asyncio.create_task(reconfigure(it, "1x2"))
            await until(lambda: pool.regroups, "commanded")
            asked = asyncio.create_task(it.chat())
            await until(lambda: it.router.core.queued_count == 1, "queued")
            async with it.client.get("/readiness") as response:
                assert response.status == 200
            pool.may_regroup.set()
            async with await asked as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-worker"] == "fake/0x2"
            assert (await moving)[0] == 200

    run(scenario())


REFUSED = {"error": "the pool is at epoch 9"}


@pytest.mark.parametrize(
    ("how", "outcome", "reason"),
    [
        (fake_pool.abandon, "abandoned", "rank 1 was not ready within 10 s"),
        (fake_pool.answer_regroup(409, REFUSED), "refused", "the pool answers 409: the pool is at"),
        (fake_pool.answer_regroup(403, {"message": "no"}), "refused", "the pool answers 403"),
        (fake_pool.answer_regroup(503, {"error": "starting"}), "unknown", "answers 503: starting"),
        (fake_pool.answer_regroup(200, {"what": "is this"}), "unknown", "not a report"),
        (fake_pool.answer_regroup(200, []), "unknown", "not a report"),
    ],
)
def test_a_move_that_is_not_made_says_why_and_the_pool_serves_on(
    how: fake_pool.Regroup, outcome: str, reason: str
) -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1, 1, 1)
            pool.regroup = how
            status, answer = await reconfigure(it, "1x4")
            assert status == 409
            assert answer["error"]["code"] == "not_reconfigured"
            assert reason in answer["error"]["message"]
            first, *rest = answer["moves"]
            assert first["outcome"] == outcome
            assert reason in first["reason"]
            assert len(rest) == 2 and all("outcome" not in move for move in rest)
            assert (answer["composition"], answer["epoch"]) == ("4x1", 1)
            assert degrees(it) == [1, 1, 1, 1]
            async with await it.chat() as response:
                assert response.status == 200
            pool.regroup = fake_pool.regroup
            assert (await reconfigure(it, "1x4"))[0] == 200

    run(scenario())


def test_what_was_done_before_a_move_failed_is_told() -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1, 1, 1)

            async def second_fails(*args: Any) -> Any:
                pool.regroup = fake_pool.abandon
                return await fake_pool.regroup(*args)

            pool.regroup = second_fails
            status, answer = await reconfigure(it, "1x4")
            assert status == 409
            assert [m.get("outcome") for m in answer["moves"]] == ["committed", "abandoned", None]
            assert (answer["composition"], answer["epoch"]) == ("1x2,2x1", 2)

    run(scenario())


def test_an_answer_that_is_lost_leaves_the_truth_to_the_ranks() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1)
            pool.regroup = fake_pool.switch_and_hang_up
            status, answer = await reconfigure(it, "1x2")
            assert status == 409
            assert answer["moves"][0]["outcome"] == "unknown"
            assert "no answer from http://" in answer["error"]["message"]
            await all_serve(it, 2)
            async with await it.chat() as response:
                assert response.status == 200

    run(scenario())


def test_a_pool_that_dies_during_its_move_ends_the_order() -> None:
    async def scenario() -> None:
        limits = Limits(stop_s=1.0, probe_s=0.1)
        async with FakePool(2) as pool, running(pool.url, limits=limits) as it:
            await all_serve(it, 1, 1)
            pool.regroup = fake_pool.answer_late
            moving = asyncio.create_task(reconfigure(it, "1x2"))
            await until(lambda: pool.regroups, "commanded")
            await pool.stop_front()
            status, answer = await moving
            assert status == 409
            assert answer["error"]["message"]
            await pool.start_front()
            await all_serve(it, 1, 1)
            pool.regroup = fake_pool.regroup
            assert (await reconfigure(it, "1x2"))[0] == 200

    run(scenario())


def test_the_moves_go_on_when_the_one_who_asked_has_left() -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1, 1, 1)
            pool.regroup = fake_pool.answer_late
            asked = asyncio.create_task(reconfigure(it, "1x4"))
            await until(lambda: pool.regroups, "commanded")
            asked.cancel()
            pool.may_regroup.set()
            await all_serve(it, 4)
            assert len(pool.regroups) == 3

    run(scenario())


def test_another_router_in_the_middle_of_a_move_follows_the_ranks() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool:
            async with running(pool.url) as first:
                await all_serve(first, 1, 1)
                pool.regroup = fake_pool.answer_late
                asked = asyncio.create_task(reconfigure(first, "1x2"))
                await until(lambda: pool.regroups, "commanded")
                asked.cancel()
            async with running(pool.url) as second:
                await all_serve(second, 1, 1)
                pool.answer = fake_pool.stream_slowly(tokens=30, gap_s=0.02)
                stream = asyncio.create_task(second.chat(stream=True))
                await until(lambda: pool.running, "running")
                await fake_pool.regroup(pool, None, pool.regroups[0][0])  # type: ignore[arg-type]
                await all_serve(second, 2)
                async with await stream as response:
                    await response.read()
                    assert response.status == 200
                assert len(pool.seen) == 1

    run(scenario())


def test_a_router_that_came_after_ranks_had_died_moves_the_others() -> None:
    async def scenario() -> None:
        async with FakePool(4, "2x2") as pool:
            pool.failed = {Block(2, 2)}
            for rank in pool.ranks[2:]:
                rank.silent = True
            async with running(pool.url) as it:
                await all_serve(it, 2)
                await until(lambda: it.router.core.composition(PoolId("fake")), "learnt")
                status, answer = await reconfigure(it, "1x4")
                assert status == 409 and "fake/2x2 has failed" in answer["error"]["message"]
                status, answer = await reconfigure(it, "2x1,1x2")
                assert (status, answer["composition"]) == (200, "2x1,1x2")

    run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"composition": "3x1"}, 400, "bad_composition"),
        ({"composition": "1x3"}, 400, "bad_composition"),
        ({"composition": "nonsense"}, 400, "bad_composition"),
        ({}, 400, "invalid_json"),
        ({"composition": 4}, 400, "invalid_json"),
        ({"composition": "2x1", "force": True}, 400, "invalid_json"),
        ({"composition": "2x1", "pool": "nobody"}, 404, "pool_not_found"),
        ({"composition": "2x1", "pool": None}, 400, "which_pool"),
        ({"composition": "2x1"}, 400, "which_pool"),
    ],
)
def test_orders_that_make_no_sense(body: dict[str, Any], status: int, code: str) -> None:
    async def scenario() -> None:
        one, two = FakePool(2, pool_id="one"), FakePool(2, pool_id="two")
        urls = [one.url] if code == "bad_composition" else [one.url, two.url]
        async with pools(one, two), running(*urls) as it:
            await all_serve(it, *[1] * 2 * len(urls))
            async with it.client.post("/vertumnus/reconfigure", json=body) as response:
                assert response.status == status
                assert (await it.error(response))["code"] == code
            assert one.regroups == two.regroups == []

    run(scenario())


def test_only_operators_reconfigure_and_everybody_may_look() -> None:
    remote = {"x-forwarded-for": "203.0.113.9"}

    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url, control_key="secret") as it:
            await all_serve(it, 1, 1)
            for dry_run in (False, True):
                status, answer = await reconfigure(it, "1x2", remote, dry_run=dry_run)
                assert (status, answer["error"]["code"]) == (403, "operators_only")
            assert pool.regroups == []
            async with it.client.get("/vertumnus/composition", headers=remote) as response:
                assert response.status == 200
            right = {**remote, "authorization": "Bearer secret"}
            assert (await reconfigure(it, "1x2", right))[0] == 200

    run(scenario())


def test_without_a_pool() -> None:
    async def scenario() -> None:
        async with running("http://127.0.0.1:1") as it:
            status, answer = await reconfigure(it, "1x2")
            assert (status, answer["error"]["code"]) == (503, "no_pool")
            (pool,) = (await composition(it))["pools"]
            assert pool["pool"] is pool["epoch"] is pool["composition"] is None
            assert (pool["workers"], pool["moves"]) == ([], [])
            assert "cannot connect" in pool["trouble"]

    run(scenario())


def test_composition_shows_workers_and_the_last_moves() -> None:
    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2") as pool, running(pool.url) as it:
            await all_serve(it, 1, 1, 2)
            await reconfigure(it, "2x2")
            now = await composition(it)
            assert now["controller"] == {"mode": "observe", "last_decisions": []}
            (one,) = now["pools"]
            assert (one["pool"], one["url"], one["epoch"]) == ("fake", pool.url, 2)
            assert (one["composition"], one["moving"], one["trouble"]) == ("2x2", None, None)
            assert [w["id"] for w in one["workers"]] == ["fake/0x2", "fake/2x2"]
            assert {w["state"] for w in one["workers"]} == {"serving"}
            (move,) = one["moves"]
            assert (move["from"], move["to"], move["outcome"]) == ("2x1,1x2", "2x2", "committed")
            assert (move["stages_ms"]["switch"], move["total_ms"]) == (3.0, 26.0)

    run(scenario())


def test_composition_does_without_a_front_that_does_not_answer() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await all_serve(it, 1)
            pool.fail_composition = True
            (one,) = (await composition(it))["pools"]
            assert one["composition"] == "1x1"
            assert one["trouble"] == "it answers 503: its supervisor does not answer"
            assert one["moves"] == []

    run(scenario())


def test_moves_are_counted_and_timed() -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url) as it:
            await all_serve(it, 1, 1, 1, 1)
            await reconfigure(it, "1x4")
            await reconfigure(it, "2x2")
            pool.regroup = fake_pool.abandon
            await reconfigure(it, "1x4")
            samples = await it.samples()
            counts = {
                name.partition("{")[2]: value
                for name, value in samples.items()
                if name.startswith("vertumnus_moves_total")
            }
            assert counts == {
                'kind="merge",outcome="committed"}': 3,
                'kind="split",outcome="committed"}': 1,
                'kind="merge",outcome="abandoned"}': 1,
            }
            for stage, seconds in (("drain", 0.02), ("vote", 0.002), ("switch", 0.003)):
                name = f'vertumnus_move_stage_seconds_%s{{stage="{stage}"}}'
                assert samples[name % "count"] == 4
                assert samples[name % "sum"] == pytest.approx(4 * seconds)
            assert samples['vertumnus_pool_epoch{pool="fake"}'] == 5

    run(scenario())
