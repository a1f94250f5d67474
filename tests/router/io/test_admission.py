"""Limits by client over HTTP: 429 with Retry-After, priorities, deadlines."""

import asyncio
import json
from typing import Any

import pytest
from vertumnus_router.core.admission import AdmissionConfig
from vertumnus_router.io.admission import retry_after
from vertumnus_router.io.forwarding import lowered
from vertumnus_router.io.keys import ApiKey

from tests.router.io.fake_pool import FakePool, hang, stream_slowly
from tests.router.io.harness import Running, run, running, until

ALICE, BOB = ApiKey("alice", "sk-alice-1"), ApiKey("bob", "sk-bob-22")
CONTROL = "sk-control"


def guarded(pool: FakePool, **limits: Any) -> Any:
    return running(
        pool.url,
        api_keys=(ALICE, BOB),
        control_key=CONTROL,
        admission=AdmissionConfig(**limits),
    )


async def ask(it: Running, key: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
    """Status, error code or None, and Retry-After or None of a chat request."""
    body = {"messages": [{"role": "user", "content": "hello"}], **more}
    headers = {"authorization": f"Bearer {key}", **(headers or {})}
    async with it.client.post("/v1/chat/completions", json=body, headers=headers) as response:
        code = (await it.error(response))["code"] if response.status >= 400 else None
        return response.status, code, response.headers.get("retry-after")


def test_a_client_over_its_rate_is_told_when_to_come_back() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, guarded(pool, requests_per_minute=2) as it:
            await it.ready()
            assert [(await ask(it, ALICE.key))[0] for _ in range(2)] == [200, 200]
            status, code, retry = await ask(it, ALICE.key)
            assert (status, code) == (429, "rate_limited")
            assert 1 <= int(retry) <= 30
            assert (await ask(it, BOB.key))[0] == 200, "others are not concerned"
            assert [(await ask(it, CONTROL))[0] for _ in range(4)] == [200] * 4
            assert len(pool.seen) == 7
            samples = await it.samples()
            assert samples['vertumnus_refused_total{client="alice",reason="rate_limited"}'] == 1
            assert samples['vertumnus_client_requests_total{client="operator"}'] == 4
            assert it.settled()

    run(scenario())


def test_tokens_of_the_prompt_are_limited() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, guarded(pool, tokens_per_minute=50) as it:
            await it.ready()
            long = [{"role": "user", "content": "word " * 200}]
            assert (await ask(it, ALICE.key, messages=long))[0] == 200, "the bucket was full"
            status, code, retry = await ask(it, ALICE.key)
            assert (status, code) == (429, "rate_limited")
            assert int(retry) > 60, "the debt is paid off first"

    run(scenario())


def test_requests_that_wait_count_until_their_answer_begins() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, guarded(pool, waiting=2) as it:
            await it.ready()
            pool.answer = hang
            waiting = [asyncio.create_task(ask(it, ALICE.key)) for _ in range(2)]
            await until(lambda: len(pool.seen) == 2, "both are with the engine")
            status, code, retry = await ask(it, ALICE.key)
            assert (status, code, retry) == (429, "too_many_waiting", "1")
            samples = await it.samples()
            assert samples['vertumnus_client_waiting{client="alice"}'] == 2
            for task in waiting:
                task.cancel()  # the clients leave
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: it.router.door.admission.waiting() == {}, "they are forgotten")
            # A stream that has begun does not wait, though it goes on.
            pool.answer = stream_slowly(tokens=40, gap_s=0.05)
            streams = []
            for _ in range(3):
                response = await it.client.post(
                    "/v1/chat/completions",
                    json={"messages": [{"role": "user", "content": "x"}], "stream": True},
                    headers={"authorization": f"Bearer {ALICE.key}"},
                )
                assert response.status == 200
                await response.content.readany()
                streams.append(response)
            for response in streams:
                response.close()
            await until(it.settled, "settled")

    run(scenario())


@pytest.mark.parametrize(
    ("key", "asked", "counts"),
    [(ALICE.key, 7, 0), (ALICE.key, -3, -3), (CONTROL, 7, 7), (None, 7, 7)],
)
def test_only_operators_go_before_others(key: str | None, asked: int, counts: int) -> None:
    """Without any keys all are trusted alike."""

    async def scenario() -> None:
        async with FakePool(1) as pool:
            keys: dict[str, Any] = {"api_keys": (ALICE,), "control_key": CONTROL}
            async with running(pool.url, **(keys if key else {})) as it:
                await it.ready()
                pool.answer = hang
                task = asyncio.create_task(ask(it, key or "", priority=asked))
                await until(lambda: pool.seen, "it arrives")
                (exchange,) = it.router.hot.live
                assert exchange.request.priority == counts
                assert json.loads(pool.seen[0].body)["priority"] == counts, "engines evict by it"
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    run(scenario())


@pytest.mark.parametrize("said", [b"7", b'"7"', b"7.0", b"1e9", b"true"])
def test_no_spelling_of_a_priority_gets_past_the_limit(said: bytes) -> None:
    body = b'{"text": "x", "priority": ' + said + b"} "
    assert json.loads(lowered(body, json.loads(body), 0))["priority"] == 0


@pytest.mark.parametrize("said", [b"", b', "priority": null', b', "priority": -3'])
def test_a_body_that_asks_for_no_more_than_it_may_stays_as_it_is(said: bytes) -> None:
    body = b'{"text": "x"' + said + b"}"
    assert lowered(body, json.loads(body), 0) is body


def test_nor_does_a_request_that_passes_unread() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, guarded(pool) as it:
            await it.ready()
            for key, status in ((ALICE.key, 400), (CONTROL, 404)):
                headers = {"authorization": f"Bearer {key}"}
                for body in (b'{"priority": 7}', b'{"x": NaN, "priority": 7}'):
                    async with it.client.post(
                        "/v1/responses", data=body, headers=headers
                    ) as response:
                        assert response.status == status
                        code = (await it.error(response))["code"]
                        assert (code == "priority_too_high") == (status == 400)
            await until(it.settled, "settled")

    run(scenario())


def test_who_cannot_be_in_time_is_told_at_once() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, guarded(pool, reject_late=True) as it:
            await it.ready()
            name = "x-request-deadline-ms"
            assert (await ask(it, ALICE.key, {name: "60000"}))[0] == 200
            assert (await ask(it, ALICE.key))[0] == 200
            status, code, _ = await ask(it, ALICE.key, {name: "1"})
            assert (status, code) == (429, "deadline_unmeetable")
            for wrong in ("", "soon", "-1", "0", "1.5", "9" * 30):
                status, code, _ = await ask(it, ALICE.key, {name: wrong})
                assert (status, code) == (400, "invalid_deadline"), wrong
            assert len(pool.seen) == 2
        async with FakePool(1) as pool, guarded(pool) as it:
            await it.ready()
            assert (await ask(it, ALICE.key, {name: "1"}))[0] == 200, "off by default"

    run(scenario())


@pytest.mark.parametrize(
    ("seconds", "says"), [(0, b"1"), (0.2, b"1"), (1.2, b"2"), (1e9, b"86400")]
)
def test_retry_after_is_in_whole_seconds(seconds: float, says: bytes) -> None:
    assert retry_after(seconds) == (b"retry-after", says)
