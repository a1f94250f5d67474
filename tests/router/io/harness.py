"""Run a router inside a test, on the loop that production uses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from vertumnus_router.clock import WallClock
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.io.config import Limits, RouterConfig
from vertumnus_router.io.router import Router
from vertumnus_router.io.server import listen, serve

LIMIT_S = 20.0


def run(scenario: Coroutine[Any, Any, None], limit_s: float = LIMIT_S) -> None:
    """Run a scenario to its end, at most ``limit_s``."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


async def until(condition: Callable[[], Any], what: str, limit_s: float = 8.0) -> None:
    """Wait for a condition; fails with ``what`` when it does not come true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        await asyncio.sleep(0.005)


@dataclass
class Running:
    """A router that serves, and a client of it."""

    router: Router
    url: str
    client: aiohttp.ClientSession
    stop: asyncio.Event

    async def ready(self) -> "Running":
        await until(lambda: not self.router.not_ready(), f"ready: {self.router.not_ready()}")
        return self

    def settled(self) -> bool:
        """Nothing is left of any request."""
        return (
            self.router.core.pending_count == 0
            and not list(self.router.hot.live)
            and self.router.core.violations() == []
        )

    async def chat(self, **fields: Any) -> aiohttp.ClientResponse:
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def error(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        """The error of an answer, which must have OpenAI's shape."""
        content = await response.json()
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert content["error"]["message"]
        return dict(content["error"])

    async def samples(self) -> dict[str, float]:
        """The metrics, by name and labels as written."""
        async with self.client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


@contextlib.asynccontextmanager
async def running(
    *urls: str, limits: Limits | None = None, policy: PolicyConfig | None = None, **more: Any
) -> AsyncIterator[Running]:
    """A router in front of the pools at ``urls``, stopped at the end."""
    config = RouterConfig(
        pool_urls=urls,
        port=0,
        limits=limits or Limits(stop_s=1.0, probe_s=0.2),
        policy=policy or PolicyConfig(queue_timeout_s=2.0),
        **more,
    )
    router = Router(config, WallClock())
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop, hurry = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(serve(router, listener, stop, hurry))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as client:
        await until(lambda: router.pools or config.discovery, "started")
        try:
            yield Running(router, url, client, stop)
        finally:
            stop.set()
            await serving
