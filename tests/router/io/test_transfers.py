"""Copies and deletions over HTTP: what is commanded, and what is told of how it ended."""

import asyncio
from typing import Any

import pytest
from vertumnus_router.core.config import PolicyConfig, PrefixConfig
from vertumnus_router.core.events import CopyEnded, ReclaimEnded, TransferOutcome
from vertumnus_router.io import transfers
from vertumnus_router.protocol import CopyCommand, ReclaimCommand

from tests.router.io import fake_kv
from tests.router.io.fake_kv import hang_up, say
from tests.router.io.fake_pool import BLOCK_TOKENS, KV_PORT, FakePool, pools
from tests.router.io.harness import run, running, until
from tests.router.io.scripted import Script, copy_of, life, reclaim_of


def test_a_copy_is_commanded_at_the_destination_and_learnt_from_its_own_events() -> None:
    async def scenario() -> None:
        one, two = FakePool(2, pool_id="one", copies=True), FakePool(2, pool_id="two", copies=True)
        async with pools(one, two), running(one.url, two.url, control_key="secret") as it:
            await it.ready()
            await until(lambda: len(it.router.core.pools) == 2, "both")
            script = Script(it.router)
            two.ranks[1].store([1])
            order = copy_of(1, 2, 3, source=life(0, "one"), destination=life(1, "two"))
            it.router.transfers.carry_out(order)
            await until(lambda: script.ended, "ended")
            assert one.kv.commands == []
            ((command, key),) = two.kv.commands
            assert key == "Bearer secret"
            assert command == CopyCommand(
                rank=1,
                incarnation="life",
                source=f"127.0.0.1:{KV_PORT}",
                source_incarnation="life",
                blocks=(1, 2, 3),
                timeout_s=pytest.approx(27.0),
            )
            size = 2 * BLOCK_TOKENS * fake_kv.TOKEN_BYTES
            done = CopyEnded(order.transfer, TransferOutcome.DONE, 2, size, 0.5, 0.25)
            assert script.ended == [done]
            await until(lambda: it.router.core.index_nodes == 3, "the index")
            samples = await it.samples()
            labels = '{cause="inter_degree",outcome="done"}'
            assert samples[f"vertumnus_copies_total{labels}"] == 1
            assert samples['vertumnus_copied_bytes_total{cause="inter_degree"}'] == size
            assert samples['vertumnus_copied_blocks_total{cause="inter_degree"}'] == 2
            assert samples['vertumnus_copy_seconds_sum{cause="inter_degree"}'] == 0.5

    run(scenario())


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (say(200, {"outcome": "refused", "reason": "no room"}), "refused", "no room"),
        (say(200, {"outcome": "failed", "reason": "lease lost"}), "failed", "lease lost"),
        (say(200, {"outcome": "perhaps"}), "failed", "'perhaps' is no outcome"),
        (say(200, {"outcome": "done", "blocks": -1}), "failed", "not a report"),
        (say(200, []), "failed", "not a report"),
        (say(404, {"error": "what is this"}), "refused", "answers 404: what is this"),
        (say(403, {"error": {"message": "no"}}), "refused", "answers 403: no"),
        (say(503, {"error": "starting"}), "failed", "answers 503: starting"),
        (hang_up, "failed", "no answer from http"),
    ],
)
def test_whatever_a_front_answers_is_told(
    answer: fake_kv.Answer, outcome: str, reason: str
) -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await it.ready()
            script = Script(it.router)
            pool.kv.copy = pool.kv.reclaim = answer
            it.router.transfers.carry_out(copy_of(1))
            it.router.transfers.carry_out(reclaim_of(1))
            await until(lambda: len(script.ended) == 2, "both ended")
            assert {type(ended) for ended in script.ended} == {CopyEnded, ReclaimEnded}
            for ended in script.ended:
                assert ended.outcome.value == outcome
                assert reason in (ended.reason or "")
                assert ended.blocks == 0
            samples = await it.samples()
            name = f'vertumnus_copies_total{{cause="inter_degree",outcome="{outcome}"}}'
            assert samples[name] == 1

    run(scenario())


def test_a_front_that_dies_or_does_not_answer_fails_the_copy() -> None:
    policy = PolicyConfig(prefix=PrefixConfig(timeout_s=0.5))

    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url, policy=policy) as it:
            await it.ready()
            script = Script(it.router)
            pool.kv.copy = fake_kv.after(asyncio.Event(), fake_kv.copy)
            it.router.transfers.carry_out(copy_of(1))
            await until(lambda: pool.kv.commands, "begun")
            await pool.stop_front()
            await until(lambda: script.ended, "told")
            assert script.ended[0].outcome is TransferOutcome.FAILED
            assert "ServerDisconnected" in (script.ended[0].reason or "")
            await pool.start_front()
            await it.ready()
            it.router.transfers.carry_out(copy_of(1))
            await until(lambda: len(script.ended) == 2, "told")
            assert script.ended[1].outcome is TransferOutcome.FAILED
            assert "TimeoutError" in (script.ended[1].reason or "")

    run(scenario())


def test_what_has_left_or_cannot_copy_is_not_asked() -> None:
    async def scenario() -> None:
        plain, able = FakePool(1, pool_id="plain"), FakePool(2, pool_id="fake", copies=True)
        async with pools(plain, able), running(plain.url, able.url) as it:
            await it.ready()
            await until(lambda: len(it.router.core.pools) == 2, "both")
            joined = {str(pool.pool): pool.kv_token_bytes for pool in it.router.core.pools}
            assert joined == {"plain": 0, "fake": fake_kv.TOKEN_BYTES}
            script = Script(it.router)
            for order in (
                copy_of(1, source=life(0, "plain")),
                copy_of(1, source=life(0, "gone")),
                copy_of(1, destination=life(0, "gone")),
                reclaim_of(1, holder=life(0, "gone")),
            ):
                it.router.transfers.carry_out(order)
            await until(lambda: len(script.ended) == 4, "ended")
            assert {one.outcome for one in script.ended} == {TransferOutcome.REFUSED}
            assert all(
                "left" in (o.reason or "") or "followed" in (o.reason or "") for o in script.ended
            )
            assert plain.kv.commands == able.kv.commands == []

    run(scenario())


def test_a_fault_of_the_router_is_an_outcome_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await it.ready()
            script = Script(it.router)

            def fail(*_: Any) -> Any:
                raise RuntimeError("boom")

            monkeypatch.setattr(transfers, "command", fail)
            it.router.transfers.carry_out(copy_of(1))
            it.router.transfers.carry_out(reclaim_of(1))
            await until(lambda: len(script.ended) == 2, "told")
            assert {(one.outcome.value, one.reason) for one in script.ended} == {("failed", "boom")}

    run(scenario())


def test_a_deletion_means_what_the_index_knew_when_it_was_ordered() -> None:
    async def scenario() -> None:
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await it.ready()
            script = Script(it.router)
            rank = pool.ranks[0]
            rank.store([1, 2, 3])
            await until(lambda: it.router.core.index_nodes == 3, "the index")
            it.router.transfers.carry_out(reclaim_of(1, 2, 3, keep=1))
            await until(lambda: script.ended, "ended")
            ((command, _),) = pool.kv.commands
            assert command == ReclaimCommand(
                rank=0, incarnation="life", blocks=(1, 2, 3), keep=1, as_of=2
            )
            assert script.ended[0].outcome is TransferOutcome.DONE
            assert script.ended[0].blocks == 2
            await until(lambda: it.router.core.index_nodes == 1, "the index")
            # Ordered, then stored again before the command is out.
            seen = it.router.batches_seen(life(0).rank)
            it.router.transfers.carry_out(reclaim_of(1))
            rank.store([1])
            await until(lambda: len(script.ended) == 2, "ended")
            assert pool.kv.of(ReclaimCommand)[-1].as_of == seen
            assert script.ended[1].reason == "stored again since"
            samples = await it.samples()
            assert samples['vertumnus_reclaimed_blocks_total{cause="reclaim"}'] == 2
            labels = '{cause="reclaim",outcome="refused"}'
            assert samples[f"vertumnus_reclaims_total{labels}"] == 1

    run(scenario())


def test_the_router_stops_while_a_copy_hangs_and_leaves_no_task() -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with FakePool(2, copies=True) as pool, running(pool.url) as it:
            await it.ready()
            script = Script(it.router)
            pool.kv.copy = pool.kv.reclaim = fake_kv.after(asyncio.Event(), fake_kv.copy)
            it.router.transfers.carry_out(copy_of(1))
            it.router.transfers.carry_out(reclaim_of(1))
            await until(lambda: len(pool.kv.commands) == 2, "begun")
        assert script.ended == []
        await until(lambda: asyncio.all_tasks() == before, "nothing is left")

    run(scenario())
