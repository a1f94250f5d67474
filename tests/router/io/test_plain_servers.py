"""Servers of plain SGLang as workers of the router, alone and beside pools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from vertumnus_router.core.config import BreakerConfig, PolicyConfig
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.fleet import Role
from vertumnus_router.io.hashing import block_hashes

from tests.router.io.chat_cases import SMOL, write_model
from tests.router.io.fake_decode import FakeDecode, Rooms, decoding, live
from tests.router.io.fake_plain import PAGE, FakePlain
from tests.router.io.fake_pool import (
    FakePool,
    Seen,
    hang,
    pools,
    refuse,
    sse_chunks,
    stream,
)
from tests.router.io.harness import Running, run, running, until


def plain(*urls: str, **more: Any) -> Any:
    return running(worker_urls=urls, **more)


async def workers(it: Running) -> dict[str, dict[str, Any]]:
    async with it.client.get("/workers") as answer:
        return {worker["id"]: worker for worker in (await answer.json())["workers"]}


#: Long enough that it counts who has it.
LONG = [{"role": "user", "content": "word " * 20_000}]


def await_later(work: Any) -> Any:
    return asyncio.ensure_future(work)


async def joined(it: Running, count: int = 1) -> None:
    serving = lambda: [w for w in it.router.core.workers(it.router.clock.now()) if not w.reason]  # noqa: E731
    await until(lambda: len(serving()) == count, f"{count} worker(s)")


def test_each_rank_of_a_plain_server_is_a_worker_of_its_own_degree() -> None:
    async def scenario() -> None:
        async with FakePlain(dp=2, cp=2) as server, plain(server.url) as it:
            await joined(it, 2)
            found = await workers(it)
            assert {name: (w["degree"], w["ranks"]) for name, w in found.items()} == {
                f"{server.name}/0x2": (2, [0, 1]),
                f"{server.name}/2x2": (2, [2, 3]),
            }
            async with await it.chat(stream=True) as answer:
                assert await answer.read() == b"".join(sse_chunks(3))
                worker = answer.headers["x-vertumnus-worker"]
            (seen,) = server.seen
            assert seen.fields["routed_dp_rank"] == {"0x2": 0, "2x2": 1}[worker.rpartition("/")[2]]
            assert len(str(seen.fields["rid"])) == 32
            assert not any(name.startswith("x-override-") for name in seen.headers)
            assert seen.fields["messages"] == [{"role": "user", "content": "hello"}]
            await until(it.settled, "settled")

    run(scenario())


def test_a_server_of_one_rank_is_left_to_route_by_itself() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            async with await it.chat(routed_dp_rank=None, rid="mine") as answer:
                assert answer.status == 200
            assert server.seen[0].fields["routed_dp_rank"] is None
            assert server.seen[0].fields["rid"] != "mine"

    run(scenario())


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_load_is_spread_though_nobody_reports_prefills(policy: str) -> None:
    async def scenario() -> None:
        async with FakePlain() as a, FakePlain() as b:
            a.answer = b.answer = hang
            async with plain(a.url, b.url, policy=PolicyConfig(policy=policy)) as it:
                await joined(it, 2)
                asked = [await_later(it.chat(messages=LONG, stream=True)) for _ in range(4)]
                await until(lambda: len(a.running) + len(b.running) == 4, "all are there")
                assert len(a.running) == len(b.running) == 2
                for one in asked:
                    one.cancel()
                await until(it.settled, "settled")

    run(scenario())


def test_an_answer_in_one_piece_does_not_hold_its_reservation_while_it_decodes() -> None:
    """Late binding gives a worker no more prompts than it can prefill at once."""

    async def scenario() -> None:
        async with FakePlain(chunked_prefill_size=8) as server:
            server.answer = hang
            async with plain(server.url, policy=PolicyConfig(policy="late")) as it:
                await joined(it)
                asked = [await_later(it.chat()) for _ in range(6)]
                await until(lambda: len(server.running) == 6, "all run")
                for one in asked:
                    one.cancel()
                await until(it.settled, "settled")

    run(scenario())


def test_a_prediction_speaks_for_no_server() -> None:
    async def late_fault(server: Any, request: Any, seen: Seen) -> Any:
        await asyncio.sleep(0.4)  # the prefill was predicted to end long before
        return await refuse(500, {"error": {"message": "broken"}})(server, request, seen)

    async def scenario() -> None:
        policy = PolicyConfig(attempts=1, breaker=BreakerConfig(failure_threshold=3))
        async with FakePlain() as server, plain(server.url, policy=policy) as it:
            await joined(it)
            server.answer = late_fault
            for _ in range(3):
                async with await it.chat() as answer:
                    assert answer.status >= 500
            assert it.router.core.breakers_opened == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_client_that_leaves_is_aborted_there() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            server.answer = hang
            asked = await_later(it.chat())
            await until(lambda: server.running, "it runs")
            (rid,) = server.running
            asked.cancel()
            await until(lambda: server.aborted and server.seen[0].disconnected, "aborted")
            assert server.aborted[0] == rid
            await until(it.settled, "settled")

    run(scenario())


def test_what_fails_at_one_server_is_tried_at_the_other() -> None:
    async def scenario() -> None:
        async with FakePlain() as a, FakePlain() as b, plain(a.url, b.url) as it:
            await joined(it, 2)
            a.answer = refuse(500, {"error": {"message": "broken"}})
            for _ in range(6):
                async with await it.chat() as answer:
                    assert answer.status == 200
            await until(it.settled, "settled")

    run(scenario())


def test_a_server_that_goes_is_lost_and_found_again() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            await server.stop()
            await until(lambda: "cannot connect" in str(it.router.pools[0].trouble), "lost")
            assert not it.router.core.pools
            server.ready = 503
            await server.start()
            await until(lambda: "503" in str(it.router.pools[0].trouble), "it warms up")
            server.ready = 200
            await joined(it)
            async with await it.chat() as answer:
                assert answer.status == 200
            assert it.router.pools[0].joins == 2

    run(scenario())


def test_a_server_that_cannot_be_followed_is_looked_for_again() -> None:
    async def scenario() -> None:
        server = FakePlain(publishes=True)
        right = server.info["kv_events"]
        server.info["kv_events"] = {**right, "endpoint_host": "no host"}
        async with server, plain(server.url) as it:
            link = it.router.pools[0]
            await until(lambda: "cannot follow" in str(link.trouble), "said")
            assert not it.router.core.pools
            server.info["kv_events"] = right
            await joined(it)
            async with await it.chat() as answer:
                assert answer.status == 200

    run(scenario())


def test_a_server_that_is_not_ready_is_left() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            server.ready = 503
            await until(lambda: "503" in str(it.router.pools[0].trouble), "left")

    run(scenario())


@pytest.mark.parametrize("replays", [True, False])
def test_kv_events_say_what_every_rank_of_the_worker_has(tmp_path: Path, replays: bool) -> None:
    write_model(tmp_path, SMOL)
    prompt = list(range(1, 8 * PAGE + 2))
    chain = block_hashes(prompt, PAGE)

    async def scenario() -> None:
        model = str(tmp_path)
        holder = FakePlain(dp=2, cp=2, publishes=True, replays=replays, tokenizer_path=model)
        other = FakePlain(cp=2, publishes=True, replays=replays, tokenizer_path=model)
        async with holder, other:
            if replays:
                holder.store(chain[:4], rank=1)  # before anybody listens
            async with plain(holder.url, other.url) as it:
                await joined(it, 3)
                await it.ready()
                if not replays:
                    await held(it, holder, 0, lambda: holder.store([1], rank=1))
                    holder.store(chain[:4], rank=1)
                await until(lambda: cached(it, holder, 1) >= 4, "the index has them")
                assert await explained(it, prompt) == {0: 0, 1: 4 * PAGE}
                holder.store(chain[4:], rank=1, parent=chain[3])
                await until(lambda: cached(it, holder, 1) >= 8, "and those")
                assert await explained(it, prompt) == {0: 0, 1: 8 * PAGE}
                async with it.client.post("/generate", json={"input_ids": prompt}) as answer:
                    assert answer.status == 200
                assert holder.seen[0].fields["routed_dp_rank"] == 1
                holder.remove(chain[4:], rank=1)
                await until(lambda: cached(it, holder, 1) < 8, "gone")
                assert it.router.core.violations() == []

    async def explained(it: Running, ids: list[int]) -> dict[int, int]:
        async with it.client.post("/explain", json={"input_ids": ids}) as answer:
            candidates = (await answer.json())["candidates"]
        mine = {}
        for terms in candidates:
            pool, _, block = terms["worker"].rpartition("/")
            if pool == f"127.0.0.1:{it.router.pools[0].url.rpartition(':')[2]}":
                mine[int(block.partition("x")[0]) // 2] = terms["cached_tokens"]
            else:
                assert terms["cached_tokens"] == 0
        return mine

    async def held(it: Running, server: FakePlain, rank: int, again: Any) -> None:
        """A subscription takes a moment; what comes before is lost without a replay."""

        def seen() -> bool:
            again()
            return cached(it, server, 1) > 0

        await until(seen, "subscribed")

    run(scenario())


def cached(it: Running, server: FakePlain, dp_rank: int) -> int:
    found = it.router.core.workers(it.router.clock.now())
    first = dp_rank * 2
    return next(w.cached_blocks for w in found if w.id == f"{server.name}/{first}x2")


def test_a_pool_and_a_plain_server_serve_side_by_side() -> None:
    async def scenario() -> None:
        pool, server = FakePool(2, "1x2"), FakePlain()
        async with pool, server, running(pool.url, worker_urls=(server.url,)) as it:
            await joined(it, 2)
            pool.answer = server.answer = hang
            asked = [await_later(it.chat(messages=LONG, stream=True)) for _ in range(6)]
            await until(lambda: pool.running and server.running, "both have some")
            assert "x-override-rid" in pool.seen[0].headers
            assert "rid" not in pool.seen[0].fields
            for one in asked:
                one.cancel()
            await until(it.settled, "settled")
            async with it.client.post(
                "/vertumnus/reconfigure", json={"composition": "2x1", "pool": server.name}
            ) as answer:
                assert answer.status == 400
                assert "plain SGLang" in (await it.error(answer))["message"]
            async with it.client.post(
                "/vertumnus/reconfigure", json={"composition": "2x1", "dry_run": True}
            ) as answer:
                assert answer.status == 200, "the pool is the only one that could be meant"
            async with it.client.get("/vertumnus/composition") as answer:
                described = {p["pool"]: p for p in (await answer.json())["pools"]}
            assert described[server.name]["composition"] == "1x1"
            assert described[server.name]["trouble"] is None

    run(scenario())


def test_the_engine_behind_a_url_may_become_a_pool() -> None:
    async def scenario() -> None:
        server, pool = FakePlain(), FakePool(2)
        pool.port = server.port
        async with server, plain(server.url) as it:
            await joined(it)
            await server.stop()
            async with pools(pool):
                await joined(it, 2)
                assert [p.pool for p in it.router.core.pools] == ["fake"]
                async with await it.chat() as answer:
                    assert answer.status == 200

    run(scenario())


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"attn_cp_size": 3}, "--attn-cp-size 3"),
        ({"disaggregation_mode": "decode"}, "name it with --decode"),
        ({"max_total_num_tokens": None}, "is this SGLang?"),
    ],
)
def test_what_cannot_be_a_worker_is_refused_with_the_reason(
    info: dict[str, Any], says: str
) -> None:
    async def scenario() -> None:
        async with FakePlain(**info) as server, plain(server.url) as it:
            await until(lambda: says in str(it.router.pools[0].trouble), "refused")

    run(scenario())


def test_servers_of_another_model_or_block_size_are_refused() -> None:
    async def scenario() -> None:
        first = FakePlain(publishes=True)
        model, block = FakePlain(served_model_name="other"), FakePlain(publishes=True)
        block.info["kv_events"]["block_size"] = 8
        silent = FakePlain(page_size=1)
        async with first, model, block, silent, plain(first.url) as it:
            await joined(it)
            for server in (model, block, silent):
                it.router.join(server.url)
            await joined(it, 2)
            links = {link.url: link for link in it.router.pools}
            await until(lambda: "'other'" in str(links[model.url].trouble), "another model")
            await until(lambda: "block size 8" in str(links[block.url].trouble), "another size")
            assert links[silent.url].trouble is None, "without events it has no blocks"

    run(scenario())


@pytest.mark.parametrize("dp", [1, 2])
def test_plain_servers_prefill_for_decode_servers(dp: int) -> None:
    async def scenario() -> None:
        rooms = Rooms()

        async def prefill(server: Any, request: Any, seen: Seen) -> Any:
            await rooms.as_prefill(seen.rooms)
            return await stream(server, request, seen)

        side = FakePlain(dp=dp, disaggregation_mode="prefill", disaggregation_bootstrap_port=7777)
        side.answer = prefill
        decode = FakeDecode(rooms, dtype="auto")
        decode.answer = decoding(rooms)
        async with side, decode:
            urls = ((side.url, None),)
            async with running(prefill_urls=urls, decode_urls=(decode.url,)) as it:
                await live(it, 1)
                await joined(it, dp)
                for streams in (True, False):
                    async with await it.chat(stream=streams) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()
                for legs in zip(side.seen, decode.seen, strict=True):
                    mine, theirs = (leg.fields for leg in legs)
                    assert mine["bootstrap_room"] == theirs["bootstrap_room"]
                    assert mine["bootstrap_port"] == theirs["bootstrap_port"] == 7777
                    rank = mine["routed_dp_rank"]
                    assert (
                        rank == mine["disagg_prefill_dp_rank"] == theirs["disagg_prefill_dp_rank"]
                    )
                    assert rank in range(dp)
                    assert theirs["routed_dp_rank"] is None
                    assert mine["rid"] == theirs["rid"]
                await until(it.settled, "settled")

    run(scenario())


def test_the_bootstrap_port_may_be_given_and_the_mode_must_fit() -> None:
    async def scenario() -> None:
        rooms = Rooms()
        side = FakePlain(disaggregation_mode="prefill", disaggregation_bootstrap_port=None)
        whole = FakePlain()
        async with side, whole, FakeDecode(rooms, dtype="auto") as decode:
            urls = ((side.url, 9000), (whole.url, None))
            async with running(prefill_urls=urls, decode_urls=(decode.url,)) as it:
                await joined(it)
                (pool,) = it.router.core.pools
                assert it.router.bootstrap_port(pool.pool) == 9000
                link = next(link for link in it.router.pools if link.url == whole.url)
                await until(lambda: "--disaggregation-mode prefill" in str(link.trouble), "refused")

    run(scenario())


def test_a_server_with_a_key_is_found_asked_and_aborted_with_it() -> None:
    async def scenario() -> None:
        key = "sk-upstream"
        async with (
            FakePlain(api_key=key) as server,
            plain(server.url, upstream_api_key=key) as it,
        ):
            await joined(it)
            async with await it.chat() as answer:
                assert answer.status == 200
            async with it.client.get("/get_loads") as answer:
                assert (await answer.json())["workers"][0]["load"] == 17
            server.answer = hang
            asked = await_later(it.chat())
            await until(lambda: server.running, "it runs")
            asked.cancel()
            await until(lambda: server.aborted, "aborted")
            await until(it.settled, "settled")

    run(scenario())


def test_a_url_of_a_pool_must_be_one() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, running(server.url) as it:
            await until(lambda: "is this a pool?" in str(it.router.pools[0].trouble), "refused")
            with pytest.raises(ValueError, match="let it leave first"):
                it.router.join(server.url, Role.WORKER)

    run(scenario())


def test_the_same_url_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="named twice"):
        RouterConfig(worker_urls=("http://a:1",), decode_urls=("http://a:1/",))


def test_bodies_are_extended_and_not_rewritten() -> None:
    async def scenario() -> None:
        async with FakePlain() as server, plain(server.url) as it:
            await joined(it)
            odd = b'{ "messages" :[{"role":"user","content":"caf\\u00e9 \xc3\xa9"}] ,"x":1e400 }  '
            odd = odd.replace(b"1e400", b"1.50")
            async with it.client.post("/v1/chat/completions", data=odd) as answer:
                assert answer.status == 200
            body = server.seen[0].body
            assert body.startswith(odd.rstrip()[:-1])
            assert json.loads(body)["x"] == 1.5

    run(scenario())
