"""Answers pass through byte for byte, and say who gave them."""

import asyncio
import json

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool, sse_chunks
from tests.router.io.harness import run, running, until


def test_a_stream_arrives_byte_for_byte_and_names_its_worker() -> None:
    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url) as it:
            await it.ready()
            async with await it.chat(stream=True) as response:
                assert response.status == 200
                assert response.headers["content-type"] == fake_pool.SSE["content-type"]
                assert response.headers["x-vertumnus-worker"] == "fake/0x2"
                assert response.headers["x-vertumnus-cp-degree"] == "2"
                assert response.headers["x-vertumnus-attempts"] == "1"
                assert await response.read() == b"".join(sse_chunks(3))
            await until(it.settled, "settled")

    run(scenario())


def test_the_first_event_is_not_held_back() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = fake_pool.stream_slowly(tokens=3, gap_s=0.3)
            async with await it.chat(stream=True) as response:
                first = await response.content.readany()
                assert first == sse_chunks(3)[0]
                assert pool.running, "the engine is still generating"
                rest = await response.read()
            assert first + rest == b"".join(sse_chunks(3))

    run(scenario())


def test_the_body_travels_unchanged_with_the_routing_in_headers() -> None:
    # Odd but valid JSON: spaces, an escape, a float that a parser would rewrite.
    body = b'{ "messages" : [ {"role":"user","content":"h\\u00e9"} ],"temperature":1.0e-1 }'

    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url) as it:
            await it.ready()
            headers = {
                "content-type": "application/json",
                "authorization": "Bearer client",
                "x-custom": "kept",
                "x-request-id": "mine",
                "X-Override-Rid": "spoofed",
                "x-override-routed-dp-rank": "7",
                "x-override-priority": "99",
                "x-data-parallel-rank": "7",
            }
            async with it.client.post(
                "/v1/chat/completions?a=b", data=body, headers=headers
            ) as response:
                assert response.status == 200
                assert response.headers["x-request-id"] == "mine"
            seen = pool.seen[-1]
            assert seen.body == body
            assert seen.query == "a=b"
            assert seen.headers["x-custom"] == "kept"
            assert seen.headers["authorization"] == "Bearer client"
            assert seen.headers["x-request-id"] == "mine"
            assert seen.rank == 0
            assert seen.headers["x-data-parallel-rank"] == "0"
            assert len(seen.rid) == 32
            assert int(seen.rid, 16) >= 0
            assert "x-override-priority" not in seen.headers

    run(scenario())


def test_every_inference_endpoint_is_served_streaming_and_not() -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/generate": {"text": "x"},
    }

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for path, body in bodies.items():
                for stream in (False, True):
                    async with it.client.post(path, json={**body, "stream": stream}) as response:
                        assert response.status == 200, (path, stream)
                        answer = await response.read()
                    if stream:
                        assert answer == b"".join(sse_chunks(3))
                    else:
                        assert json.loads(answer)["choices"]
                    assert pool.seen[-1].path == path
            await until(it.settled, "settled")

    run(scenario())


def test_a_slow_client_slows_the_engine_down_and_loses_nothing() -> None:
    chunk = b"data: " + b"x" * 65536 + b"\n\n"

    async def long_answer(
        pool: FakePool, request: fake_pool.web.Request, seen: fake_pool.Seen
    ) -> fake_pool.web.StreamResponse:
        response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
        await response.prepare(request)
        for _ in range(400):
            await response.write(chunk)
        await response.write_eof()
        return response

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = long_answer
            async with await it.chat(stream=True) as response:
                await asyncio.sleep(0.5)
                assert pool.running, "26 MB were buffered somewhere instead of waiting"
                total = 0
                async for part in response.content.iter_any():
                    total += len(part)
            assert total == 400 * len(chunk)
            await until(it.settled, "settled")

    run(scenario())


def test_connections_to_the_front_are_reused() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            ports = set()

            async def note_port(
                pool: FakePool, request: fake_pool.web.Request, seen: fake_pool.Seen
            ) -> fake_pool.web.StreamResponse:
                assert request.transport is not None
                ports.add(request.transport.get_extra_info("peername")[1])
                return await fake_pool.stream(pool, request, seen)

            pool.answer = note_port
            for _ in range(5):
                async with await it.chat() as response:
                    await response.read()
            assert len(ports) == 1

    run(scenario())
