"""Bad input, generated: the parser of requests, and every payload that the router takes.

``FUZZ_EXAMPLES`` raises the number of examples of each test for a long run.
"""

import asyncio
import http.client
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.client_request import ClientRequest, Endpoint, parse
from vertumnus_router.io.strict import StrictProtocol

from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import running

_GIVEN = os.environ.get("FUZZ_EXAMPLES")


def examples(few: int) -> settings:
    return settings(
        max_examples=int(_GIVEN) if _GIVEN else few,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# -- HTTP ----------------------------------------------------------------------------------------

WORDS = (
    b"GET / HTTP/1.1\r\n",
    b"POST /generate HTTP/1.1\r\n",
    b"POST http://h/generate HTTP/1.1\r\n",
    b"HTTP/1.0\r\n",
    b"Host: h\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length: 0\r\n",
    b"content-length : 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"X: y\r\n",
    b" folded\r\n",
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b"3\r\nabc\r\n",
    b"0\r\n\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"3;x=y\r\nabc\r\n",
    b"abc",
    b"fffffffffffffffff\r\n",
)
VALID = (
    b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /generate HTTP/1.1\r\nHost: h\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n",
)
noise = st.lists(st.sampled_from(WORDS) | st.binary(max_size=4), max_size=12).map(b"".join)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A few valid requests in a row, with something put in place of something."""
    data = b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 8)))
        put = draw(st.sampled_from((*WORDS, b"")) | st.binary(max_size=3))
        data = data[:start] + put + data[end:]
    return data


LINES = (
    b"GET / HTTP/1.1\r\n",
    b"POST /generate HTTP/1.1\r\n",
    b"POST / HTTP/1.0\r\n",
    b"GET /\r\n",
)
HEADERS = (
    b"Host: h\r\n",
    b"Host: other\r\n",
    b"Content-Length: 3\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"X: y\r\n",
)
CONTENTS = (
    b"abc",
    b"abcde",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabc\r\n0\r\nX-Late: 1\r\n\r\n",
    b"",
)
assembled = st.lists(
    st.builds(
        lambda line, headers, content: b"".join((line, *headers, b"\r\n", content)),
        st.sampled_from(LINES),
        st.lists(st.sampled_from(HEADERS), max_size=4),
        st.sampled_from(CONTENTS),
    ),
    min_size=1,
    max_size=2,
).map(b"".join)


class FakeTransport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


Seen = list[tuple[str, str, list[tuple[bytes, bytes]], bytes]]


async def feed(pieces: list[bytes]) -> tuple[Seen, FakeTransport]:
    """What an application gets to see of a connection, and what goes back."""
    seen: Seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        seen.append((scope["method"], scope["path"], list(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, http=StrictProtocol, lifespan="off", log_config=None)
    config.load()
    loop, transport = asyncio.get_running_loop(), FakeTransport()
    protocol = StrictProtocol(config, ServerState(), {}, loop)
    protocol.connection_made(transport)  # type: ignore[arg-type]
    for piece in pieces:
        if transport.closed:
            break
        protocol.data_received(piece)
        for _ in range(4):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    closed = transport.closed
    protocol.connection_lost(None)
    await asyncio.sleep(0)
    transport.closed = closed
    return seen, transport


@pytest.mark.parametrize(
    "source", [noise, mutated(), assembled], ids=["noise", "mutated", "assembled"]
)
def test_how_bytes_arrive_does_not_change_what_they_say(source: st.SearchStrategy[bytes]) -> None:
    with asyncio.Runner() as runner:

        @examples(100)
        @given(source, st.lists(st.integers(0, 400), max_size=4))
        def fuzz(data: bytes, cuts: list[int]) -> None:
            edges = sorted({min(cut, len(data)) for cut in (0, *cuts, len(data))})
            pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
            whole, one = runner.run(feed([data] if data else []))
            parts, other = runner.run(feed(pieces))
            assert whole == parts
            assert one.closed == other.closed
            for _, _, headers, body in whole:
                names = [name for name, _ in headers]
                lengths = [value for name, value in headers if name == b"content-length"]
                codings = [value for name, value in headers if name == b"transfer-encoding"]
                assert len(lengths) + len(codings) <= 1
                assert not lengths or int(lengths[0]) == len(body)
                assert all(coding.lower() == b"chunked" for coding in codings)
                assert names.count(b"host") <= 1
                assert b"x-late" not in names
            if b" 400 " in one.written:
                assert one.closed

        fuzz()


# -- payloads ------------------------------------------------------------------------------------

FIELDS = (
    *("messages", "prompt", "text", "input_ids", "model", "stream", "priority", "n", "echo"),
    *("role", "content", "type", "image_url", "tools", "max_tokens", "max_completion_tokens"),
    *("sampling_params", "max_new_tokens", "return_logprob", "logprob_start_len", "rid"),
    *("composition", "pool", "dry_run", "tip", "worker", "depth", "bootstrap_room"),
)
VALUES = ("fake", "fake/0x1", "2x1", "1x2", "user", "hello", "fake-model", "", "\0", "é", "-1")
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(VALUES)
    | st.text(max_size=6)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)
bodies = (
    st.binary(max_size=40)
    | values.map(lambda value: json.dumps(value).encode())
    | objects.map(lambda fields: json.dumps(fields).encode())
    | objects.map(lambda fields: json.dumps(fields).encode()[:-1])
)


@examples(80)
@given(st.sampled_from(Endpoint), bodies)
def test_a_body_is_read_or_refused(endpoint: Endpoint, body: bytes) -> None:
    try:
        asked = parse(endpoint, body)
    except ApiError as error:
        assert error.status == 400 and error.message
        return
    assert isinstance(asked, ClientRequest)
    assert isinstance(asked.priority, int)
    for read in (asked.output_tokens, asked.default_output_tokens):
        assert read is None or read > 0


TARGETS = (
    ("POST", "/vertumnus/reconfigure"),
    ("POST", "/vertumnus/replicate"),
    ("POST", "/vertumnus/reclaim"),
    ("POST", "/explain"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/generate"),
    ("POST", "/flush_cache"),
    ("GET", "/vertumnus/prefixes"),
)


def test_every_payload_gets_an_answer_of_the_router_s_own() -> None:
    """Never 5xx with a router that is well, always JSON in OpenAI's shape when refused."""

    def fuzz_at(port: int) -> Callable[[], None]:
        @examples(60)
        @given(st.sampled_from(TARGETS), bodies, st.text(max_size=8))
        def fuzz(target: tuple[str, str], body: bytes, query: str) -> None:
            method, path = target
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                asked = "".join(f"%{byte:02x}" for byte in query.encode())
                client.request(method, f"{path}?limit={asked}", body)
                answer = client.getresponse()
                content = answer.read()
            finally:
                client.close()
            assert answer.status < 500, (target, body, content)
            if answer.status >= 400:
                error = json.loads(content)["error"]
                assert error["message"] and error["code"]

        return fuzz

    async def scenario() -> None:
        async with FakePool(2) as pool, running(pool.url) as it:
            await it.ready()
            port = int(it.url.rpartition(":")[2])
            await asyncio.to_thread(fuzz_at(port))
            async with it.client.get("/readiness") as response:
                assert response.status == 200
            assert it.settled()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())  # as long as it takes
