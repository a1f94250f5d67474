"""Cached prefixes for operators over HTTP, and what the control plane decides about them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from vertumnus_router.core.config import PolicyConfig, PrefixConfig
from vertumnus_router.io.client_request import Endpoint, parse
from vertumnus_router.protocol import CopyCommand, ReclaimCommand

from tests.router.io import fake_kv, fake_pool
from tests.router.io.chat_cases import SMOL, write_model
from tests.router.io.fake_kv import say
from tests.router.io.fake_pool import BLOCK_TOKENS, FakePool
from tests.router.io.harness import Running, run, running, until

PATHS = ("/vertumnus/replicate", "/vertumnus/reclaim")
#: More than a double can hold, and negative.
TIP = -(2**63) + 1


async def post(it: Running, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    async with it.client.post(path, **more) as response:
        return response.status, await response.json()


async def prefixes(it: Running, query: str = "") -> dict[str, Any]:
    async with it.client.get(f"/vertumnus/prefixes{query}") as response:
        assert response.status == 200
        return dict(await response.json())


async def with_a_prefix(it: Running, pool: FakePool) -> None:
    """Rank 0 holds the blocks 1, 2 and TIP."""
    await it.ready()
    await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
    pool.ranks[0].store([1, 2, TIP])
    await until(lambda: it.router.core.index_nodes >= 3, "the index")


def held(it: Running) -> list[int]:
    return [worker.cached_blocks for worker in it.router.core.workers(it.router.clock.now())]


@pytest.mark.parametrize("tip", [TIP, str(TIP)], ids=["integer", "string"])
def test_a_prefix_is_copied_and_deleted_as_an_operator_orders(tip: int | str) -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await with_a_prefix(it, pool)
            order = {"tip": tip, "worker": "fake/1x1"}
            status, answer = await post(it, "/vertumnus/replicate", json=order)
            assert status == 200
            size = 3 * BLOCK_TOKENS * fake_kv.TOKEN_BYTES
            assert (answer["tip"], answer["worker"]) == (str(TIP), "fake/1x1")
            assert (answer["outcome"], answer["blocks"], answer["bytes"]) == ("done", 3, size)
            assert answer["seconds"] > 0
            (transfer,) = answer["transfers"]
            assert (transfer["source"], transfer["rank"]) == ("fake/0", "fake/1")
            assert (transfer["seconds"], transfer["transfer_s"]) == (0.5, 0.25)
            assert pool.kv.of(CopyCommand)[0].blocks == (1, 2, TIP)
            index = (await prefixes(it))["index"]
            assert index["blocks"] >= 3 and index["bytes"] > 0

            # The router learns of the copy from the rank's own events, which may come later.
            await until(lambda: held(it) == [3, 3], "both hold it")
            status, refused = await post(it, "/vertumnus/replicate", json=order)
            assert status == 409
            assert refused["error"]["code"] == "not_replicated"
            assert "holds it already" in refused["error"]["message"]
            assert refused["transfers"] == []

            status, answer = await post(it, "/vertumnus/reclaim", json={**order, "tip": "2"})
            assert status == 200
            assert (answer["outcome"], answer["blocks"]) == ("done", 2)
            (command,) = pool.kv.of(ReclaimCommand)
            assert (command.rank, command.blocks, command.keep) == (1, (1, 2, TIP), 1)
            await until(lambda: list(pool.ranks[1].held) == [1], "gone")

    run(scenario())


def test_paths_below_are_deleted_one_after_the_other_and_answered_together() -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await with_a_prefix(it, pool)
            pool.ranks[0].store([20, 21], 1)
            await until(lambda: it.router.core.index_nodes >= 5, "the index")
            running_now, most = 0, 0

            async def slowly(kv: Any, request: Any, command: Any) -> Any:
                nonlocal running_now, most
                running_now += 1
                most = max(most, running_now)
                await asyncio.sleep(0.02)
                running_now -= 1
                kv.rank(command).remove(command.blocks[command.keep :])
                blocks = len(command.blocks) - command.keep
                return fake_pool.web.json_response({"outcome": "done", "blocks": blocks})

            pool.kv.reclaim = slowly
            order = {"tip": 1, "worker": "fake/0x1"}
            status, answer = await post(it, "/vertumnus/reclaim", json=order)
            assert (status, answer["blocks"], len(answer["transfers"])) == (200, 5, 2)
            assert most == 1
            told = [transfer["transfer"] for transfer in answer["transfers"]]
            assert len(set(told)) == 2
            assert not pool.ranks[0].held

    run(scenario())


NONSENSE = [
    (b"", "invalid_json", '"worker": "pool/0x1"'),
    (b"[]", "invalid_json", "Expected `object`"),
    (b'{"tip": 1}', "invalid_json", "missing required field `worker`"),
    (b'{"tip": [1], "worker": "w"}', "invalid_json", "$.tip"),
    (b'{"tip": true, "worker": "w"}', "invalid_json", "$.tip"),
    (b'{"tip": 1, "worker": "w", "rank": 2}', "invalid_json", "unknown field `rank`"),
    (b'{"tip": "x1", "worker": "w"}', "bad_tip", "GET /vertumnus/prefixes"),
    (b'{"tip": "9223372036854775808", "worker": "w"}', "bad_tip", "signed 64-bit"),
    (b'{"tip": 9223372036854775808, "worker": "w"}', "bad_tip", "signed 64-bit"),
]


def test_an_order_that_makes_no_sense_says_what_to_send() -> None:
    async def scenario() -> None:
        async with running("http://127.0.0.1:1") as it:
            for path in PATHS:
                for body, code, says in NONSENSE:
                    status, answer = await post(it, path, data=body)
                    assert (status, answer["error"]["code"]) == (400, code), body
                    assert says in answer["error"]["message"]

    run(scenario())


def test_orders_are_for_operators() -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url, control_key="key") as it:
            await with_a_prefix(it, pool)
            order = {"tip": TIP, "worker": "fake/1x1"}
            remote = {"x-forwarded-for": "203.0.113.9"}
            for path in PATHS:
                status, answer = await post(it, path, json=order, headers=remote)
                assert (status, answer["error"]["code"]) == (403, "operators_only")
            assert pool.kv.commands == []

    run(scenario())


@pytest.mark.parametrize(
    ("mode", "order", "says"),
    [
        ("off", {"tip": TIP, "worker": "fake/1x1"}, "--prefix-manager observe or on"),
        ("observe", {"tip": TIP, "worker": "fake/7x1"}, "no worker fake/7x1"),
        ("on", {"tip": 99, "worker": "fake/1x1"}, "99"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(
    mode: str, order: dict[str, Any], says: str
) -> None:
    policy = PolicyConfig(prefix=PrefixConfig(mode=mode))

    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url, policy=policy) as it:
            await with_a_prefix(it, pool)
            for path in PATHS:
                status, answer = await post(it, path, json=order)
                assert status == 409
                assert says in answer["error"]["message"]
            assert pool.kv.commands == []

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (say(200, {"outcome": "refused", "reason": "it is in use"}), "refused"),
        (say(503, {"error": "it is in use"}), "failed"),
    ],
)
def test_what_a_rank_did_not_do_is_a_conflict(answer: fake_kv.Answer, outcome: str) -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await with_a_prefix(it, pool)
            pool.kv.copy = pool.kv.reclaim = answer
            for path, worker in zip(PATHS, ("fake/1x1", "fake/0x1"), strict=True):
                status, told = await post(it, path, json={"tip": TIP, "worker": worker})
                assert (status, told["outcome"]) == (409, outcome)
                assert "it is in use" in told["error"]["message"]
                assert told["transfers"][0]["outcome"] == outcome

    run(scenario())


def test_an_order_goes_on_when_its_client_has_left() -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await with_a_prefix(it, pool)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            order = {"tip": TIP, "worker": "fake/1x1"}
            asked = asyncio.create_task(post(it, "/vertumnus/replicate", json=order))
            await until(lambda: pool.kv.commands, "begun")
            (transfer,) = (await prefixes(it))["transfers"]
            assert (transfer["cause"], transfer["tip"]) == ("operator", str(TIP))
            assert (transfer["source"], transfer["rank"]) == ("fake/0", "fake/1")
            asked.cancel()
            await asyncio.wait((asked,))
            may_copy.set()
            await until(lambda: len(pool.ranks[1].held) == 3, "copied")
            await until(
                lambda: not it.router.core.prefixes(it.router.clock.now()).transfers, "over"
            )

    run(scenario())


def test_a_limit_is_a_number() -> None:
    async def scenario() -> None:
        async with running("http://127.0.0.1:1") as it:
            assert (await prefixes(it, "?limit=3"))["hot"] == []
            for bad in ("0", "x", "-1", "1001", "", "²"):
                async with it.client.get("/vertumnus/prefixes", params={"limit": bad}) as response:
                    assert response.status == 400
                    assert (await it.error(response))["code"] == "bad_limit"

    run(scenario())


def cached_blocks(it: Running) -> list[int]:
    return [w.cached_blocks for w in it.router.core.workers(it.router.clock.now())]


def test_a_busy_holder_is_pulled_from(tmp_path: Path) -> None:
    """The whole way, decided by the control plane: a prompt whose prefix is at a worker that has
    a queue goes to the other one, and the prefix before it."""
    text = "seven words that make up a sentence " * 60
    model = str(write_model(tmp_path, SMOL))
    policy = PolicyConfig(queue_timeout_s=5.0, prefix=PrefixConfig(pull=True, latency_s=0.0))

    async def ask(it: Running, text: str) -> aiohttp.ClientResponse:
        body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 1}}
        return await it.client.post("/generate", json=body)

    async def scenario() -> None:
        pool = FakePool(2, copies=True, tokenizer_path=model, context_tokens=1 << 20)
        async with pool, running(pool.url, policy=policy) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            may_go = asyncio.Event()

            async def hold(fake: FakePool, request: Any, seen: Any) -> Any:
                await may_go.wait()
                return await fake_pool.stream(fake, request, seen)

            pool.answers.append(hold)
            held = asyncio.create_task(ask(it, "x " * 20_000))
            await until(lambda: pool.running, "one rank is busy")
            busy = pool.seen[0].rank
            described = await it.router.hot.describe(
                parse(Endpoint.GENERATE, json.dumps({"text": text}).encode()),
                it.router.hot.new_id(),
            )
            assert len(described.blocks) > 100
            pool.ranks[busy].store(described.blocks)
            await until(lambda: it.router.core.index_nodes > 100, "the index")
            pool.answers.append(hold)
            asked = asyncio.create_task(ask(it, text))
            await until(lambda: len(pool.seen) == 2, "forwarded")
            pool.prefill_finished(
                pool.seen[1],
                input_tokens=described.input_tokens,
                cached_tokens=BLOCK_TOKENS * (len(described.blocks) - 1),
            )
            (command,) = pool.kv.of(CopyCommand)
            assert command.rank == pool.seen[1].rank == 1 - busy
            # The last token is computed in any case.
            assert command.blocks == described.blocks[:-1]
            await until(lambda: all(cached > 100 for cached in cached_blocks(it)), "both have it")
            async with it.client.post("/explain", json={"text": text + "and more"}) as response:
                candidates = (await response.json())["candidates"]
            assert {one["pull_tokens"] for one in candidates} == {0}
            assert (await prefixes(it))["bandwidth"]["same_pool"]["copies"] == 1

            async def won() -> bool:
                return (await it.samples()).get('vertumnus_pulls_total{result="won"}') == 1

            while not await won():
                await asyncio.sleep(0.01)
            samples = await it.samples()
            assert samples['vertumnus_copies_total{cause="pull",outcome="done"}'] == 1
            assert samples["vertumnus_pull_wait_seconds_count"] == 1
            may_go.set()
            for one in (held, asked):
                (await one).close()
            await until(it.settled, "settled")

    run(scenario())
