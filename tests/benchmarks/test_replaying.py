"""The replaying client against an endpoint that misbehaves on purpose."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from vertumnus_bench.endpoint import Endpoint, OpenAiChat, OpenAiCompletions, SglangGenerate
from vertumnus_bench.replaying import Replayed, ReplayPlan, replay
from vertumnus_bench.trace_prompts import Prompts
from vertumnus_sim.workloads.statistics import reused_tokens
from vertumnus_sim.workloads.traces import TraceRequest

from tests.benchmarks.fake_endpoint import (
    CUT,
    ERROR,
    GARBAGE,
    HANG_UP,
    REFUSE,
    SHORT,
    SILENT,
    FakeEndpoint,
    serving,
)

ENDPOINTS: Mapping[str, Endpoint] = {
    "sglang": SglangGenerate(),
    "completions": OpenAiCompletions("m"),
    "completions of words": OpenAiCompletions("m", as_text=True),
    "chat": OpenAiChat("m"),
}


def asks(*blocks: tuple[int, ...], every_s: float = 0.03) -> list[TraceRequest]:
    """Prompts of whole blocks."""
    return [TraceRequest(n * every_s, len(ids) * 8, 3, ids, 8) for n, ids in enumerate(blocks)]


def replayed(
    fake: FakeEndpoint,
    requests: Sequence[TraceRequest],
    endpoint: Endpoint | None = None,
    max_open: int = 64,
    timeout_s: float = 20.0,
) -> Replayed:
    plan = ReplayPlan(
        url=fake.url,
        endpoint=endpoint or SglangGenerate(),
        max_open=max_open,
        timeout_s=timeout_s,
    )
    return asyncio.run(replay(requests, plan))


@pytest.mark.parametrize("api", ENDPOINTS)
def test_a_server_sees_the_reuse_that_the_trace_promises(api: str) -> None:
    requests = asks((1, 2, 3), (1, 2, 4, 5), (6,), (1, 2, 4, 7), (1, 2, 3))
    with serving(FakeEndpoint()) as fake:
        found = replayed(fake, requests, ENDPOINTS[api], max_open=1).answers
    assert [answer.failure for answer in found] == [None] * 5
    usages = [answer.usage for answer in found]
    assert [u and u.prompt_tokens for u in usages] == [24, 32, 8, 32, 24]
    # Whatever else two random blocks begin with alike.
    for usage, reused in zip(usages, reused_tokens(requests), strict=True):
        assert usage is not None and usage.cached_tokens is not None
        assert reused <= usage.cached_tokens < reused + 4
    for answer in found:
        assert answer.first_s is not None and answer.last_s is not None
        assert 0 < answer.first_s <= answer.last_s


@pytest.mark.parametrize("api", ["sglang", "completions", "chat"])
def test_what_is_asked(api: str) -> None:
    request = TraceRequest(0.0, 20, 3, (1, 2, 3), 8)
    with serving(FakeEndpoint()) as fake:
        replayed(fake, [request], ENDPOINTS[api])
    (body,) = fake.bodies
    assert body["stream"] is True
    if api == "sglang":
        assert body["input_ids"] == Prompts().tokens(0, request)
        assert body["sampling_params"]["max_new_tokens"] == 3
        assert body["sampling_params"]["ignore_eos"] is True
        return
    assert (body["max_tokens"], body["ignore_eos"], body["model"]) == (3, True, "m")
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("how", "cause", "detail"),
    [
        (REFUSE, "status 503", "overloaded"),
        (CUT, "broke off", "without [DONE]"),
        (HANG_UP, "broke off", "ClientPayloadError"),
        (ERROR, "error event", "the rank died"),
        (SHORT, "other length", "2 tokens instead of 3"),
        (SILENT, "timed out", "no end within 1 s"),
        (GARBAGE, "unreadable", "KeyError"),
    ],
)
def test_a_failure_has_its_cause_and_leaves_the_others_alone(
    how: str, cause: str, detail: str
) -> None:
    timeout_s = 1.0 if how == SILENT else 20.0
    with serving(FakeEndpoint(behaviour={1: how})) as fake:
        found = replayed(fake, asks((1,), (2,), (3,)), max_open=1, timeout_s=timeout_s).answers
    before, failed, after = (answer.failure for answer in found)
    assert before is None and after is None
    assert failed is not None and failed[0] == cause
    assert detail in failed[1]


def test_nobody_listens() -> None:
    found = replayed(FakeEndpoint(url="http://127.0.0.1:9"), asks((1,), (2,))).answers
    assert [answer.failure and answer.failure[0] for answer in found] == ["not connected"] * 2


def test_a_chat_without_visible_text_has_a_first_token_all_the_same() -> None:
    with serving(FakeEndpoint(slow_s=0.1)) as fake:
        (answer,) = replayed(fake, asks((1,)), ENDPOINTS["chat"]).answers
    assert answer.first_s is not None and answer.first_s >= 0.1


def test_the_role_of_a_chat_is_no_token() -> None:
    chat = OpenAiChat("m")
    assert not chat.has_token({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    assert chat.has_token({"choices": [{"delta": {"role": "assistant", "content": "a"}}]})
    assert not chat.has_token({"choices": [], "usage": {}})


def test_requests_go_out_whatever_became_of_those_before() -> None:
    with serving(FakeEndpoint(slow_s=0.5)) as fake:
        found = replayed(fake, asks(*((n,) for n in range(10)), every_s=0.01))
    assert found.most_open == 10
    assert all(a.sent_s is not None and a.sent_s - a.due_s < 0.4 for a in found.answers)


def test_a_request_too_many_waits_and_is_late() -> None:
    with serving(FakeEndpoint(slow_s=0.2)) as fake:
        found = replayed(fake, asks((1,), (2,), (3,), every_s=0.0), max_open=1)
    assert found.most_open == 1
    lags_s = [a.sent_s - a.due_s for a in found.answers if a.sent_s is not None]
    assert lags_s[1] > 0.19 and lags_s[2] > 0.38


def test_the_loop_is_watched_all_the_time() -> None:
    with serving(FakeEndpoint()) as fake:
        found = replayed(fake, asks((1,), (2,), every_s=0.3))
    assert len(found.loop_delays_s) > 5
    assert min(found.loop_delays_s) > -0.001
