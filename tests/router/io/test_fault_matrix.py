"""Every fault of a worker in every phase, for streams and for other answers: the client gets one
clean ending, nothing is left over, and nothing is tried again that must not be."""

import asyncio
from dataclasses import dataclass
from typing import Literal

import pytest
from vertumnus_router.core.config import BackoffConfig, BreakerConfig, PolicyConfig
from vertumnus_router.io.config import Limits

from tests.router.io import fake_pool
from tests.router.io.fake_pool import Answer, FakePool, pools, refuse, sse_chunks
from tests.router.io.harness import Running, run, running, until
from tests.router.io.wire_faults import CHUNKED, EVENT, chunk, head, reset, wire

Ending = Literal["another attempt", "error event", "whole", "refused"]

#: Short enough that what stalls is given up soon, long enough for a slow machine.
LIMITS = Limits(stop_s=1.0, probe_s=60.0, answer_s=0.6, stream_idle_s=0.6)
POLICY = PolicyConfig(
    queue_timeout_s=5.0,
    breaker=BreakerConfig(enabled=False),
    backoff=BackoffConfig(initial_s=0.0),
)
SSE = b"content-type: text/event-stream"
JSON = b"content-type: application/json"
ERROR = {"object": "error", "message": "boom", "code": 500}


@dataclass(frozen=True)
class Case:
    name: str
    answer: Answer
    ending: Ending


def before_the_first_byte() -> list[Case]:
    """What can be hidden from the client, and is."""
    faults = {
        "closed": wire(),
        "reset": wire(then="reset"),
        "half-closed": wire(then="half-close"),
        "silent": wire(then="stay"),
        "no HTTP": wire(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
        "a garbage status line": wire(b"HTTP/1.1 banana\r\n\r\n"),
        "half a status line": wire(b"HTTP/1.1 20"),
        "half a head": wire(b"HTTP/1.1 200 OK\r\ncontent-le"),
        "headers without end, fast": wire(b"HTTP/1.1 200 OK\r\n", forever=b"x-a: b\r\n" * 500),
        "headers without end, slowly": wire(
            b"HTTP/1.1 200 OK\r\n", forever=b"x-a: b\r\n", gap_s=0.05
        ),
        "1xx without end": wire(forever=head(status=b"103 Early Hints"), gap_s=0.01),
        "an upgrade": wire(
            head(b"upgrade: websocket", b"connection: upgrade", status=b"101 Switching"),
            then="stay",
        ),
        "a length that is none": wire(head(SSE, b"content-length: -1") + EVENT),
        "two lengths": wire(head(SSE, b"content-length: 1", b"content-length: 20") + EVENT),
        "a length and chunks": wire(
            head(SSE, b"content-length: 5", b"transfer-encoding: chunked") + chunk(EVENT)
        ),
        "a garbage chunk": wire(CHUNKED + b"zz\r\n" + EVENT),
        "a head and no more": wire(CHUNKED),
        "a head and silence": wire(CHUNKED, then="stay"),
        "a head and a reset": wire(CHUNKED, then="reset"),
        "500": refuse(500, ERROR),
        "503": refuse(503, ERROR),
        "429": refuse(429, ERROR),
        "half of a 500": wire(head(JSON, b"content-length: 90", status=b"500 No") + b"{"),
        "silence in a 500": wire(
            head(JSON, b"content-length: 90", status=b"500 No") + b"{", then="stay"
        ),
    }
    return [Case(name, answer, "another attempt") for name, answer in faults.items()]


def after_the_first_byte(content_type: bytes) -> dict[str, Answer]:
    chunked = head(content_type, b"transfer-encoding: chunked") + chunk(EVENT)
    return {
        "cut": wire(chunked),
        "reset in the middle": wire(chunked, then="reset"),
        "half-closed in the middle": wire(chunked, then="half-close"),
        "stalled in the middle": wire(chunked, then="stay"),
        "garbage instead of a chunk": wire(chunked, b"\xff\xfe\x00"),
        "shorter than declared": wire(head(content_type, b"content-length: 5000") + EVENT),
        "reset without a length": wire(head(content_type) + EVENT, then="reset"),
    }


def no_faults(content_type: bytes) -> dict[str, Answer]:
    """What is odd, but an answer."""
    whole = head(content_type, b"content-length: %d" % len(EVENT)) + EVENT
    return {
        "early hints first": wire(head(status=b"103 Early Hints"), whole),
        "longer than declared": wire(whole + b"and more" * 10, then="stay"),
        "until it is closed": wire(head(content_type) + EVENT),
    }


def cases(stream: bool) -> list[Case]:
    content_type = SSE if stream else JSON
    # What does not stream is held back until it is complete.
    ending: Ending = "error event" if stream else "another attempt"
    return [
        *before_the_first_byte(),
        Case("its own fault", refuse(400, ERROR), "refused"),
        *(Case(n, a, ending) for n, a in after_the_first_byte(content_type).items()),
        *(Case(n, a, "whole") for n, a in no_faults(content_type).items()),
    ]


def unused(it: Running) -> bool:
    """Whether no connection to a front is in use."""
    fronts = [front for front, _ in it.router._fronts.values()]
    return all(len(front._open) == len(front._idle) for front in fronts)


async def ends_well(it: Running, pool: FakePool, case: Case, stream: bool) -> None:
    pool.seen.clear()
    for front, _ in it.router._fronts.values():
        front.close()  # a kept connection that breaks may be tried once more, see below
    pool.answers.append(case.answer)
    async with await it.chat(stream=stream) as response:
        answer = await response.read()  # to a proper end, or this raises
        attempts = int(response.headers["x-vertumnus-attempts"])
    assert attempts == len(pool.seen) == (2 if case.ending == "another attempt" else 1)
    match case.ending:
        case "another attempt":
            assert response.status == 200
            first, second = pool.seen
            assert first.rank != second.rank
            whole = b"".join(sse_chunks(3))
            assert answer == whole if stream else b"hello" in answer
        case "error event":
            assert response.status == 200
            assert answer.startswith(EVENT)
            assert answer.count(b'data: {"error":{') == 1
            assert answer.endswith(b"}}\n\n")
        case "whole":
            assert response.status == 200
            assert answer == EVENT
        case "refused":
            assert response.status == 400
            assert b"boom" in answer
    await until(it.settled, "settled")
    await until(lambda: unused(it), "no connection is left")
    await until(lambda: not pool.running, "the engine is idle")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
def test_one_clean_ending(stream: bool) -> None:
    async def scenario() -> None:
        async with (
            FakePool(2) as pool,
            running(pool.url, limits=LIMITS, policy=POLICY) as it,
        ):
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            for case in cases(stream):
                try:
                    await ends_well(it, pool, case, stream)
                except Exception as exc:
                    raise AssertionError(f"{case.name}: {exc!r}") from exc

    run(scenario())


def test_events_that_are_garbage_are_passed_on_as_they_are() -> None:
    garbage = b"data: {not json\n\n\x00\xff\xfe: \r\r\n" + b"data: [DONE]\n\n"

    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url, limits=LIMITS) as it:
            await it.ready()
            pool.answers.append(wire(CHUNKED + chunk(garbage) + chunk(b""), then="stay"))
            async with await it.chat(stream=True) as response:
                assert await response.read() == garbage
            assert len(pool.seen) == 1
            await until(it.settled, "settled")

    run(scenario())


def test_a_connection_that_is_closed_when_it_is_used_again_costs_no_attempt() -> None:
    """The server may close an idle connection just as the next request is on its way."""
    body = b'{"choices":[]}'
    kept = head(JSON, b"content-length: %d" % len(body)) + body

    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url, limits=LIMITS) as it:
            await it.ready()
            pool.answers += [wire(kept, then="stay")]
            async with await it.chat() as response:
                assert await response.read() == body
            # Its handler goes on, so aiohttp does not read the next request on this connection.
            await until(lambda: len(it.router._fronts["fake"][0]._idle) == 1, "kept")  # type: ignore[index]
            connection = it.router._fronts["fake"][0]._idle[0]  # type: ignore[index]
            request = asyncio.create_task(it.chat())
            await until(lambda: connection._call is not None, "used again")
            for server in list(pool._runner.server.connections):  # type: ignore[union-attr]
                if server.transport.get_extra_info("peername") == (
                    connection._transport.get_extra_info("sockname")
                ):
                    server.transport.close()
            async with await request as response:
                assert response.status == 200
                assert response.headers["x-vertumnus-attempts"] == "1"
            await until(it.settled, "settled")

    run(scenario())


def test_a_front_that_resets_every_connection_is_left_for_another() -> None:
    def refuse_to_talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer.transport)

    async def scenario() -> None:
        one, two = FakePool(1, pool_id="one"), FakePool(1, pool_id="two")
        async with pools(one, two), running(one.url, two.url, limits=LIMITS, policy=POLICY) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            await one.stop_front()
            server = await asyncio.start_server(refuse_to_talk, "127.0.0.1", one.port)
            async with server:
                for _ in range(6):
                    async with await it.chat(stream=True) as response:
                        assert response.status == 200
                        assert response.headers["x-vertumnus-worker"] == "two/0x1"
                        await response.read()
            await until(it.settled, "settled")

    run(scenario())


def test_a_worker_that_is_full_is_not_asked_again_before_its_time() -> None:
    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            full = head(JSON, b"content-length: 2", b"retry-after: 20", status=b"503 Full") + b"{}"
            pool.answers.append(wire(full))
            for _ in range(20):
                async with await it.chat() as response:
                    assert response.status == 200
            asked = [seen.rank for seen in pool.seen]
            assert len(asked) == 21
            assert asked.count(asked[0]) == 1
            async with it.client.get("/workers") as response:
                workers = {w["ranks"][0]: w for w in (await response.json())["workers"]}
            assert workers[asked[0]]["resting"] == "it answered that it has no room"
            assert workers[asked[0]]["breaker"] == "closed"

    run(scenario())


@pytest.mark.parametrize(
    ("says", "told"),
    [(b"7", "7"), (b"9" * 400, "86400"), (b"Wed, 21 Oct 2026 07:28:00 GMT", "1"), (b"-3", "1")],
)
def test_a_client_is_told_what_the_last_worker_said_of_when_to_come_back(
    says: bytes, told: str
) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            full = head(JSON, b"content-length: 2", b"retry-after: " + says, status=b"503 Full")
            full += b"{}"
            pool.answers.append(wire(full))
            async with await it.chat() as response:
                assert response.status == 503
                assert response.headers["retry-after"] == told
                assert (await it.error(response))["code"] == "overloaded"

    run(scenario())


def test_a_breaker_that_opens_is_seen_and_its_worker_left_alone() -> None:
    policy = PolicyConfig(breaker=BreakerConfig(failure_threshold=2, open_s=60.0))

    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url, policy=policy) as it:
            await it.ready()
            await until(lambda: len(it.router.core.workers(it.router.clock.now())) == 2, "both")
            pool.answer_by_rank[0] = refuse(500, ERROR)
            while it.router.core.breakers_opened == 0:
                async with await it.chat() as response:
                    assert response.status == 200
            before = len(pool.seen)
            for _ in range(10):
                async with await it.chat() as response:
                    assert response.status == 200
            assert {seen.rank for seen in pool.seen[before:]} == {1}
            async with it.client.get("/workers") as response:
                workers = {w["id"]: w for w in (await response.json())["workers"]}
            assert workers["fake/0x1"]["breaker"] == "open"
            assert "boom" in workers["fake/0x1"]["resting"]
            samples = await it.samples()
            state = 'vertumnus_worker_breaker_state{degree="1",worker="fake/0x1"}'
            assert samples[state] == 1
            assert samples["vertumnus_breakers_opened_total"] == 1
            # The other one fails, too: nobody is left, so both are asked all the same.
            pool.answer = refuse(500, ERROR)
            while it.router.core.breakers_opened == 1:
                async with await it.chat() as response:
                    assert response.status == 502
            pool.answer, pool.answer_by_rank = fake_pool.stream, {}
            async with await it.chat() as response:
                assert response.status == 200
            assert (await it.samples())["vertumnus_breakers_overridden_total"] > 0

    run(scenario())
