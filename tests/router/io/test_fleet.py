"""Servers come and go while the router runs."""

import asyncio

import pytest
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.fleet import AlreadyThere, Role

from tests.router.io.fake_decode import FakeDecode, live, paired
from tests.router.io.fake_pool import FakePool, pools, stream_slowly
from tests.router.io.harness import Running, run, running, until


async def answered_by(it: Running) -> str:
    async with await it.chat() as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-vertumnus-worker"].partition("/")[0]


async def joined(it: Running, count: int) -> None:
    await until(lambda: len(it.router.core.pools) == count, f"{count} pool(s)")


def test_a_pool_joins_and_another_leaves_without_a_lost_request() -> None:
    async def scenario() -> None:
        old, new = FakePool(1, pool_id="old"), FakePool(1, pool_id="new")
        old.answer = stream_slowly(40, 0.02)
        async with pools(old, new), running(old.url) as it:
            await it.ready()
            async with await it.chat(stream=True) as answer:
                assert it.router.join(new.url)
                await joined(it, 2)
                assert it.router.leave(old.url + "/")
                assert not it.router.leave(old.url), "it is leaving already"
                assert [await answered_by(it) for _ in range(4)] == ["new"] * 4
                assert len(it.router.core.pools) == 2, "its stream goes on"
                assert (await answer.read()).count(b"data: ") == 41
            await joined(it, 1)
            await until(lambda: len(it.router.pools) == 1, "its link is closed")
            assert old.seen[0].finished and not old.aborted
            assert not it.router.leave(old.url), "it is gone"
            assert await answered_by(it) == "new"
            await until(it.settled, "settled")

    run(scenario())


def test_a_pool_that_joins_again_while_it_leaves_stays() -> None:
    async def scenario() -> None:
        pool = FakePool(1)
        pool.answer = stream_slowly(20, 0.02)
        async with pools(pool), running(pool.url) as it:
            await it.ready()
            async with await it.chat(stream=True) as answer:
                assert it.router.leave(pool.url)
                assert it.router.not_ready()
                assert it.router.join(pool.url)
                assert not it.router.not_ready()
                await answer.read()
            await asyncio.sleep(0.3)
            assert len(it.router.pools) == 1
            assert await answered_by(it) == "fake"

    run(scenario())


def test_a_pool_that_was_never_reached_leaves_at_once() -> None:
    async def scenario() -> None:
        pool = FakePool(1)
        async with pools(pool), running(pool.url, "http://127.0.0.1:9") as it:
            await it.ready()
            assert it.router.leave("http://127.0.0.1:9")
            await until(lambda: len(it.router.pools) == 1, "gone")

    run(scenario())


def test_a_pool_that_dies_while_it_leaves_is_not_waited_for() -> None:
    async def scenario() -> None:
        dying, other = FakePool(1, pool_id="dying"), FakePool(1, pool_id="other")
        dying.answer = stream_slowly(1000, 0.02)
        async with pools(dying, other), running(dying.url) as it:
            await it.ready()
            async with await it.chat(stream=True):
                it.router.join(other.url)
                await joined(it, 2)
                it.router.leave(dying.url)
                await dying.stop_front()
                await until(lambda: len(it.router.pools) == 1, "gone")
            assert await answered_by(it) == "other"

    run(scenario())


def test_decode_servers_join_and_leave() -> None:
    async def scenario() -> None:
        async with paired(2) as (_, (old,), it):
            new = FakeDecode(old.rooms)
            async with new:
                assert it.router.join(new.url, Role.DECODE)
                await live(it, 2)
                assert it.router.leave(old.url)
                await live(it, 1)
                for _ in range(3):
                    async with await it.chat() as answer:
                        assert answer.status == 200
                assert len(new.seen) == 3 and not old.seen
                with pytest.raises(AlreadyThere, match="let it leave first"):
                    it.router.join(new.url)

    run(scenario())


def test_a_decode_server_that_leaves_is_not_healthy() -> None:
    async def scenario() -> None:
        async with paired(1) as (_, (decode,), it):
            await it.ready()
            async with await it.chat(stream=True):
                assert it.router.leave(decode.url)
                if it.router.decodes:  # its request may have ended
                    assert any("is leaving" in why for why in it.router.not_ready())
                    async with it.client.get("/workers") as answer:
                        found = (await answer.json())["workers"]
                    for one in found:
                        if one["worker_type"] == "decode":
                            assert (one["state"], one["is_healthy"]) == ("draining", False)

    run(scenario())


def test_a_decode_server_that_nobody_needs_keeps_no_pool_away() -> None:
    async def scenario() -> None:
        pool = FakePool(1)
        async with pools(pool), running(pool.url) as it:
            await it.ready()
            with pytest.raises(AlreadyThere, match="decode themselves"):
                it.router.join("http://127.0.0.1:9", Role.DECODE)
            assert not it.router.decodes
            await pool.stop_front()
            await joined(it, 0)
            await pool.start_front()
            await joined(it, 1)
            assert await answered_by(it) == "fake"

    run(scenario())


def test_what_is_no_url_is_refused() -> None:
    async def scenario() -> None:
        pool = FakePool(1)
        async with pools(pool), running(pool.url) as it:
            await it.ready()
            with pytest.raises(ConfigError, match="is not an http"):
                it.router.join("10.0.0.1:30000")
            with pytest.raises(ConfigError, match="with a user name or a password") as refused:
                it.router.join("http://me:secret@10.0.0.1:30000")
            assert "secret" not in str(refused.value)
            assert not it.router.join(pool.url), "it is here already"

    run(scenario())
