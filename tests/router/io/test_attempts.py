"""Attempts fail before the first byte and are repeated elsewhere; after it they never are."""

import asyncio
from typing import Any

import pytest
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.io.config import Limits

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool, drop_after, pools, refuse, sse_chunks
from tests.router.io.harness import run, running, until

ENGINE_ERROR = {"object": "error", "message": "boom", "type": "InternalServerError", "code": 500}


@pytest.mark.parametrize(
    "broken",
    [
        fake_pool.drop,
        refuse(500, ENGINE_ERROR),
        refuse(503, ENGINE_ERROR),
        refuse(429, ENGINE_ERROR),
        drop_after([]),
    ],
    ids=["dropped", "500", "503", "429", "dropped after the head"],
)
def test_a_failure_before_the_first_byte_is_hidden_by_another_attempt(broken: Any) -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.answers.append(broken)
            async with await it.chat(stream=True) as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert await response.read() == b"".join(sse_chunks(3))
            first, second = pool.seen
            assert first.rank != second.rank
            assert first.rid != second.rid
            assert first.rid[:30] == second.rid[:30]
            assert first.body == second.body
            await until(it.settled, "settled")

    run(scenario())


def test_the_body_is_let_go_with_the_first_byte() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            may_answer = asyncio.Event()

            async def answer(*request: Any) -> Any:
                await may_answer.wait()
                return await fake_pool.stream_slowly(tokens=1000, gap_s=0.02)(*request)

            pool.answer = answer
            task = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.running, "running")
            (exchange,) = it.router.hot.live
            assert b"hello" in exchange._body, "kept for another attempt"
            may_answer.set()
            async with await task as response:
                await response.content.readany()
                assert exchange._body == b""
                assert exchange._call is not None
                assert exchange._call.post is None  # type: ignore[union-attr]

    run(scenario())


def test_nothing_is_repeated_after_the_first_byte() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = drop_after(sse_chunks(3)[:1])
            async with await it.chat(stream=True) as response:
                answer = await response.read()
            assert len(pool.seen) == 1
            first, rest = answer[: len(sse_chunks(3)[0])], answer[len(sse_chunks(3)[0]) :]
            assert first == sse_chunks(3)[0]
            assert rest.startswith(b'\n\ndata: {"error":{')
            assert b"[DONE]" not in rest
            await until(it.settled, "settled")

    run(scenario())


def test_a_cut_answer_that_is_no_stream_is_hidden_by_another_attempt() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            headers = {"content-type": "application/json", "content-length": "100"}
            pool.answers.append(drop_after([b'{"choices":'], headers))
            async with await it.chat() as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert (await response.json())["choices"]
            await until(it.settled, "settled")

    run(scenario())


def test_a_cut_answer_too_long_to_be_held_back_ends_as_a_broken_connection() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            headers = {"content-type": "application/json", "content-length": "1000000"}
            pool.answer = drop_after([b'{"choices":', b" " * 500_000], headers)
            async with await it.chat() as response:
                assert response.status == 200
                with pytest.raises(Exception, match="payload"):
                    await response.read()
            assert len(pool.seen) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_attempts_run_out() -> None:
    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = refuse(500, ENGINE_ERROR)
            async with await it.chat() as response:
                assert response.status == 502
                error = await it.error(response)
            assert error["code"] == "worker_error"
            assert "boom" in error["message"]
            assert len(pool.seen) == 3
            assert len({seen.rank for seen in pool.seen}) == 3
            await until(it.settled, "settled")

    run(scenario())


def test_a_fault_of_the_request_is_answered_at_once_in_the_engines_words() -> None:
    said = {"object": "error", "message": "n must be positive", "type": "BadRequest", "code": 400}

    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = refuse(400, said)
            async with await it.chat(n=-1) as response:
                assert response.status == 400
                error = await it.error(response)
            assert error == {
                "message": "n must be positive",
                "type": "invalid_request_error",
                "param": None,
                "code": 400,
            }
            assert len(pool.seen) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_lost_rank_is_left_for_another_before_the_first_byte() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.answers.append(fake_pool.hang)
            task = it.chat(stream=True)
            request = fake_pool.asyncio.create_task(task)
            await until(lambda: pool.running, "running")
            rank = pool.seen[0].rank
            pool.lose_rank(rank, "its process exited")
            async with await request as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert response.headers["x-vertumnus-worker"] == f"fake/{1 - rank}x1"
                await response.read()
            await until(lambda: pool.seen[0].rid in pool.aborted, "the old attempt is aborted")
            await until(it.settled, "settled")

    run(scenario())


def test_a_lost_rank_ends_a_stream_with_an_error_event() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.stream_slowly(tokens=1000, gap_s=0.02)
            async with await it.chat(stream=True) as response:
                await response.content.readany()
                pool.lose_rank(pool.seen[0].rank, "its process exited")
                rest = await response.read()
            assert b'data: {"error":{' in rest
            assert b"worker_lost" in rest
            assert len(pool.seen) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_dead_front_is_left_for_another_pool_and_rejoined_when_it_returns() -> None:
    async def scenario() -> None:
        one, two = FakePool(1, pool_id="one"), FakePool(1, pool_id="two")
        async with pools(one, two), running(one.url, two.url) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            await one.stop_front()
            for _ in range(4):
                async with await it.chat() as response:
                    assert response.status == 200
                    assert response.headers["x-vertumnus-worker"] == "two/0x1"
            await until(lambda: it.router.pools[0].description is None, "left")
            await one.start_front()
            await until(lambda: it.router.pools[0].description is not None, "rejoined")
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            assert it.router.pools[0].joins == 2

    run(scenario())


def test_a_dead_front_costs_one_attempt_however_many_workers_it_has() -> None:
    async def scenario() -> None:
        one, two = FakePool(4, pool_id="one"), FakePool(1, pool_id="two")
        policy = PolicyConfig(attempts=2)
        limits = Limits(stop_s=1.0, probe_s=60.0)
        async with (
            pools(one, two),
            running(one.url, two.url, policy=policy, limits=limits) as it,
        ):
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 5, "all")
            # Nobody notices yet that the front is gone.
            it.router.pools[0].suspect = lambda: None  # type: ignore[method-assign]
            await one.stop_front()
            for _ in range(8):
                async with await it.chat() as response:
                    assert response.status == 200
                    assert response.headers["x-vertumnus-worker"] == "two/0x1"
            failures = 'vertumnus_attempt_failures_total{failure="unreachable"}'
            assert (await it.samples())[failures] > 0

    run(scenario())


def test_a_dead_front_without_another_is_an_error_that_names_the_cause() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            await pool.stop_front()
            async with await it.chat() as response:
                assert response.status in (502, 503)
                error = await it.error(response)
            assert pool.url in error["message"] or "pool" in error["message"]
            await until(lambda: it.router.pools[0].description is None, "left")
            async with await it.chat() as response:
                assert response.status == 503
                assert response.headers["retry-after"]
                await it.error(response)
            async with it.client.get("/readiness") as response:
                assert response.status == 503
            async with it.client.get("/health") as response:
                assert response.status == 200
            await until(it.settled, "settled")

    run(scenario())
