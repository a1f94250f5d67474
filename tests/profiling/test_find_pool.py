"""A pool by its front or by its router."""

import asyncio

import pytest
from vertumnus_router.core.config import ControllerConfig, PolicyConfig

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.profiling.live_pool import PoolError, find_pool
from tests.router.io.fake_pool import FakePool, pools
from tests.router.io.harness import run, running


def test_a_front_and_its_router_lead_to_the_same_pool() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            for url in (pool.url, it.url, f"{it.url}/"):
                found = await asyncio.to_thread(find_pool, url)
                assert (found.url, found.description.pool_id) == (pool.url, "fake")

    run(scenario())


def test_of_several_pools_one_has_to_be_named() -> None:
    async def scenario() -> None:
        one, two = FakePool(1, pool_id="one"), FakePool(1, pool_id="two")
        async with pools(one, two), running(one.url, two.url) as it:
            await it.ready()
            with pytest.raises(ConfigurationError, match="--pool: one, two"):
                await asyncio.to_thread(find_pool, it.url)
            assert (await asyncio.to_thread(find_pool, it.url, None, "two")).url == two.url
            with pytest.raises(ConfigurationError, match="--pool: one, two"):
                await asyncio.to_thread(find_pool, it.url, None, "three")

    run(scenario())


def test_a_router_that_moves_its_pools_is_in_the_way() -> None:
    async def scenario() -> None:
        policy = PolicyConfig(controller=ControllerConfig(mode="on"))
        async with FakePool(1) as pool, running(pool.url, policy=policy) as it:
            await it.ready()
            with pytest.raises(ConfigurationError, match="--controller observe"):
                await asyncio.to_thread(find_pool, it.url)

    run(scenario())


def test_a_pool_that_starts_or_is_none_says_so() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool:
            pool.starting = True
            with pytest.raises(PoolError, match="503: the pool is starting"):
                await asyncio.to_thread(find_pool, pool.url)

    run(scenario())
    with pytest.raises(PoolError, match="does not answer"):
        find_pool("http://127.0.0.1:9")
