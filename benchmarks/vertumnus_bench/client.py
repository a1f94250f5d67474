"""Clients that stream answers over HTTP and never try again: what fails, fails."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, Generic, TypeVar

import aiohttp

from vertumnus_bench.stream import Stream
from vertumnus_bench.workload import Arrival, Ask, Conversation, Mix, documents

#: An answer that takes longer hangs.
HUNG_S = 240.0
_LONGEST_EVENT_BYTES = 1 << 20

Streams = list[Stream]
T = TypeVar("T")


class Running(Generic[T]):
    """A load at work in a thread; ``result`` is what it returned, once its context is left."""

    def __init__(self) -> None:
        self.stop = Event()
        self._result: list[T] = []

    @property
    def result(self) -> T:
        return self._result[0]

    def end(self, result: T) -> None:
        self._result.append(result)


@contextmanager
def running(load: Callable[[Event], Coroutine[Any, Any, T]]) -> Iterator[Running[T]]:
    """``load`` in a thread of its own, told to stop at the end of the context, which waits
    for the requests on their way.

    The caller's thread stays free for what disturbs the load.
    """
    handle = Running[T]()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: asyncio.run(load(handle.stop)))
        try:
            yield handle
        finally:
            handle.stop.set()
        handle.end(future.result())


def flat(by_client: Iterable[Streams]) -> Streams:
    return [stream for streams in by_client for stream in streams]


def conversations(mix: Mix, seed: int) -> list[Conversation]:
    shared = documents(mix, seed)
    return [Conversation(mix, shared, seed, client) for client in range(mix.clients)]


async def closed_loop(
    url: str, clients: Sequence[Conversation], goes_on: Callable[[int, int], bool]
) -> list[Streams]:
    """Every client asks again when it was answered, as long as ``goes_on(client, answered)``.

    The streams of each client, in order.
    """

    async def converse(session: aiohttp.ClientSession, number: int) -> Streams:
        streams: Streams = []
        answer: list[int] = []
        while goes_on(number, len(streams)):
            stream = await stream_once(session, url, clients[number].next(answer))
            streams.append(stream)
            answer = stream.output
        return streams

    async with connections() as session:
        return await asyncio.gather(*(converse(session, n) for n in range(len(clients))))


async def open_loop(
    url: Callable[[], str],
    schedule: Iterable[Arrival],
    stop: Event,
    poll_s: float = 0.02,
    quiet_s: float | None = None,
) -> Streams:
    """Every request goes out at its time, to the URL of that moment, until ``stop``.

    ``quiet_s``: a stream hangs that is open when, after ``stop``, nothing has come on any for
    so long. Without it each gets its ``HUNG_S`` seconds, and is lost then.
    """
    streams: Streams = []
    tasks: list[asyncio.Task[None]] = []
    began = time.perf_counter()
    async with connections() as session:
        for arrival in schedule:
            while (wait_s := began + arrival.at_s - time.perf_counter()) > 0:
                if stop.is_set():
                    break
                await asyncio.sleep(min(wait_s, poll_s))
            if stop.is_set():
                break
            stream = Stream(arrival.ask, sent_at_s=time.perf_counter() - began)
            streams.append(stream)
            tasks.append(asyncio.create_task(_follow(session, url(), stream)))
        if quiet_s is not None:
            await _until_quiet(streams, tasks, stop, quiet_s, poll_s)
        await asyncio.gather(*tasks)
        return streams


async def _until_quiet(
    streams: Streams,
    tasks: Sequence[asyncio.Task[None]],
    stop: Event,
    quiet_s: float,
    poll_s: float,
) -> None:
    """Return when all have ended, or hang up on those that hang."""
    seen, since = -1, time.perf_counter()
    while open_ones := sum(not task.done() for task in tasks):
        now, progress = time.perf_counter(), sum(s.events for s in streams) - open_ones
        if progress != seen or not stop.is_set():
            seen, since = progress, now
        elif now - since > quiet_s:
            break
        await asyncio.sleep(poll_s)
    for stream, task in zip(streams, tasks, strict=True):
        if not task.done():
            stream.hang(f"open after {quiet_s:g} s in which nothing came on any stream")
            task.cancel()


async def stream_once(session: aiohttp.ClientSession, url: str, ask: Ask) -> Stream:
    """One request to its end, or until its client leaves."""
    stream = Stream(ask)
    await _follow(session, url, stream)
    return stream


async def _follow(session: aiohttp.ClientSession, url: str, stream: Stream) -> None:
    """Never raises for what the server does: that is in the stream's faults. When cancelled,
    the stream is closed as it is."""
    sent = time.perf_counter()
    leave = stream.ask.leave
    leave_s = leave.after_s if leave is not None else None
    cause = None
    try:
        async with asyncio.timeout(HUNG_S if leave_s is None else leave_s):
            await _read(session, url, stream, sent)
    except TimeoutError:
        stream.left = leave_s is not None
        cause = f"no end within {HUNG_S:.0f} s"
    except (aiohttp.ClientError, OSError) as exc:
        cause = f"{type(exc).__name__}: {exc}"
    except asyncio.CancelledError:
        cause = "hung up on"
    stream.total_s = time.perf_counter() - sent
    stream.close(cause)


async def _read(session: aiohttp.ClientSession, url: str, stream: Stream, sent: float) -> None:
    leave_events = stream.ask.leave.after_events if stream.ask.leave is not None else None
    async with session.post(f"{url}/generate", json=_body(stream.ask)) as response:
        stream.worker = response.headers.get("x-vertumnus-worker", "")
        if response.status != 200:
            text = (await response.text()).strip()
            raise aiohttp.ClientPayloadError(f"{response.status}: {text[:300]}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            stream.event(line.removeprefix(b"data:").strip())
            if stream.first_s is None and stream.output:
                stream.first_s = time.perf_counter() - sent
            if leave_events is not None and stream.events >= leave_events:
                stream.left = True
                response.close()
                return


def _body(ask: Ask) -> dict[str, Any]:
    return {
        "input_ids": list(ask.prompt),
        "sampling_params": {
            "max_new_tokens": ask.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
        "stream": True,
    }


@contextlib.asynccontextmanager
async def connections() -> AsyncIterator[aiohttp.ClientSession]:
    # A connection each: a reused one that the server has just closed would look like a loss.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    # An event that holds the whole output so far is one long line.
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_LONGEST_EVENT_BYTES
    ) as session:
        yield session
