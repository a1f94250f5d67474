"""What the quickstart asks a router: is it ready, who serves, one streamed chat answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from vertumnus_router.clock import Clock
from vertumnus_router.lattice import Block, format_composition

from sgl_vertumnus.errors import PoolStartError, VertumnusError

WORKER_HEADER = "x-vertumnus-worker"
DEGREE_HEADER = "x-vertumnus-cp-degree"
_POLL_S = 0.2
_REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, who gave it, and the seconds from sending to its first text."""

    text: str
    worker: str
    cp_degree: int
    ttft_s: float


class RouterClient:
    """A connection to the router at ``url``; an asynchronous context manager."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self._clock = clock
        self._session = aiohttp.ClientSession(
            base_url=url, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        )

    async def __aenter__(self) -> "RouterClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def wait_ready(
        self, composition: str, limit_s: float, waiting: Callable[[str], None]
    ) -> None:
        """Return once ``/readiness`` says so and all of ``composition`` serves.

        Tells ``waiting`` why that is not so yet. Raises ``PoolStartError`` after ``limit_s``.
        """
        started = self._clock.now()
        while (reason := await self._not_ready(composition)) is not None:
            waited = self._clock.now() - started
            if waited > limit_s:
                raise PoolStartError(f"not ready after {waited:.0f} s: {reason}")
            waiting(reason)
            await self._clock.sleep(_POLL_S)

    async def composition(self) -> str:
        """The composition that serves now, from the router's list of workers."""
        blocks = [
            Block(min(worker["ranks"]), int(worker["degree"]))
            for worker in (await self._json("/workers"))["workers"]
            if worker["worker_type"] != "decode" and worker["state"] == "serving"
        ]
        return format_composition(blocks)

    async def model(self) -> str:
        """The name of the served model."""
        return str((await self._json("/v1/models"))["data"][0]["id"])

    async def ask(self, question: str, model: str, max_tokens: int = 64) -> Answer:
        """Stream one greedy chat answer."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
        }
        sent = self._clock.now()
        first: float | None = None
        pieces: list[str] = []
        async with self._session.post("/v1/chat/completions", json=body) as response:
            await _check(response)
            async for line in response.content:
                if (piece := _delta(line)) is None:
                    continue
                if first is None:
                    first = self._clock.now()
                pieces.append(piece)
            worker = response.headers.get(WORKER_HEADER)
            degree = response.headers.get(DEGREE_HEADER)
        if first is None:
            raise VertumnusError("the router closed the stream without an answer")
        if worker is None or degree is None:
            raise VertumnusError(f"{self.url} is no vertumnus router: it names no worker")
        return Answer("".join(pieces), worker, int(degree), first - sent)

    async def _not_ready(self, composition: str) -> str | None:
        try:
            async with self._session.get("/readiness") as response:
                if response.status != 200:
                    return _reasons(await response.read())
            # One worker is enough for a router to be ready, not for the pool to be complete.
            serving = await self.composition()
        except (aiohttp.ClientError, TimeoutError):
            return "the router does not listen yet"
        return None if serving == composition else f"serving as {serving or 'nothing'} so far"

    async def _json(self, path: str) -> Any:
        async with self._session.get(path) as response:
            await _check(response)
            return msgspec.json.decode(await response.read())


def _reasons(body: bytes) -> str:
    """What a router that is not ready says about it."""
    try:
        return ", ".join(msgspec.json.decode(body)["reasons"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "the router is not ready"


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.text()).strip()
        raise VertumnusError(f"{response.url} answered {response.status}: {text[:500]}")


def _delta(line: bytes) -> str | None:
    """The text that one line of a server-sent-event stream adds, None when it adds none."""
    data = line.strip().removeprefix(b"data:").strip()
    if data == line.strip() or data == b"[DONE]":
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise VertumnusError(f"the stream broke off: {event['error']}")
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or None
