"""Replays a trace: every request goes out at its time, whatever became of those before it."""

import asyncio
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from typing import Any, Literal

import aiohttp
import orjson
from vertumnus_sim.workloads.traces import TraceRequest

from vertumnus_bench.client import HUNG_S, connections
from vertumnus_bench.endpoint import Endpoint, Usage
from vertumnus_bench.trace_prompts import Prompts

_JSON = {"content-type": "application/json"}
#: So many bodies are prepared before their time.
_AHEAD = 32
_SAMPLE_S = 0.02
#: Of files and sockets that are not a request's.
_OTHER_FILES = 64
_LONGEST_DETAIL = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """``max_open``: a request that would be one too many waits, and its wait is lag."""

    url: str
    endpoint: Endpoint
    prompts: Prompts = field(default_factory=Prompts)
    exact_output: bool = True
    max_open: int = 4096
    timeout_s: float = HUNG_S


@dataclass(slots=True)
class Answer:
    """What became of one request. Seconds: ``due_s`` and ``sent_s`` from the first due time,
    ``first_s`` and ``last_s`` (of the tokens) from the sending. ``failure``: cause and detail."""

    number: int
    due_s: float
    input_tokens: int
    output_tokens: int
    sent_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    usage: Usage | None = None
    failure: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """``loop_delays_s``: how late the client's event loop was, sampled all the time."""

    answers: list[Answer]
    loop_delays_s: list[float]
    most_open: int


class _Failed(Exception):
    """The request has failed for ``cause``."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail


async def replay(requests: Sequence[TraceRequest], plan: ReplayPlan) -> Replayed:
    """``requests`` as they are to be sent, ordered by arrival. Returns when all have ended,
    each within ``plan.timeout_s``; never raises for what the server does."""
    slots = _Slots(min(plan.max_open, _open_files() - _OTHER_FILES))
    answers = [
        Answer(number, request.arrival_s, request.input_tokens, request.output_tokens)
        for number, request in enumerate(requests)
    ]
    with ThreadPoolExecutor(1) as thread:
        bodies = _bodies(requests, plan, thread)
        ahead = deque(islice(bodies, _AHEAD))
        await asyncio.gather(*ahead)
        async with (
            connections() as session,
            _loop_delays() as delays_s,
            asyncio.TaskGroup() as open_,
        ):
            client = _Client(session, plan, slots, began=time.perf_counter())
            for answer in answers:
                ahead.extend(islice(bodies, _AHEAD - len(ahead)))
                body = await ahead.popleft()
                await asyncio.sleep(max(0.0, client.began + answer.due_s - time.perf_counter()))
                await slots.acquire()
                open_.create_task(client.follow(answer, body))
    return Replayed(answers, delays_s, slots.most)


def _bodies(
    requests: Sequence[TraceRequest], plan: ReplayPlan, thread: ThreadPoolExecutor
) -> Iterator[asyncio.Future[bytes]]:
    """Each begins to be built, outside the loop's thread, when it is asked for."""

    def build(number: int, request: TraceRequest) -> bytes:
        return plan.endpoint.body(plan.prompts.tokens(number, request), request.output_tokens)

    loop = asyncio.get_running_loop()
    return (loop.run_in_executor(thread, build, n, request) for n, request in enumerate(requests))


class _Slots(asyncio.Semaphore):
    """Counts how many were taken at most."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._taken = 0
        self.most = 0

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        self._taken += 1
        self.most = max(self.most, self._taken)
        return True

    def release(self) -> None:
        self._taken -= 1
        super().release()


@asynccontextmanager
async def _loop_delays() -> AsyncIterator[list[float]]:
    """How much longer than asked for short sleeps take, until the end of the context."""
    found_s: list[float] = []

    async def sample() -> None:
        while True:
            slept_from = time.perf_counter()
            await asyncio.sleep(_SAMPLE_S)
            found_s.append(time.perf_counter() - slept_from - _SAMPLE_S)

    task = asyncio.create_task(sample())
    try:
        yield found_s
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, slots=True)
class _Client:
    session: aiohttp.ClientSession
    plan: ReplayPlan
    slots: _Slots
    began: float

    async def follow(self, answer: Answer, body: bytes) -> None:
        """To the end of the request, for which a slot was taken. Never raises for what the
        server does: that is the answer's failure."""
        sent = time.perf_counter()
        answer.sent_s = sent - self.began
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                await self._ask(answer, body, sent)
        except _Failed as exc:
            answer.failure = (exc.cause, exc.detail)
        except TimeoutError:
            answer.failure = ("timed out", f"no end within {self.plan.timeout_s:g} s")
        except aiohttp.ClientConnectorError as exc:
            answer.failure = ("not connected", str(exc))
        except (aiohttp.ClientError, OSError) as exc:
            answer.failure = ("broke off", f"{type(exc).__name__}: {exc}")
        except (KeyError, TypeError, ValueError) as exc:
            answer.failure = ("unreadable", f"{type(exc).__name__}: {exc}")
        finally:
            self.slots.release()

    async def _ask(self, answer: Answer, body: bytes, sent: float) -> None:
        """Raises ``_Failed``, and whatever aiohttp and a malformed stream raise."""
        endpoint = self.plan.endpoint
        url = f"{self.plan.url}{endpoint.path}"
        async with self.session.post(url, data=body, headers=_JSON) as response:
            if response.status != HTTPStatus.OK:
                text = (await response.text()).strip()
                raise _Failed(f"status {response.status}", text[:_LONGEST_DETAIL])
            # Only the first and the last events are parsed: the client's time is scarce.
            last: deque[bytes] = deque(maxlen=2)
            done = False
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    done = True
                    break
                answer.last_s = time.perf_counter() - sent
                if answer.first_s is None and endpoint.has_token(_event(data)):
                    answer.first_s = answer.last_s
                last.append(data)
        answer.usage = _usage(endpoint, last)
        if not done:
            raise _Failed("broke off", "the stream ended without [DONE]")
        _check(answer, self.plan)


def _event(data: bytes) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(data)
    if error := event.get("error"):
        raise _Failed("error event", str(error)[:_LONGEST_DETAIL])
    return event


def _usage(endpoint: Endpoint, last: Iterable[bytes]) -> Usage | None:
    """The latest that is told."""
    told = [usage for data in last if (usage := endpoint.usage(_event(data))) is not None]
    return told[-1] if told else None


def _check(answer: Answer, plan: ReplayPlan) -> None:
    if answer.first_s is None:
        raise _Failed("no token", "the stream ended without one")
    if plan.exact_output and answer.usage is not None:
        told, wanted = answer.usage.completion_tokens, answer.output_tokens
        if told != wanted:
            raise _Failed("other length", f"{told} tokens instead of {wanted}")


def _open_files() -> int:
    """How many this process may have, which is made as many as it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize
