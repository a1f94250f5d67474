"""A client that leaves, in whatever phase, leaves nothing behind anywhere."""

import asyncio
import contextlib
import random
import socket
from typing import Any

import aiohttp
from vertumnus_router.core.config import LateConfig, PolicyConfig
from vertumnus_router.io.config import Limits

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import Running, run, running, until


async def leave(it: Running, **fields: object) -> "asyncio.Task[aiohttp.ClientResponse]":
    """Start a chat whose client can be made to leave by cancelling the task."""
    task = asyncio.create_task(it.chat(**fields))
    await asyncio.sleep(0)
    return task


async def give_up(task: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await task).close()


def test_before_the_first_byte() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.hang
            task = await leave(it, stream=True)
            await until(lambda: pool.running, "running")
            await give_up(task)
            await until(it.settled, "settled", limit_s=1)
            await until(lambda: pool.aborted, "aborted", limit_s=1)
            await until(lambda: not pool.running, "not running", limit_s=1)
            assert pool.aborted[0] == pool.seen[0].rid
            samples = await it.samples()
            name = 'vertumnus_requests_total{degree="1",outcome="cancelled",worker="fake/0x1"}'
            assert samples[name] == 1

    run(scenario())


def test_in_the_middle_of_the_stream() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.stream_slowly(tokens=1000, gap_s=0.02)
            response = await it.chat(stream=True)
            await response.content.readany()
            response.close()
            await until(it.settled, "settled", limit_s=1)
            await until(lambda: not pool.running, "not running", limit_s=1)
            await until(lambda: pool.aborted, "aborted", limit_s=1)
            assert pool.seen[0].disconnected
            assert not pool.seen[0].finished

    run(scenario())


def test_while_the_connection_to_the_front_is_being_made() -> None:
    async def scenario() -> None:
        limits = Limits(stop_s=1.0, probe_s=60.0, connect_s=60.0)
        async with FakePool(1) as pool, running(pool.url, limits=limits) as it:
            await it.ready()
            await pool.stop_front()
            with contextlib.ExitStack() as held:
                # Its queue of connections is full, so the next ones get no answer at all.
                listener = held.enter_context(socket.socket())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", pool.port))
                listener.listen(0)
                for _ in range(4):
                    filler = held.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex(("127.0.0.1", pool.port))
                task = await leave(it, stream=True)
                await until(lambda: it.router.core.pending_count, "accepted")
                exchange = next(iter(it.router.hot.live))
                await until(lambda: exchange._call is not None, "under way")
                connecting = exchange._call.connecting  # type: ignore[union-attr]
                await give_up(task)
                await until(it.settled, "settled", limit_s=1)
                assert connecting is not None
                await until(connecting.cancelled, "no longer connecting", limit_s=1)

    run(scenario())


def test_while_its_connection_is_full_and_it_does_not_read() -> None:
    async def flood(pool: FakePool, request: Any, seen: fake_pool.Seen) -> Any:
        response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = flood
            response = await it.chat(stream=True)
            await until(lambda: response.content.total_bytes > 0, "it streams")
            exchange = next(iter(it.router.hot.live))
            await until(lambda: exchange._heard_s is None, "the client is waited for")
            response.close()
            await until(it.settled, "settled", limit_s=1)
            await until(lambda: not pool.running, "not running", limit_s=1)
            await until(lambda: pool.aborted == [pool.seen[0].rid], "aborted", limit_s=1)

    run(scenario())


def test_while_queued_at_the_router() -> None:
    # Late binding: one worker that is busy, a batch budget of one request and one look-ahead.
    policy = PolicyConfig(policy="late", late=LateConfig(window=1))

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, policy=policy) as it:
            await it.ready()
            pool.answer = fake_pool.hang
            long = {"messages": [{"role": "user", "content": "word " * 2500}], "max_tokens": 4}
            tasks = [await leave(it, **long) for _ in range(8)]
            await until(lambda: it.router.core.pending_count == 8, "all accepted")
            # What left the queue may still be on its way to the pool.
            await until(
                lambda: 0 < it.router.core.queued_count == 8 - len(pool.seen), "some are queued"
            )
            for task in tasks:
                await give_up(task)
            await until(it.settled, "settled", limit_s=2)
            await until(lambda: not pool.running, "not running", limit_s=2)
            assert len(pool.seen) <= 8
            await until(
                lambda: {seen.rid for seen in pool.seen} <= set(pool.aborted), "all aborted"
            )

    run(scenario())


def test_a_batch_is_aborted_prompt_by_prompt() -> None:
    """SGLang knows the prompts of a batch as RID_0, RID_1, …, and aborts no prefix of them."""

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.hang
            task = asyncio.create_task(it.client.post("/generate", json={"text": ["a", "b"]}))
            await until(lambda: pool.running, "running")
            task.cancel()
            await until(lambda: len(pool.aborted) >= 2, "both aborted")
            rid = pool.seen[0].rid
            assert pool.aborted[:2] == [f"{rid}_0", f"{rid}_1"]
            await until(it.settled, "settled")

    run(scenario())


def test_while_the_body_is_being_sent() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            host, port = it.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
            )
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
            async with await it.chat() as response:
                assert response.status == 200
            await until(it.settled, "settled")
            assert len(pool.seen) == 1

    run(scenario())


def test_64_streams_with_random_disconnects_leave_no_reservation() -> None:
    seed = random.Random(7)

    async def one(it: Running, after_s: float | None) -> bool:
        try:
            async with asyncio.timeout(after_s):
                async with await it.chat(stream=True) as response:
                    assert response.status == 200
                    answer = await response.read()
        except TimeoutError:
            return False
        assert answer == b"".join(fake_pool.sse_chunks(20))
        return True

    async def scenario() -> None:
        async with FakePool(4, "2x1,1x2") as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.stream_slowly(tokens=20, gap_s=0.02)
            leaving = [seed.uniform(0.0, 0.5) if i % 2 else None for i in range(64)]
            done = await asyncio.gather(*(one(it, after) for after in leaving))
            assert sum(done) >= 32
            await until(it.settled, "settled", limit_s=2)
            await until(lambda: not pool.running, "the engine is idle", limit_s=2)
            for worker in it.router.core.workers(it.router.clock.now()):
                assert worker.queue_s == 0
                assert worker.requests == ()
            samples = await it.samples()
            ended = {
                name: value
                for name, value in samples.items()
                if name.startswith("vertumnus_requests_total")
            }
            finished = sum(value for name, value in ended.items() if '"ok"' in name)
            assert finished == sum(done)
            reached = len(pool.seen)
            assert finished <= reached <= sum(ended.values()) <= 64

    run(scenario())


def test_stopping_lets_streams_end_and_turns_new_requests_away() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.stream_slowly(tokens=10, gap_s=0.05)
            response = await it.chat(stream=True)
            await response.content.readany()
            it.stop.set()
            await until(lambda: it.router.hot.stopping, "stopping")
            assert it.router.not_ready() == ["the router is stopping"]
            while True:  # until the listening socket is closed too
                try:
                    async with await it.chat() as refused:
                        assert refused.status == 503
                except aiohttp.ClientConnectorError:
                    break
            rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")

    run(scenario())


def test_streams_that_do_not_end_in_time_are_cut_and_aborted() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool:
            async with running(pool.url) as it:
                await it.ready()
                pool.answer = fake_pool.hang
                task = await leave(it)
                await until(lambda: pool.running, "running")
            with contextlib.suppress(aiohttp.ClientError):
                (await task).close()
            await until(lambda: not pool.running, "not running", limit_s=2)
            assert it.settled()

    run(scenario())
