"""The request log: one line for each request, never what is none of its business."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from vertumnus_router.clock import VirtualClock
from vertumnus_router.core.types import RequestId
from vertumnus_router.io.observe.request_log import RequestLog
from vertumnus_router.io.observe.settings import ObserveConfig
from vertumnus_router.io.observe.trail import Trail

from tests.router.io import fake_pool
from tests.router.io.fake_decode import paired
from tests.router.io.fake_pool import FakePool, Seen
from tests.router.io.harness import Running, run, running, until

SECRET = "words that nobody else should read"


async def answer_and_report(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
    pool.prefill_started(seen)
    pool.prefill_finished(seen, input_tokens=100, cached_tokens=64)
    await asyncio.sleep(0.2)  # the report comes by another way
    return await fake_pool.stream(pool, request, seen)


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(
    path: Path, pool: FakePool, scenario: Callable[[Running], Awaitable[None]]
) -> list[dict[str, Any]]:
    """What is in the log once the router has stopped."""

    async def whole() -> None:
        observe = ObserveConfig(request_log=str(path))
        async with pool, running(pool.url, observe=observe) as it:
            await it.ready()
            await until(
                lambda: len(it.router.core.workers(it.router.clock.now())) == len(pool.blocks),
                "all workers",
            )
            await scenario(it)

    run(whole())
    return logged(path)


def test_a_line_says_where_a_request_went_and_what_it_took(tmp_path: Path) -> None:
    pool = FakePool(2, "1x2")
    pool.answer = answer_and_report

    async def scenario(it: Running) -> None:
        body = {"messages": [{"role": "user", "content": SECRET}], "stream": True}
        headers = {"x-request-id": "mine", "authorization": f"Bearer {SECRET}"}
        async with it.client.post(
            f"/v1/chat/completions?key={SECRET}", json=body, headers=headers
        ) as response:
            await response.read()

    (line,) = lines_of(tmp_path / "log", pool, scenario)
    assert SECRET not in json.dumps(line)
    assert len(line["request_id"]) == 32
    assert line["client_request_id"] == "mine"
    assert line["time"].endswith("Z")
    assert (line["method"], line["endpoint"]) == ("POST", "/v1/chat/completions")
    assert (line["status"], line["outcome"]) == (200, "ok")
    assert (line["worker"], line["degree"], line["home"]) == ("fake/0x2", 2, "fake/0")
    assert (line["attempts"], line["failures"], line["decode"]) == (1, [], None)
    assert (line["input_tokens"], line["exact"]) == (100, False)
    assert (line["cached_tokens"], line["cached_tokens_predicted"]) == (64, 0)
    assert line["prefill_s"] == 0.25 and line["prefill_s_predicted"] > 0
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["duration_s"]
    assert line["ttft_s"] >= 0.15
    assert sum(line["ttft_parts_s"].values()) == pytest.approx(line["ttft_s"])
    assert line["trace_id"] is None


def test_what_went_wrong_is_told_with_its_reason(tmp_path: Path) -> None:
    pool = FakePool(2)

    async def scenario(it: Running) -> None:
        async with it.client.post("/generate", data=b"{") as response:
            assert response.status == 400
        async with await it.chat(model="no-such-model") as response:
            assert response.status == 404
        pool.answers.append(fake_pool.drop)
        async with await it.chat() as response:
            assert response.status == 200
        pool.answers.append(fake_pool.refuse(422, {"message": SECRET}))
        async with await it.chat() as response:
            assert response.status == 422
        pool.answer = fake_pool.refuse(500, {"error": "boom"})
        async with await it.chat() as response:
            assert response.status == 502
        pool.answer = fake_pool.hang
        asked = asyncio.create_task(it.chat(stream=True))
        await until(lambda: pool.running, "at work")
        asked.cancel()
        await until(it.settled, "settled")

    path = tmp_path / "log"
    lines = lines_of(path, pool, scenario)
    assert SECRET not in path.read_text() and "no-such-model" not in path.read_text()
    told = [(line["outcome"], line["status"], line["attempts"]) for line in lines]
    assert told == [
        ("invalid_json", 400, 0),
        ("model_not_found", 404, 0),
        ("ok", 200, 2),
        ("client_error", 422, 1),
        ("worker_error", 502, 2),
        ("cancelled", None, 1),
    ]
    failures = [[one["failure"] for one in line["failures"]] for line in lines]
    wrong = ["server_error", "server_error"]
    assert failures == [[], [], ["disconnected"], ["client_error"], wrong, []]
    (failed,) = lines[2]["failures"]
    assert {failed["worker"], lines[2]["worker"]} == {"fake/0x1", "fake/1x1"}
    assert all(line["ttft_s"] is None for line in lines)


def test_a_request_with_a_decode_server_names_it(tmp_path: Path) -> None:
    path = tmp_path / "log"

    async def scenario() -> None:
        async with paired(2, "1x2", observe=ObserveConfig(request_log=str(path))) as (
            _,
            decodes,
            it,
        ):
            async with await it.chat(stream=True) as response:
                await response.read()
            assert decodes[0].seen
            await until(lambda: path.read_text(), "written")
            (line,) = logged(path)
            assert line["decode"] == decodes[0].url
            assert line["ttft_parts_s"]["transfer"] >= 0

    run(scenario())


def ended() -> Trail:
    trail = Trail(RequestId("r"), b'\xff\n"', "POST", "/generate", 1.0)
    trail.ended_s, trail.outcome = 2.0, "ok"
    return trail


def test_what_a_slow_disk_leaves_no_room_for_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    whole = RequestLog._batch

    def slow(log: RequestLog) -> Any:
        may_write.wait(30)
        return whole(log)

    monkeypatch.setattr(RequestLog, "_batch", slow)
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), waiting=2)
    for _ in range(5):
        log.write(ended())
    assert log.dropped == 3
    may_write.set()
    log.close()
    lines = logged(tmp_path / "log")
    assert len(lines) == 2
    assert lines[0]["client_request_id"] == 'ÿ\n"', "one line, whatever the client calls it"
    assert lines[0]["time"] == "1970-01-01T00:00:01.000Z"


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path), VirtualClock())
    log.write(ended())
    while not path.read_text():
        threading.Event().wait(0.005)
    path.rename(tmp_path / "log.1")
    log.write(ended())
    log.close()
    assert len(logged(path)) == len(logged(tmp_path / "log.1")) == 1


def test_a_full_disk_costs_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("/dev/full", VirtualClock())
    log.write(ended())
    log.close()
    assert log.dropped == 1
    assert "cannot write the request log" in caplog.text


def test_a_folder_that_is_not_there_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RequestLog(str(tmp_path / "nowhere" / "log"), VirtualClock())
