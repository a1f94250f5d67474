"""Who keeps others waiting without end is given up: workers, decode servers, clients."""

import asyncio
import json
import socket
from typing import Any

import pytest
from vertumnus_router.clock import VirtualClock
from vertumnus_router.io.config import Limits
from vertumnus_router.io.stalls import look_for_stalls

from tests.router.io import fake_pool
from tests.router.io.fake_decode import WHOLE_STREAM, paired
from tests.router.io.fake_pool import FakePool, sse_chunks
from tests.router.io.harness import run, running, until

SHORT = Limits(stop_s=1.0, probe_s=0.2, answer_s=0.6, stream_idle_s=0.6)
CHUNK = b"data: " + b"x" * 65536 + b"\n\n"


async def long_answer(pool: FakePool, request: Any, seen: fake_pool.Seen) -> Any:
    response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
    await response.prepare(request)
    for _ in range(400):
        await response.write(CHUNK)
    await response.write_eof()
    return response


def test_a_worker_that_does_not_answer_is_aborted_and_left_for_another() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url, limits=SHORT) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            pool.answers.append(fake_pool.hang)
            async with await it.chat(stream=True) as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert await response.read() == b"".join(sse_chunks(3))
            first, second = pool.seen
            assert first.rank != second.rank
            await until(lambda: first.rid in pool.aborted, "aborted")
            stalled = 'vertumnus_attempt_failures_total{failure="stalled"}'
            assert (await it.samples())[stalled] == 1
            await until(it.settled, "settled")

    run(scenario())


def test_with_no_other_worker_the_client_is_told() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, limits=SHORT) as it:
            await it.ready()
            pool.answer = fake_pool.hang
            async with await it.chat() as response:
                assert response.status == 504
                error = await it.error(response)
            assert error["code"] == "worker_stalled"
            assert error["message"] == "nothing came from the engine for 0.6 s"
            await until(it.settled, "settled")

    run(scenario())


def test_a_stream_that_goes_on_is_left_alone_however_long_it_takes() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, limits=SHORT) as it:
            await it.ready()
            pool.answer = fake_pool.stream_slowly(tokens=20, gap_s=0.08)
            async with await it.chat(stream=True) as response:
                assert await response.read() == b"".join(sse_chunks(20))

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_pair_of_which_one_leg_hangs_is_ended_on_both_sides(leg: str) -> None:
    async def scenario() -> None:
        async with paired(2, decodes=2, limits=SHORT) as (pool, decodes, it):
            if leg == "prefill":
                pool.answers.append(fake_pool.hang)
            else:
                for decode in decodes:
                    decode.answers.append(fake_pool.hang)
            request = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.seen and any(d.seen for d in decodes), "both legs")
            for decode in decodes:
                decode.answers.clear()  # the next one is answered
            async with await request as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert await response.read() == WHOLE_STREAM
            rid = pool.seen[0].rid
            first = next(d for d in decodes if any(seen.rid == rid for seen in d.seen))
            await until(lambda: rid in pool.aborted, "the prefill side is told")
            await until(lambda: rid in first.aborted, "the decode side is told")
            failed = f'vertumnus_pair_failures_total{{cause="stalled",leg="{leg}"}}'
            assert (await it.samples()).get(failed, 0) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_client_that_pauses_is_not_taken_for_a_worker_that_stalls() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, limits=SHORT) as it:
            await it.ready()
            pool.answer = long_answer
            async with await it.chat(stream=True) as response:
                exchange = next(iter(it.router.hot.live))
                await until(lambda: exchange._heard_s is None, "the client is waited for")
                await asyncio.sleep(1.5)
                assert len(await response.read()) == 400 * len(CHUNK)

    run(scenario())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux can do this")
def test_a_client_that_never_reads_is_dropped_and_its_request_aborted() -> None:
    limits = Limits(stop_s=1.0, probe_s=0.2, client_idle_s=0.5)
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url, limits=limits) as it:
            await it.ready()
            pool.answer = long_answer
            host, port = it.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as client:
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
                    b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
                )
                await until(lambda: pool.running, "running")
                await until(lambda: not pool.running, "not running", limit_s=15)
                await until(lambda: pool.aborted == [pool.seen[0].rid], "aborted")
                await until(it.settled, "settled")

    run(scenario())


def test_nobody_is_blamed_while_the_router_itself_stood_still() -> None:
    looks: list[float] = []

    class One:
        def give_up_if_stalled(self, now: float, limits: Limits) -> None:
            looks.append(now)

    class Clock(VirtualClock):
        """Sleeps as long as asked, but for the third time, when the process is stopped."""

        sleeps = 0

        async def sleep(self, seconds: float) -> None:
            self.sleeps += 1
            if self.sleeps == 5:
                raise asyncio.CancelledError
            await super().sleep(60.0 if self.sleeps == 3 else seconds)

    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):
            await look_for_stalls(lambda: [One()], Limits(), Clock())
        assert looks == [1.0, 2.0, 63.0]

    run(scenario())
