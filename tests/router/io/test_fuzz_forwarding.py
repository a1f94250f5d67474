"""What a front reads is what the router has read: raw connections, generated, to the other end.

``FUZZ_EXAMPLES`` raises the number of examples for a long run.
"""

import asyncio
import json
import re
from dataclasses import dataclass

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_router.io.direct import DirectProtocol

from tests.router.io.fake_pool import FakePool, Seen, stream
from tests.router.io.fuzzing import examples, fuzzing
from tests.router.io.harness import Running, running, until

EXAMPLES = examples(60)
SETTINGS = fuzzing(60)
#: What the router adds, or says in its own words.
OURS = frozenset(
    (
        *("host", "content-length", "x-override-rid", "x-override-routed-dp-rank"),
        *("x-data-parallel-rank", "x-request-id", "user-agent", "accept", "connection"),
    )
)
END = b"GET /liveness HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n"

names = st.text("abcXYZ-_.!#$%&'*+^`|~09", min_size=1, max_size=8).map(lambda name: f"x-q{name}")
#: Bytes that are text to nobody, tabs and colons among them; never a line's end or a zero.
values = st.binary(max_size=12).map(lambda data: re.sub(rb"[\x00-\x08\x0a-\x1f\x7f]", b":", data))
#: Encoded line ends, such as would begin a header if somebody decoded them on the way.
queries = st.lists(
    st.sampled_from(("a=1", "%0d%0aX-Injected:%201", "%00", "&", "=", "%25", "%ff", "+")),
    max_size=5,
).map("".join)
#: Within a body, what would be the next request to who counts its bytes otherwise.
texts = st.lists(
    st.sampled_from(
        (
            "hello",
            "\r\n\r\nGET /flush_cache HTTP/1.1\r\nHost: router\r\n\r\n",
            "0\r\n\r\n",
            "\u0000",
            "\u00e9",
            '"',
        )
    ),
    min_size=1,
    max_size=4,
).map("".join)


@dataclass(frozen=True)
class Sent:
    """``pieces`` None: a body with a length; otherwise the sizes of its chunks."""

    headers: tuple[tuple[str, bytes], ...]
    query: str
    body: bytes
    pieces: tuple[int, ...] | None

    @property
    def target(self) -> str:
        return "/v1/completions" + (f"?{self.query}" if self.query else "")

    @property
    def raw(self) -> bytes:
        lines = [f"POST {self.target} HTTP/1.1".encode(), b"Host: router"]
        lines += [name.encode() + b": " + value for name, value in self.headers]
        if self.pieces is None:
            lines.append(b"Content-Length: %d" % len(self.body))
            return b"\r\n".join(lines) + b"\r\n\r\n" + self.body
        lines.append(b"Transfer-Encoding: chunked")
        chunks, rest = [], self.body
        for size in (*self.pieces, len(self.body)):
            if piece := rest[:size]:
                chunks.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            rest = rest[size:]
        return b"\r\n".join(lines) + b"\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"


requests = st.builds(
    Sent,
    st.lists(st.tuples(names, values), max_size=4, unique_by=lambda header: header[0].lower()).map(
        tuple
    ),
    queries,
    texts.map(lambda text: json.dumps({"prompt": text}, ensure_ascii=False).encode()),
    st.none() | st.lists(st.integers(1, 20), max_size=4).map(tuple),
)


def test_what_a_front_reads_is_what_the_router_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []  # as the router got them
    receive = DirectProtocol.data_received

    def data_received(protocol: DirectProtocol, data: bytes) -> None:
        pieces.append(data)
        receive(protocol, data)

    monkeypatch.setattr(DirectProtocol, "data_received", data_received)

    async def talk(it: Running, data: bytes, cuts: list[int]) -> bytes:
        port = int(it.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        at = 0
        for cut in (*sorted(cut for cut in cuts if cut < len(data)), len(data)):
            writer.write(data[at:cut])
            await writer.drain()
            await asyncio.sleep(0.001)  # or the loop would send all of them as one
            at = cut
        answer = await reader.read()
        writer.close()
        return answer

    targets: list[str] = []
    cut_up = 0

    async def answer(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
        targets.append(request.raw_path)
        return await stream(pool, request, seen)

    def check(pool: FakePool, sent: list[Sent], answer: bytes) -> None:
        found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]
        assert found == [200] * (len(sent) + 1), answer
        assert targets == [one.target for one in sent]
        for one, seen in zip(sent, pool.seen, strict=True):
            assert seen.body == one.body
            assert int(seen.headers["content-length"]) == len(one.body)
            assert set(seen.headers) - OURS <= {name.lower() for name, _ in one.headers}
            for name, value in one.headers:
                got = seen.headers[name.lower()].encode("utf-8", "surrogateescape")
                assert got.strip() == value.strip(b" \t")
        assert pool.commands == []

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = answer
            loop = asyncio.get_running_loop()

            @SETTINGS
            @given(st.lists(requests, min_size=1, max_size=3), st.lists(st.integers(1, 1200)))
            def fuzz(sent: list[Sent], cuts: list[int]) -> None:
                nonlocal cut_up
                pool.seen.clear()
                targets.clear()
                pieces.clear()
                data = b"".join(one.raw for one in sent) + END
                work = asyncio.run_coroutine_threadsafe(talk(it, data, cuts[:6]), loop)
                check(pool, sent, work.result(20))
                assert b"".join(pieces) == data
                cut_up += len(pieces) > 1

            await asyncio.to_thread(fuzz)
            await until(it.settled, "settled")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())  # as long as it takes
    assert cut_up > EXAMPLES // 4
