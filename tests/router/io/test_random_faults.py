"""Many requests, clients that leave, fronts and ranks that come and go, moves that are made and
not made: nothing is left over."""

import asyncio
import random

import aiohttp
import pytest
from vertumnus_router.core.config import PolicyConfig

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool, pools, refuse, sse_chunks
from tests.router.io.harness import Running, run, running, until
from tests.router.io.wire_faults import CHUNKED, EVENT, chunk, wire

WORSE = {"message": "no"}
ANSWERS = [
    fake_pool.stream,
    fake_pool.stream,
    fake_pool.stream,
    fake_pool.stream_slowly(tokens=4, gap_s=0.03),
    fake_pool.drop,
    fake_pool.drop_after(sse_chunks(2)[:1]),
    refuse(500, WORSE),
    refuse(503, WORSE),
    refuse(400, WORSE),
    wire(then="reset"),
    wire(CHUNKED),
    wire(CHUNKED + chunk(EVENT), then="half-close"),
    wire(CHUNKED + chunk(EVENT), b"zz"),
]


async def client(it: Running, source: random.Random, requests: int) -> int:
    """Send requests one after the other; how many were seen through to an answer."""
    answered = 0
    for _ in range(requests):
        patience_s = source.uniform(0, 0.4) if source.random() < 0.4 else None
        words = source.choice([1, 50, 3000])
        try:
            async with asyncio.timeout(patience_s):
                async with await it.chat(
                    stream=source.random() < 0.8,
                    messages=[{"role": "user", "content": "w " * words}],
                ) as response:
                    await response.read()
                    assert response.status in (200, 400, 429, 502, 503)
                    answered += 1
        except (TimeoutError, aiohttp.ClientError):
            pass
    return answered


MOVES = [fake_pool.regroup, fake_pool.regroup, fake_pool.abandon, fake_pool.switch_and_hang_up]
COMPOSITIONS = ["4x1", "2x1,1x2", "2x2", "1x4"]


async def move(it: Running, pool: FakePool, source: random.Random) -> None:
    while True:
        await asyncio.sleep(0.02)
        pool.regroup = source.choice(MOVES)
        body = {"pool": "fake", "composition": source.choice(COMPOSITIONS)}
        async with it.client.post("/vertumnus/reconfigure", json=body) as response:
            assert response.status in (200, 404, 409)


async def chaos(pool: FakePool, other: FakePool, source: random.Random) -> None:
    while True:
        await asyncio.sleep(0.1)
        match source.randrange(3):
            case 0:
                await other.stop_front()
                await asyncio.sleep(0.3)
                await other.start_front()
            case 1:
                rank = source.choice(pool.ranks)
                pool.lose_rank(rank.index, "it died")
                await asyncio.sleep(0.2)
                rank.begin_new_life()
                rank.silent = False
            case 2:
                blocks = [source.randrange(1000) for _ in range(3)]
                source.choice(pool.ranks).store(blocks, lose=source.random() < 0.5)


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_every_request_ends_once_and_nothing_stays(policy: str) -> None:
    source = random.Random(5)

    async def scenario() -> None:
        pool, other = FakePool(4, "2x1,1x2"), FakePool(1, pool_id="other")
        config = PolicyConfig(policy=policy, queue_timeout_s=1.0, queue_limit=16)
        async with pools(pool, other), running(pool.url, other.url, policy=config) as it:
            await it.ready()

            async def any_answer(
                here: FakePool, request: fake_pool.web.Request, seen: fake_pool.Seen
            ) -> fake_pool.web.StreamResponse:
                return await source.choice(ANSWERS)(here, request, seen)

            pool.answer = other.answer = any_answer
            trouble = asyncio.create_task(chaos(pool, other, source))
            moves = asyncio.create_task(move(it, pool, random.Random(6)))
            answered = sum(await asyncio.gather(*(client(it, source, 8) for _ in range(30))))
            for task in (trouble, moves):
                assert not task.done(), task
                task.cancel()
            assert answered > 100
            assert pool.moves
            await until(it.settled, "settled")
            await until(lambda: not pool.running and not other.running, "engines idle")
            samples = await it.samples()
            ended = sum(
                value for name, value in samples.items() if "vertumnus_requests_total" in name
            )
            assert answered <= ended <= 240
            assert samples["vertumnus_requests_pending"] == 0

    run(scenario())
