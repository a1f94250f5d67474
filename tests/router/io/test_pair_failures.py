"""One leg fails, hangs or dies: the other one is ended too, and nothing is left anywhere."""

import asyncio
import contextlib
import json
import random
from typing import Any

import aiohttp
import pytest
from vertumnus_router.core.config import PolicyConfig
from vertumnus_router.io import pair

from tests.router.io import fake_pool
from tests.router.io.fake_decode import (
    WHOLE_STREAM,
    FakeDecode,
    Rooms,
    aborted,
    aborted_answer,
    decoding,
    paired,
    prefill_pool,
    prefilling,
)
from tests.router.io.fake_pool import FakePool, Seen, drop_after, refuse, sse_chunks
from tests.router.io.harness import Running, run, running, until

ENGINE_ERROR = {"object": "error", "message": "boom", "type": "InternalServerError", "code": 500}


def rooms_of(it: Running) -> list[int]:
    return [terms.rooms for terms in it.router.core.decodes()]


async def nothing_is_left(it: Running, pool: FakePool, *decodes: FakeDecode) -> None:
    await until(it.settled, "settled", limit_s=2)
    assert not any(rooms_of(it))
    await until(lambda: not pool.running, "the pool is idle", limit_s=2)
    for decode in decodes:
        await until(lambda decode=decode: not decode.running, "the decode server is idle")


async def error_event(server: Any, request: Any, seen: Seen) -> Any:
    response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "boom", "code": 500}}\n\n')
    await response.write(b"data: [DONE]\n\n")
    return response


FAILURES = {
    "dropped": fake_pool.drop,
    "500": refuse(500, ENGINE_ERROR),
    "503": refuse(503, ENGINE_ERROR),
    "429": refuse(429, ENGINE_ERROR),
    "dropped after the head": drop_after([]),
    "aborted": aborted_answer,
    "an error event": error_event,
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_leg_that_fails_first_ends_the_other_one_and_both_are_tried_again(
    leg: str, failure: str
) -> None:
    async def scenario() -> None:
        async with paired(2, decodes=2) as (pool, decodes, it):
            if leg == "prefill":
                pool.answers.append(FAILURES[failure])
            else:
                for decode in decodes:
                    decode.answers.append(FAILURES[failure])
            async with asyncio.timeout(5), await it.chat(stream=True) as response:
                assert response.status == 200
                assert await response.read() == WHOLE_STREAM
                attempts = int(response.headers["x-vertumnus-attempts"])
            first = pool.seen[0].rid
            if leg == "prefill":
                assert attempts == 2
                assert pool.seen[0].rank != pool.seen[1].rank, "its worker is at fault"
                (where,) = [d for d in decodes if first in [seen.rid for seen in d.seen]]
                told = where.aborted
            else:
                assert attempts == 3
                assert decodes[0].seen and decodes[1].seen, "another one is preferred"
                told = pool.aborted
            await until(lambda: told.count(first) == 2, "told, and once more", limit_s=1.5)
            await nothing_is_left(it, pool, *decodes)
            samples = await it.samples()
            failed = [name for name in samples if name.startswith("vertumnus_pair_failures_total")]
            assert failed and all(f'leg="{leg}"' in name for name in failed)

    run(scenario())


def test_a_prefill_side_whose_failure_the_decode_server_tells_first_is_to_blame() -> None:
    """Mooncake tells the decode server of a room that was failed."""

    rooms: list[Rooms] = []
    failures = [FAILURES["500"]]

    async def fail_once(server: Any, request: Any, seen: Seen) -> Any:
        answer = failures.pop() if failures else decoding(rooms[0])
        return await answer(server, request, seen)

    async def fail_second(server: Any, request: Any, seen: Seen) -> Any:
        await asyncio.sleep(0.1)
        return fake_pool.web.json_response(ENGINE_ERROR, status=500)

    async def scenario() -> None:
        async with paired(2, decodes=2) as (pool, decodes, it):
            pool.answers.append(fail_second)
            for decode in decodes:
                decode.answer = fail_once
            rooms.append(decodes[0].rooms)
            async with await it.chat(stream=True) as response:
                assert await response.read() == WHOLE_STREAM
                assert response.headers["x-vertumnus-attempts"] == "2"
            assert pool.seen[0].rank != pool.seen[1].rank, "its worker is at fault"
            await nothing_is_left(it, pool, *decodes)
            samples = await it.samples()
            failed = [name for name in samples if name.startswith("vertumnus_pair_failures_total")]
            assert failed and all('leg="prefill"' in name for name in failed)

    run(scenario())


def test_a_client_that_leaves_while_the_prefill_leg_may_have_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair, "_LAST_WORD_S", 10)

    async def abort_and_go_on(server: Any, request: Any, seen: Seen) -> Any:
        response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(aborted()).encode() + b"\n\n")
        await asyncio.sleep(60)
        return response

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            pool.answer = fake_pool.hang
            decode.answer = abort_and_go_on
            task = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.running and decode.running, "running")
            await asyncio.sleep(0.1)
            assert not task.done()
            await give_up(task)
            rid = pool.seen[0].rid
            await until(lambda: rid in pool.aborted, "the pool is told", limit_s=1)
            await until(lambda: rid in decode.aborted, "the decode server is told", limit_s=1)
            await nothing_is_left(it, pool, decode)

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_fault_of_the_request_is_answered_at_once_in_the_engines_words(leg: str) -> None:
    said = {"object": "error", "message": "too hot", "type": "BadRequest", "code": 400}

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            (pool if leg == "prefill" else decode).answer = refuse(400, said)
            async with await it.chat() as response:
                assert response.status == 400
                assert (await it.error(response))["message"] == "too hot"
            assert len(pool.seen) == len(decode.seen) == 1
            other = decode if leg == "prefill" else pool
            await until(lambda: pool.seen[0].rid in other.aborted, "told", limit_s=1)
            await nothing_is_left(it, pool, decode)

    run(scenario())


def test_an_abort_with_a_status_of_the_client_is_not_repeated() -> None:
    async def answer(server: Any, request: Any, seen: Seen) -> Any:
        return fake_pool.web.json_response(aborted(400))

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            decode.answer = answer
            async with await it.chat() as response:
                assert response.status == 400
                assert "Aborted" in (await it.error(response))["message"]
            assert len(decode.seen) == 1
            await nothing_is_left(it, pool, decode)

    run(scenario())


def test_generated_text_about_aborts_is_not_one() -> None:
    text = {"text": '{"type": "abort"}, "finish_reason": "abort"', "meta_info": {}}

    async def answer(server: Any, request: Any, seen: Seen) -> Any:
        return fake_pool.web.json_response(text)

    async def scenario() -> None:
        async with paired() as (_, (decode,), it):
            decode.answer = decoding(decode.rooms, answer)
            async with it.client.post("/generate", json={"text": "x"}) as response:
                assert response.status == 200
                assert await response.json() == text

    run(scenario())


def test_after_the_first_byte_a_broken_decode_leg_ends_the_stream_with_an_error() -> None:
    async def scenario() -> None:
        async with paired(decodes=2) as (pool, decodes, it):
            for decode in decodes:
                decode.answer = decoding(decode.rooms, drop_after(sse_chunks(3)[:1]))
            async with await it.chat(stream=True) as response:
                answer = await response.read()
            assert answer.startswith(sse_chunks(3)[0])
            assert b'data: {"error":{' in answer
            assert len(pool.seen) == 1
            await nothing_is_left(it, pool, *decodes)

    run(scenario())


def test_after_the_first_byte_the_prefill_leg_does_not_matter() -> None:
    async def fail_late(server: Any, request: Any, seen: Seen) -> Any:
        await pool_rooms[0].as_prefill(seen.rooms)
        await asyncio.sleep(0.2)
        return fake_pool.web.json_response(ENGINE_ERROR, status=500)

    pool_rooms: list[Rooms] = []

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            pool_rooms.append(decode.rooms)
            pool.answer = fail_late
            slow = fake_pool.stream_slowly(tokens=20, gap_s=0.03)
            decode.answer = decoding(decode.rooms, slow)
            async with await it.chat(stream=True) as response:
                assert await response.read() == b"".join(sse_chunks(20))
            await nothing_is_left(it, pool, decode)

    run(scenario())


def test_a_prefill_leg_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_DRAIN_S", 0.3)

    async def never_end(server: Any, request: Any, seen: Seen) -> Any:
        await rooms[0].as_prefill(seen.rooms)
        return await fake_pool.hang(server, request, seen)

    rooms: list[Rooms] = []

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            rooms.append(decode.rooms)
            pool.answer = never_end
            async with await it.chat() as response:
                assert response.status == 200
            await until(it.settled, "settled", limit_s=0.2)
            assert pool.running, "it is still drained"
            await until(lambda: pool.seen[0].rid in pool.aborted, "aborted", limit_s=1)
            await nothing_is_left(it, pool, decode)

    run(scenario())


def test_log_probabilities_that_never_come_fail_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair, "_DRAIN_S", 0.3)

    async def never_end(server: Any, request: Any, seen: Seen) -> Any:
        await rooms[0].as_prefill(seen.rooms)
        return await fake_pool.hang(server, request, seen)

    rooms: list[Rooms] = []

    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            rooms.append(decode.rooms)
            pool.answers.append(never_end)
            body = {"text": "x", "return_logprob": True, "logprob_start_len": 0}
            pool.answer = met_output(decode.rooms, "as_prefill")
            decode.answer = met_output(decode.rooms, "as_decode")
            async with it.client.post("/generate", json=body) as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
            assert pool.seen[0].rid in pool.aborted
            await nothing_is_left(it, pool, decode)

    def met_output(where: Rooms, side: str) -> Any:
        async def answer(server: Any, request: Any, seen: Seen) -> Any:
            await getattr(where, side)(seen.rooms)
            return fake_pool.web.json_response({"text": "x", "meta_info": {}})

        return answer

    run(scenario())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_merge_that_takes_too_much_memory_is_refused_and_not_tried_again(
    leg: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_MERGED_BYTES", 2 << 20)

    def answering(side: str, size: int) -> Any:
        async def answer(server: Any, request: Any, seen: Seen) -> Any:
            await getattr(rooms[0], f"as_{side}")(seen.rooms)
            content = {"text": "x" * size, "meta_info": {}}
            if not stream:
                return fake_pool.web.json_response(content)
            response = fake_pool.web.StreamResponse(headers=fake_pool.SSE)
            await response.prepare(request)
            await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")
            if side == leg:
                await fake_pool.hang(server, request, seen)
            return response

        return answer

    rooms: list[Rooms] = []

    async def scenario() -> None:
        async with paired(2, decodes=2) as (pool, decodes, it):
            rooms.append(decodes[0].rooms)
            # Together they are too much, neither is alone.
            pool.answer = answering("prefill", 3 << 19)
            for decode in decodes:
                decode.answer = answering("decode", 3 << 19)
            if leg == "prefill":  # it alone is
                pool.answer = answering("prefill", 3 << 20)
            body = {"text": "x", "stream": stream, "return_logprob": True, "logprob_start_len": 0}
            async with it.client.post("/generate", json=body) as response:
                assert response.status == 400
                assert "2 MiB that the router keeps" in (await it.error(response))["message"]
            assert len(pool.seen) == 1
            await nothing_is_left(it, pool, *decodes)

    run(scenario())


# -- clients that leave ------------------------------------------------------------------------


async def give_up(task: "asyncio.Task[aiohttp.ClientResponse]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await task).close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "transfer", "decode"])
def test_a_client_that_leaves_ends_both_legs(phase: str, stream: bool) -> None:
    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            if phase == "prefill":  # no KV yet
                pool.answer = fake_pool.hang
            elif phase == "transfer":  # computed, and the decode server does not fetch it
                decode.answer = fake_pool.hang
            else:
                pool.answer = prefill_slowly
                decode.answer = decoding(decode.rooms, fake_pool.hang)
            rooms.append(decode.rooms)
            task = asyncio.create_task(it.chat(stream=stream))
            await until(lambda: pool.running and decode.running, "running")
            await asyncio.sleep(0.1)
            await give_up(task)
            rid = pool.seen[0].rid
            await until(lambda: rid in pool.aborted, "the pool is told", limit_s=1)
            await until(lambda: rid in decode.aborted, "the decode server is told", limit_s=1)
            await nothing_is_left(it, pool, decode)

    rooms: list[Rooms] = []

    async def prefill_slowly(server: Any, request: Any, seen: Seen) -> Any:
        await rooms[0].as_prefill(seen.rooms)
        return await fake_pool.hang(server, request, seen)

    run(scenario())


def test_a_client_that_leaves_in_the_middle_of_the_stream() -> None:
    async def scenario() -> None:
        async with paired() as (pool, (decode,), it):
            slow = fake_pool.stream_slowly(tokens=1000, gap_s=0.02)
            decode.answer = decoding(decode.rooms, slow)
            response = await it.chat(stream=True)
            await response.content.readany()
            await until(lambda: pool.seen[0].finished, "the prefill leg has ended")
            response.close()
            rid = decode.seen[0].rid
            await until(lambda: rid in decode.aborted, "the decode server is told", limit_s=1)
            await nothing_is_left(it, pool, decode)
            assert not pool.aborted, "its leg was over"

    run(scenario())


def test_a_client_that_leaves_while_the_decode_server_is_full() -> None:
    async def scenario() -> None:
        async with paired(limit=1) as (pool, (decode,), it):
            decode.answer = decoding(decode.rooms, fake_pool.hang)
            tasks = [asyncio.create_task(it.chat()) for _ in range(3)]
            await until(lambda: it.router.core.queued_count == 2, "two are queued")
            for task in tasks:
                await give_up(task)
            await nothing_is_left(it, pool, decode)
            assert len(decode.seen) <= 2

    run(scenario())


# -- decode servers that are full, or go and come back -----------------------------------------


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_what_finds_no_room_waits_at_the_router_and_is_served_later(policy: str) -> None:
    config = PolicyConfig(policy=policy, queue_timeout_s=0.1)

    async def scenario() -> None:
        async with paired(limit=2, policy=config) as (pool, (decode,), it):
            most = 0
            quick = fake_pool.stream_slowly(tokens=5, gap_s=0.05)

            async def count(server: Any, request: Any, seen: Seen) -> Any:
                nonlocal most
                most = max(most, len(decode.running))
                return await quick(server, request, seen)

            decode.answer = decoding(decode.rooms, count)

            async def one() -> None:
                async with await it.chat(stream=True) as response:
                    assert response.status == 200
                    assert await response.read() == b"".join(sse_chunks(5))

            tasks = [asyncio.create_task(one()) for _ in range(6)]
            await until(lambda: it.router.core.queued_count == 4, "four wait")
            await asyncio.gather(*tasks)
            # One may end at the fake a little later than at the router.
            assert 2 <= most <= 3
            await nothing_is_left(it, pool, decode)

    run(scenario())


def test_a_decode_server_that_dies_before_the_first_byte_is_left_for_another() -> None:
    async def scenario() -> None:
        async with paired(1, decodes=2) as (pool, decodes, it):
            for decode in decodes:
                decode.answers.append(fake_pool.hang)
            tasks = [asyncio.create_task(it.chat(stream=True)) for _ in range(2)]
            await until(lambda: all(d.running for d in decodes), "one at each")
            await decodes[0].stop()
            survivor = decodes[1]
            async with await next(t for t in asyncio.as_completed(tasks)) as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert await response.read() == WHOLE_STREAM
            await until(lambda: it.router.decodes[0].server is None, "lost")
            assert rooms_of(it) == [1]
            for task in tasks:
                await give_up(task)
            await nothing_is_left(it, pool, survivor)

    run(scenario())


def test_a_decode_server_that_falls_silent_is_lost_with_its_requests() -> None:
    """Its connections stay open: only the probes notice."""

    async def scenario() -> None:
        async with paired(1, decodes=2) as (pool, decodes, it):
            slow = fake_pool.stream_slowly(tokens=1000, gap_s=0.02)
            for decode in decodes:
                decode.answer = decoding(decode.rooms, slow)
            response = await it.chat(stream=True)
            await response.content.readany()
            (busy,) = [decode for decode in decodes if decode.running]
            busy.answers_ready = 503
            link = next(link for link in it.router.decodes if link.url == busy.url)
            busy.info = {"nonsense": True}
            rest = await response.read()
            assert b'data: {"error":{' in rest and b"decode_lost" in rest
            await until(lambda: link.server is None, "lost")
            rid = busy.seen[0].rid
            await until(lambda: rid in busy.aborted, "told, in case it only stood still")
            await nothing_is_left(it, pool, *decodes)

    run(scenario())


def test_a_restarted_decode_server_joins_again_without_its_old_rooms() -> None:
    async def scenario() -> None:
        async with paired(1, limit=1) as (pool, (decode,), it):
            decode.answers.append(fake_pool.hang)
            task = asyncio.create_task(it.chat(stream=True))
            await until(lambda: decode.running, "running")
            before = it.router.decodes[0].server
            await decode.stop()
            await decode.start()
            async with await task as response:
                assert response.status == 200
                assert await response.read() == WHOLE_STREAM
            now = it.router.decodes[0].server
            assert now is not None and before is not None and now.life != before.life
            await nothing_is_left(it, pool, decode)
            assert rooms_of(it) == [0]

    run(scenario())


def test_a_restart_that_no_probe_saw_is_noticed_by_who_answers() -> None:
    async def scenario() -> None:
        async with paired(1) as (pool, (decode,), it):
            decode.answers.extend((fake_pool.hang, fake_pool.drop))
            old = asyncio.create_task(it.chat(stream=True))
            await until(lambda: decode.running, "running")
            decode.starts += 1
            new = asyncio.create_task(it.chat(stream=True))
            for task in (old, new):
                async with await task as response:
                    assert response.status == 200
                    assert response.headers["x-vertumnus-attempts"] == "2"
                    assert await response.read() == WHOLE_STREAM
            await nothing_is_left(it, pool, decode)

    run(scenario())


def test_without_a_decode_server_requests_wait_and_are_then_told_why() -> None:
    async def scenario() -> None:
        rooms = Rooms()
        decode = FakeDecode(rooms)
        config = PolicyConfig(queue_timeout_s=0.5)
        async with (
            prefill_pool(rooms) as pool,
            running(pool.url, decode_urls=(decode.url,), policy=config) as it,
        ):
            await until(lambda: it.router.core.is_ready(), "the pool serves")
            async with it.client.get("/readiness") as response:
                assert response.status == 503
                reasons = (await response.json())["reasons"]
            assert "no decode server is live" in reasons
            assert any(decode.url in reason and "connect" in reason for reason in reasons)
            async with await it.chat() as response:
                assert response.status == 503
                assert response.headers["retry-after"]
                assert (await it.error(response))["code"] == "no_decode"
            assert not pool.seen
            waiting = asyncio.create_task(it.chat(stream=True))
            async with decode:
                async with await waiting as response:
                    if response.status != 200:  # it was too slow in coming
                        response.close()
                await it.ready()
                async with await it.chat(stream=True) as response:
                    assert await response.read() == WHOLE_STREAM
            await nothing_is_left(it, pool)

    run(scenario())


def test_a_prefill_pool_without_decode_flags_says_what_is_missing() -> None:
    async def scenario() -> None:
        async with prefill_pool(Rooms()) as pool, running(pool.url) as it:
            await until(lambda: it.router.core.is_ready(), "the pool serves")
            assert any("--decode URL" in reason for reason in it.router.not_ready())

    run(scenario())


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"disaggregation_mode": "null"}, "start it with --disaggregation-mode decode"),
        ({"disaggregation_mode": "prefill"}, "start it with --disaggregation-mode decode"),
        ({"page_size": 64}, "page size is 64"),
        (
            {"dtype": "auto"},
            "it has --dtype auto, the pools float32: start both with the same --dtype",
        ),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            "it has --kv-cache-dtype fp8_e4m3, the pools auto: start both with the same --kv-ca",
        ),
        ({"served_model_name": "other"}, "serves 'other'"),
        ({"internal_states": []}, "how many requests"),
    ],
)
def test_a_decode_server_that_does_not_fit_is_refused_until_it_does(
    info: dict[str, Any], says: str
) -> None:
    async def scenario() -> None:
        rooms = Rooms()
        async with (
            prefill_pool(rooms) as pool,
            FakeDecode(rooms, **info) as decode,
            running(pool.url, decode_urls=(decode.url,)) as it,
        ):
            # Before the pool has joined it is refused for another reason.
            await until(lambda: says in str(it.router.decodes[0].trouble), "refused")

            async def shown() -> dict[str, Any]:
                async with it.client.get("/workers") as response:
                    workers = (await response.json())["workers"]
                return next(w for w in workers if w["worker_type"] == "decode")

            found = await shown()
            assert (found["id"], found["state"]) == (decode.url, "refused")
            assert says in found["reason"]
            assert it.router.not_ready()
            decode.info |= FakeDecode(rooms).info
            await it.ready()
            found = await shown()
            assert (found["state"], found["reason"]) == ("serving", None)
            assert (found["load"], found["limit"]) == (0, 64)

    run(scenario())


def test_a_pool_that_decodes_itself_is_refused_where_decode_servers_are_given() -> None:
    async def scenario() -> None:
        async with (
            FakePool(1) as pool,
            FakeDecode(Rooms()) as decode,
            running(pool.url, decode_urls=(decode.url,)) as it,
        ):
            await until(lambda: "decodes itself" in str(it.router.pools[0].trouble), "refused")
            async with it.client.get("/workers") as response:
                (shown,) = (await response.json())["pools"]
            assert "--disaggregation-mode prefill" in shown["trouble"]
            assert it.router.not_ready()

    run(scenario())


# -- pools that change meanwhile -----------------------------------------------------------------


def test_a_merge_and_a_split_leave_home_and_room_as_they_are() -> None:
    async def scenario() -> None:
        async with paired(4, "4x1") as (pool, (decode,), it):
            slow = fake_pool.stream_slowly(tokens=60, gap_s=0.02)
            decode.answer = decoding(decode.rooms, slow)
            prefill, placed = pool.answer, asyncio.Event()

            async def prefill_once_all_are_placed(*seen: Any) -> Any:
                await placed.wait()
                return await prefill(*seen)

            # None is prefilled before all are placed, so that each gets a rank of its own.
            pool.answer = prefill_once_all_are_placed
            tasks = [asyncio.create_task(it.chat(stream=True)) for _ in range(4)]
            await until(lambda: len(pool.seen) == len(decode.running) == 4, "running")
            placed.set()
            for composition in ("2x2", "4x1"):
                body = {"composition": composition}
                async with it.client.post("/vertumnus/reconfigure", json=body) as response:
                    assert response.status == 200
            for task in tasks:
                async with await task as response:
                    assert await response.read() == b"".join(sse_chunks(60))
            assert sorted(seen.rank for seen in pool.seen) == [0, 1, 2, 3]
            assert len(decode.seen) == 4
            for seen in decode.seen:
                assert seen.fields["bootstrap_room"] % 4 == seen.fields["disagg_prefill_dp_rank"]
            await nothing_is_left(it, pool, decode)

    run(scenario())


@pytest.mark.parametrize("what", ["rank", "front"])
def test_a_stream_outlives_the_rank_and_the_pool_that_prefilled_it(what: str) -> None:
    async def scenario() -> None:
        async with paired(1) as (pool, (decode,), it):
            slow = fake_pool.stream_slowly(tokens=60, gap_s=0.02)
            decode.answer = decoding(decode.rooms, slow)
            async with await it.chat(stream=True) as response:
                await response.content.readany()
                await until(lambda: pool.seen[0].finished, "handed over")
                if what == "rank":
                    pool.lose_rank(0, "its process exited")
                    await until(lambda: it.router.not_ready(), "no worker is left")
                else:
                    await pool.stop_front()
                    await until(lambda: it.router.pools[0].description is None, "the pool left")
                rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            assert b"error" not in rest
            await until(it.settled, "settled")
            assert rooms_of(it) == [0]

    run(scenario())


def test_a_rank_that_dies_before_the_hand_over_is_left_for_another() -> None:
    async def scenario() -> None:
        async with paired(2) as (pool, (decode,), it):
            pool.answers.append(fake_pool.hang)
            task = asyncio.create_task(it.chat(stream=True))
            await until(lambda: pool.running and decode.running, "running")
            pool.lose_rank(pool.seen[0].rank, "its process exited")
            async with await task as response:
                assert response.headers["x-vertumnus-attempts"] == "2"
                assert await response.read() == WHOLE_STREAM
            first, second = pool.seen
            assert first.rank != second.rank
            assert first.fields["bootstrap_room"] != second.fields["bootstrap_room"]
            await until(lambda: first.rid in decode.aborted, "the other leg is told", limit_s=1)
            await nothing_is_left(it, pool, decode)

    run(scenario())


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_every_request_ends_once_whatever_the_legs_do(policy: str) -> None:
    source = random.Random(11)

    async def client(it: Running) -> None:
        for _ in range(8):
            patience_s = source.uniform(0, 0.4) if source.random() < 0.4 else None
            try:
                async with asyncio.timeout(patience_s):
                    async with await it.chat(stream=source.random() < 0.8) as response:
                        await response.read()
                        assert response.status in (200, 429, 502, 503)
            except (TimeoutError, aiohttp.ClientError):
                pass

    async def restarts(decode: FakeDecode) -> None:
        while True:
            await asyncio.sleep(0.4)
            await decode.stop()
            await asyncio.sleep(0.2)
            await decode.start()

    async def scenario() -> None:
        config = PolicyConfig(policy=policy, queue_timeout_s=1.0, queue_limit=64)
        async with paired(2, decodes=2, limit=4, policy=config) as (pool, decodes, it):
            rooms = decodes[0].rooms

            async def any_prefill(server: Any, request: Any, seen: Seen) -> Any:
                bad = list(FAILURES.values())
                return await source.choice([prefilling(rooms)] * 12 + bad)(server, request, seen)

            async def any_decode(server: Any, request: Any, seen: Seen) -> Any:
                slow = decoding(rooms, fake_pool.stream_slowly(tokens=4, gap_s=0.02))
                bad = list(FAILURES.values())
                return await source.choice([decoding(rooms), slow] * 6 + bad)(server, request, seen)

            pool.answer = any_prefill
            for decode in decodes:
                decode.answer = any_decode
            trouble = asyncio.create_task(restarts(decodes[0]))
            await asyncio.gather(*(client(it) for _ in range(16)))
            assert not trouble.done(), trouble
            trouble.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await trouble
            await nothing_is_left(it, pool, *decodes)
            samples = await it.samples()
            assert samples["vertumnus_requests_pending"] == 0

    run(scenario())
