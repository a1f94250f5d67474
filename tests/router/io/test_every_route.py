"""Whichever way a request comes in, it is reserved where it goes, and the next one goes on from
there."""

import asyncio
from typing import Any

import pytest
from vertumnus_router.core.config import POLICIES, ControllerConfig, PolicyConfig, PrefixConfig

from tests.router.io import fake_pool
from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running, until

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x " * 3000}]},
    "/v1/completions": {"prompt": "x " * 3000},
    "/generate": {"text": "x " * 3000},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_load_is_reserved_and_spread(policy: str) -> None:
    config = PolicyConfig(
        policy=policy,
        controller=ControllerConfig(mode="off"),
        prefix=PrefixConfig(mode="off"),
    )

    async def scenario() -> None:
        async with FakePool(4) as pool, running(pool.url, policy=config) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 4, "all")
            pool.answer = fake_pool.hang
            for path, body in ROUTES.items():
                for stream in (True, False):
                    pool.seen.clear()
                    tasks = [
                        asyncio.create_task(it.client.post(path, json={**body, "stream": stream}))
                        for _ in range(4)
                    ]
                    await until(lambda: len(pool.seen) == 4, f"{path} {stream}: all are out")
                    assert {seen.rank for seen in pool.seen} == {0, 1, 2, 3}, (path, stream)
                    workers = it.router.core.workers(it.router.clock.now())
                    assert all(w.queue_s > 0 and len(w.requests) == 1 for w in workers)
                    for task in tasks:
                        task.cancel()
                    await until(it.settled, "settled")
                    await until(lambda: not pool.running, "idle")

    run(scenario())
