"""An inference endpoint without an engine: SGLang's API and OpenAI's two, a cache of whole
prompts, and the failures that a test asks for."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

REFUSE, CUT, ERROR, SHORT, SILENT, GARBAGE, HANG_UP = (
    "refuse",
    "cut",
    "error",
    "short",
    "silent",
    "garbage",
    "hang up",
)


@dataclass
class FakeEndpoint:
    """``behaviour``: of the request of that number, in order of coming; the others are served.
    ``slow_s``: before the first token."""

    behaviour: Mapping[int, str] = field(default_factory=dict)
    slow_s: float = 0.0
    tells_cached: bool = True
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _seen: list[list[Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        how = self.behaviour.get(len(self.bodies))
        self.bodies.append(body)
        if how == REFUSE:
            return web.Response(status=503, text="overloaded")
        if how == SILENT:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.slow_s)
        events = list(self._events(request.path, body, short=how == SHORT))
        if how in (CUT, HANG_UP, ERROR):
            events = events[:2]
        if how == ERROR:
            events.append({"error": {"message": "the rank died"}})
        if how == GARBAGE:
            events = [{"nothing": "known"}]
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if how == HANG_UP:
            assert request.transport is not None
            request.transport.abort()
        elif how != CUT:
            await response.write(b"data: [DONE]\n\n")
        return response

    def _events(self, path: str, body: dict[str, Any], short: bool) -> Iterator[dict[str, Any]]:
        prompt, wanted = _asked(path, body)
        cached = max((_common(prompt, seen) for seen in self._seen), default=0)
        self._seen.append(prompt)
        made = wanted - short
        if path == "/generate":
            for count in range(1, made + 1):
                meta = {"prompt_tokens": len(prompt), "completion_tokens": count}
                if self.tells_cached:
                    meta["cached_tokens"] = cached
                yield {"output_ids": list(range(count)), "meta_info": meta}
            return
        if path == "/v1/chat/completions":
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for _ in range(made):
            # An engine whose tokens are halves of characters has no text to show.
            chat = path == "/v1/chat/completions"
            yield {"choices": [{"delta": {"role": None, "content": ""}} if chat else {"text": ""}]}
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": made}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        yield {"choices": [], "usage": usage}


def _asked(path: str, body: dict[str, Any]) -> tuple[list[Any], int]:
    """Prompt, of words if it is text, and how many tokens are wanted."""
    if path == "/generate":
        return body["input_ids"], body["sampling_params"]["max_new_tokens"]
    said = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return said.split() if isinstance(said, str) else said, body["max_tokens"]


def _common(one: list[Any], other: list[Any]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """``endpoint`` on a port of this machine, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    app = web.Application(client_max_size=1 << 24)
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, endpoint.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        endpoint.url = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield endpoint
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
