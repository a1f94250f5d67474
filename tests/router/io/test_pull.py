"""A request whose prefix is copied to its worker first follows, whatever becomes of the copy."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.core.effects import Cause, Copy, Dispatch
from vertumnus_router.core.events import TransferOutcome
from vertumnus_router.io.config import Limits
from vertumnus_router.protocol import CopyCommand

from tests.router.io import fake_kv
from tests.router.io.fake_decode import WHOLE_STREAM, paired
from tests.router.io.fake_kv import hang_up, say
from tests.router.io.fake_pool import FakePool, pools
from tests.router.io.harness import Running, run, running, until
from tests.router.io.scripted import Script, copy_of, life

#: The pull of a test that must not wait for its deadline, or must.
PATIENT = Limits(stop_s=1.0, probe_s=0.2, pull_s=60.0)
BRIEF = Limits(stop_s=1.0, probe_s=0.2, pull_s=0.1)


def pull_to_home(dispatch: Dispatch) -> Copy:
    """From the last rank of the pool, once for each attempt."""
    return copy_of(
        1,
        2,
        source=life(1, str(dispatch.pool)),
        destination=life(dispatch.home.index, str(dispatch.pool)),
        cause=Cause.PULL,
        transfer=f"pull-{dispatch.attempt}",
    )


def first_only(dispatch: Dispatch) -> Copy | None:
    return pull_to_home(dispatch) if dispatch.attempt == 1 else None


def ttft_parts(samples: dict[str, float]) -> dict[str, float]:
    start = 'vertumnus_ttft_part_seconds_sum{part="'
    return {name[len(start) : -2]: v for name, v in samples.items() if name.startswith(start)}


def test_the_copy_goes_first_and_its_time_has_a_part_of_its_own() -> None:
    async def scenario() -> None:
        fake = FakePool(2, copies=True)
        async with fake as pool, running(pool.url, limits=PATIENT) as it:
            await it.ready()
            script = Script(it.router, pull=pull_to_home)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            asked = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.kv.commands, "pulled")
            (command,) = pool.kv.of(CopyCommand)
            home = script.dispatches[0].home.index
            assert (command.rank, command.timeout_s) == (home, pytest.approx(54.0))
            assert not pool.seen, "the request waits"
            await asyncio.sleep(0.05)
            may_copy.set()
            async with await asked as response:
                assert await response.read() == WHOLE_STREAM
            assert [one.outcome for one in script.ended] == [TransferOutcome.DONE]
            assert [seen.rank for seen in pool.seen] == [home]
            await until(it.settled, "settled")
            samples = await it.samples()
            assert samples['vertumnus_copies_total{cause="pull",outcome="done"}'] == 1
            assert samples["vertumnus_pull_wait_seconds_count"] == 1
            parts = ttft_parts(samples)
            assert parts["pull"] >= 0.05
            assert parts["pull"] == samples["vertumnus_pull_wait_seconds_sum"]
            assert parts["transfer"] == 0
            total = samples['vertumnus_ttft_seconds_sum{degree="1"}']
            assert sum(parts.values()) == pytest.approx(total)
            async with it.client.post("/explain", json={"text": "x"}) as response:
                recent = (await response.json())["ttft"]
            assert recent["mean_s"]["pull"] == parts["pull"]

    run(scenario())


@pytest.mark.parametrize("limits", [PATIENT, BRIEF])
def test_a_copy_in_progress_is_waited_for_and_not_begun_again(limits: Limits) -> None:
    copy = copy_of(1, 2)

    async def scenario() -> None:
        fake = FakePool(2, copies=True)
        async with fake as pool, running(pool.url, limits=limits) as it:
            await it.ready()
            script = Script(it.router, pull=lambda dispatch: copy)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            it.router.transfers.carry_out(copy)
            await until(lambda: pool.kv.commands, "begun")
            asked = [asyncio.create_task(it.chat()) for _ in range(2)]
            await until(lambda: len(script.dispatches) == 2, "both dispatched")
            if limits is PATIENT:
                await asyncio.sleep(0.05)
                assert not pool.seen, "they wait"
                may_copy.set()
            for one in asked:
                async with await one as response:
                    assert response.status == 200
            assert len(pool.seen) == 2
            assert len(pool.kv.commands) == 1
            assert bool(script.ended) == (limits is PATIENT)
            may_copy.set()
            await until(lambda: script.ended, "told once")
            assert [one.outcome for one in script.ended] == [TransferOutcome.DONE]
            await until(it.settled, "settled")

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        say(200, {"outcome": "refused", "reason": "no room"}),
        say(200, {"outcome": "failed"}),
        say(200, "garbage"),
        say(404, {}),
        say(503, {"error": "starting"}),
        hang_up,
    ],
)
def test_a_pull_that_fails_does_not_keep_the_request(answer: fake_kv.Answer) -> None:
    async def scenario() -> None:
        fake = FakePool(2, copies=True)
        async with fake as pool, running(pool.url, limits=PATIENT) as it:
            await it.ready()
            script = Script(it.router, pull=pull_to_home)
            pool.kv.copy = answer
            async with await it.chat() as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "1"
            assert len(pool.seen) == len(script.ended) == 1
            assert script.ended[0].outcome is not TransferOutcome.DONE
            await until(it.settled, "settled")

    run(scenario())


def test_a_slow_pull_is_given_up_and_the_request_follows() -> None:
    async def scenario() -> None:
        fake = FakePool(2, copies=True)
        async with fake as pool, running(pool.url, limits=BRIEF) as it:
            await it.ready()
            script = Script(it.router, pull=pull_to_home)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            async with await it.chat(stream=True) as response:
                assert await response.read() == WHOLE_STREAM
            assert pool.kv.of(CopyCommand)[0].timeout_s == pytest.approx(0.09)
            ((ended,), seen) = script.ended, pool.seen
            assert ended.outcome is TransferOutcome.FAILED
            assert "TimeoutError" in (ended.reason or "")
            assert len(seen) == 1
            await until(it.settled, "settled")
            samples = await it.samples()
            assert samples["vertumnus_pull_wait_seconds_count"] == 1
            assert 0.05 <= samples["vertumnus_pull_wait_seconds_sum"] < 2

    run(scenario())


def test_a_client_that_leaves_during_the_pull_is_gone_at_once() -> None:
    async def scenario() -> None:
        fake = FakePool(2, copies=True)
        async with fake as pool, running(pool.url, limits=PATIENT) as it:
            await it.ready()
            script = Script(it.router, pull=pull_to_home)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            asked = asyncio.create_task(it.chat())
            await until(lambda: pool.kv.commands, "pulled")
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
            await until(it.settled, "settled", limit_s=1)
            assert script.ended == [], "the copy goes on"
            may_copy.set()
            await until(lambda: script.ended, "told in the end")
            assert pool.seen == [] and pool.aborted == [], "the engine never heard of it"

    run(scenario())


async def lose_the_home(pool: FakePool, script: Script) -> None:
    pool.lose_rank(script.dispatches[0].home.index, "killed")


async def lose_the_front(pool: FakePool, script: Script) -> None:
    await pool.stop_front()


@pytest.mark.parametrize("lose", [lose_the_home, lose_the_front])
def test_a_worker_lost_during_the_pull_is_replaced_at_once(
    lose: Callable[[FakePool, Script], object],
) -> None:
    async def scenario() -> None:
        one, two = FakePool(1, pool_id="one", copies=True), FakePool(1, pool_id="two", copies=True)
        async with pools(one, two), running(one.url, two.url, limits=PATIENT) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            script = Script(it.router, pull=first_only)
            may_copy = asyncio.Event()
            one.kv.copy = two.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            asked = asyncio.create_task(it.chat())
            await until(lambda: one.kv.commands or two.kv.commands, "pulled")
            lost, other = (one, two) if one.kv.commands else (two, one)
            await lose(lost, script)  # type: ignore[misc]
            async with await asked as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
            assert (len(lost.seen), len(other.seen)) == (0, 1)
            may_copy.set()
            await until(lambda: script.ended, "told in the end")
            assert len(other.seen) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_pull_that_ends_after_its_worker_was_lost_sends_nothing() -> None:
    async def scenario() -> None:
        fake = FakePool(1, copies=True)
        policy = PolicyConfig(queue_timeout_s=20.0)
        async with fake as pool, running(pool.url, policy=policy, limits=PATIENT) as it:
            await it.ready()
            script = Script(it.router, pull=first_only)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            asked = asyncio.create_task(it.chat())
            await until(lambda: pool.kv.commands, "pulled")
            pool.lose_rank(0, "killed")
            await until(lambda: it.router.core.queued_count == 1, "queued again")
            may_copy.set()
            await until(lambda: script.ended, "told")
            await asyncio.sleep(0.02)
            assert pool.seen == []
            asked.cancel()
            await until(it.settled, "settled")

    run(scenario())


def test_both_legs_of_a_pair_wait_for_the_pull() -> None:
    async def scenario() -> None:
        async with paired(copies=True, limits=PATIENT) as (pool, (decode,), it):
            script = Script(it.router, pull=pull_to_home)
            may_copy = asyncio.Event()
            pool.kv.copy = fake_kv.after(may_copy, fake_kv.copy)
            asked = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.kv.commands, "pulled")
            assert not pool.seen and not decode.seen
            await asyncio.sleep(0.05)
            may_copy.set()
            async with await asked as response:
                assert await response.read() == WHOLE_STREAM
            assert len(pool.seen) == len(decode.seen) == len(script.ended) == 1
            await until(it.settled, "settled")
            parts = ttft_parts(await it.samples())
            assert parts["pull"] >= 0.05

    run(scenario())


def test_a_decode_server_lost_during_the_pull_costs_an_attempt() -> None:
    async def scenario() -> None:
        async with paired(decodes=2, copies=True, limits=PATIENT) as (pool, decodes, it):
            script = Script(it.router, pull=first_only)
            pool.kv.copy = fake_kv.after(asyncio.Event(), fake_kv.copy)
            asked = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.kv.commands, "pulled")
            pair = script.dispatches[0].pair
            assert pair is not None
            lost, other = sorted(decodes, key=lambda one: one.url != str(pair.decode))
            await lost.stop()
            async with await asked as response:
                assert await response.read() == WHOLE_STREAM
                assert response.headers["x-vertumnus-attempts"] == "2"
            assert (len(lost.seen), len(other.seen)) == (0, 1)
            await until(it.settled, "settled")

    run(scenario())


def test_the_router_stops_during_a_pull() -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        fake = FakePool(2, copies=True)
        async with fake as pool, running(pool.url, limits=PATIENT) as it:
            await it.ready()
            Script(it.router, pull=pull_to_home)
            pool.kv.copy = fake_kv.after(asyncio.Event(), fake_kv.copy)
            asked = asyncio.create_task(it.chat())
            await until(lambda: pool.kv.commands, "pulled")
        await asyncio.wait((asked,))
        assert pool.seen == []
        with contextlib.suppress(OSError):
            (await asked).close()
        await until(lambda: asyncio.all_tasks() == before, "nothing is left")

    run(scenario())


def test_many_requests_pull_at_once() -> None:
    async def chat(it: Running) -> int:
        async with await it.chat() as response:
            await response.read()
            return response.status

    async def scenario() -> None:
        fake = FakePool(4, copies=True)
        policy = PolicyConfig(policy="late", queue_timeout_s=2.0)
        async with fake as pool, running(pool.url, policy=policy, limits=BRIEF) as it:
            await it.ready()
            numbers = iter(range(1000))

            def pull(dispatch: Dispatch) -> Copy:
                return copy_of(
                    7,
                    destination=life(dispatch.home.index),
                    cause=Cause.PULL,
                    transfer=f"pull-{next(numbers)}",
                )

            script = Script(it.router, pull=pull)
            assert set(await asyncio.gather(*(chat(it) for _ in range(50)))) == {200}
            await until(lambda: len(script.ended) == 50, "all told")
            assert len(pool.seen) == 50
            await until(it.settled, "settled")

    run(scenario())
