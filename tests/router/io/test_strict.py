"""What reaches the fronts of what is not quite HTTP: raw bytes against the running server."""

import asyncio
import json
import re

import pytest
from vertumnus_router.io.strict import MOST_HEAD_BYTES, MOST_HEADERS, StrictProtocol

from tests.router.io.fake_pool import FakePool, stream_slowly
from tests.router.io.harness import Running, run, running, until

BODY = b'{"messages":[{"role":"user","content":"x"}]}'
PATH = b"/v1/chat/completions"
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
#: Behind each request: what an attacker would have taken for the next one.
NEXT = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def ask(
    *headers: bytes,
    body: bytes = BODY,
    line: bytes = b"POST " + PATH + b" HTTP/1.1",
    host: bool = True,
    eol: bytes = b"\r\n",
) -> bytes:
    lines = [line, *([b"Host: router"] if host else []), *headers]
    return eol.join(lines) + eol + eol + body


def chunks(data: bytes) -> bytes:
    return ask(CHUNKED, body=data)


def line(text: bytes) -> bytes:
    return ask(LENGTH, line=text)


SIZE = b"%x" % len(BODY)
REFUSED = {
    "two lengths, equal": ask(LENGTH, LENGTH),
    "two lengths, different": ask(LENGTH, b"Content-Length: 5"),
    "a list of lengths": ask(b"Content-Length: 44, 44"),
    "length and chunks": ask(LENGTH, CHUNKED, body=CHUNKS),
    "chunks and length": ask(CHUNKED, b"Content-Length: 0", body=CHUNKS),
    "length with a sign": ask(b"Content-Length: +%d" % len(BODY)),
    "length below 0": ask(b"Content-Length: -1"),
    "length in hex": ask(b"Content-Length: 0x2c"),
    "length of nothing": ask(b"Content-Length: "),
    "length of two words": ask(b"Content-Length: 4 4"),
    "length beyond 64 bits": ask(b"Content-Length: 99999999999999999999999"),
    "unknown coding": ask(b"Transfer-Encoding: xchunked", body=CHUNKS),
    "identity coding": ask(b"Transfer-Encoding: identity", LENGTH),
    "coding below chunks": ask(b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
    "coding above chunks": ask(b"Transfer-Encoding: chunked, gzip", body=CHUNKS),
    "chunked twice": ask(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked twice in one": ask(b"Transfer-Encoding: chunked, chunked", body=CHUNKS),
    "chunked, then identity": ask(CHUNKED, b"Transfer-Encoding: identity", body=CHUNKS),
    "space before the colon": ask(b"Transfer-Encoding : chunked", body=CHUNKS),
    "chunks in HTTP/1.0": ask(CHUNKED, body=CHUNKS, line=b"POST " + PATH + b" HTTP/1.0"),
    "chunk size not hex": chunks(b"zz\r\n" + BODY),
    "chunk size with 0x": chunks(b"0x" + CHUNKS),
    "chunk size below 0": chunks(b"-1\r\n" + BODY),
    "chunk size beyond 64 bits": chunks(b"ffffffffffffffffff\r\n" + BODY),
    "chunk lines end in LF": chunks(SIZE + b"\n" + BODY + b"\n0\n\n"),
    "LF in a chunk extension": chunks(SIZE + b";a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "more than the chunk": chunks(SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n"),
    "folded header": ask(b"X-A: a\r\n b", LENGTH),
    "folded coding": ask(b"Transfer-Encoding:\r\n chunked", body=CHUNKS),
    "lines end in LF": ask(LENGTH, eol=b"\n"),
    "CR in a value": ask(b"X-A: a\rX-Override-Rid: z", LENGTH),
    "NUL in a value": ask(b"X-A: a\0b", LENGTH),
    "space in a name": ask(b"X A: a", LENGTH),
    "empty name": ask(b": a", LENGTH),
    "no colon": ask(b"X-A", LENGTH),
    "space before a name": ask(b" X-A: a", LENGTH),
    "target on another host": line(b"POST http://evil" + PATH + b" HTTP/1.1"),
    "target of another scheme": line(b"POST ftp://router" + PATH + b" HTTP/1.1"),
    "tunnel": ask(line=b"CONNECT evil:443 HTTP/1.1", body=b""),
    "fragment in the target": line(b"POST " + PATH + b"#x HTTP/1.1"),
    "space in the target": line(b"POST " + PATH + b" x HTTP/1.1"),
    "bytes beyond ASCII in the target": line(b"POST /v1/\xc3\xa9 HTTP/1.1"),
    "NUL in the path": line(b"POST " + PATH + b"%00 HTTP/1.1"),
    "way up": line(b"POST /v1/../flush_cache HTTP/1.1"),
    "way up, encoded": line(b"POST /v1/%2e%2e/flush_cache HTTP/1.1"),
    "no host": ask(LENGTH, host=False),
    "two hosts": ask(b"Host: other", LENGTH),
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/1.2": line(b"POST " + PATH + b" HTTP/1.2"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case version": line(b"POST " + PATH + b" http/1.1"),
    "tab in the first line": line(b"POST " + PATH + b"\tHTTP/1.1"),
    "unknown method": line(b"BREW " + PATH + b" HTTP/1.1"),
    "lower-case method": line(b"post " + PATH + b" HTTP/1.1"),
    "upgrade with a body": ask(b"Connection: Upgrade", b"Upgrade: h2c", LENGTH),
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 5,
    "large value": ask(b"X-A: " + b"a" * MOST_HEAD_BYTES, LENGTH),
    "many headers": ask(*[b"X-%d: a" % at for at in range(MOST_HEADERS)], LENGTH),
    "long target": line(b"POST " + PATH + b"?" + b"a" * MOST_HEAD_BYTES + b" HTTP/1.1"),
    "large trailers": chunks(CHUNKS[:-2] + b"X-A: " + b"a" * 16 * MOST_HEAD_BYTES),
}
ALLOWED = {
    "a length": ask(LENGTH),
    "chunks": chunks(CHUNKS),
    "chunks with a tab": ask(b"Transfer-Encoding:\tchunked", body=CHUNKS),
    "chunk extension": chunks(SIZE + b";a=b\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "this host as the target": line(b"POST http://router" + PATH + b" HTTP/1.1"),
    "empty lines first": b"\r\n\r\n" + ask(LENGTH),
    "expecting 100": ask(b"Expect: 100-continue", LENGTH),
    "the most headers": ask(*[b"X-%d: a" % at for at in range(MOST_HEADERS - 2)], LENGTH),
}


async def talk(it: Running, data: bytes) -> bytes:
    """Everything that is answered until the router closes the connection, or answers NEXT."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rpartition(":")[2]))
    answer = b""
    try:
        writer.write(data)
        while piece := await reader.read(65536):
            answer += piece
            if b"vertumnus_ready" in answer:
                return answer
    except ConnectionError:
        pass  # closed with bytes unread, after the answer
    finally:
        writer.close()
    return answer + b"<EOF>"


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def test_what_can_be_read_in_two_ways_is_refused_and_ends_the_connection() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            answers = await asyncio.gather(*(talk(it, raw + NEXT) for raw in REFUSED.values()))
            for name, answer in zip(REFUSED, answers, strict=True):
                assert statuses(answer) in ([400], [431]), (name, answer)
                assert answer.endswith(b"<EOF>"), name
                assert b"connection: close" in answer.lower(), name
                body = answer.partition(b"\r\n\r\n")[2].removesuffix(b"<EOF>")
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert pool.seen == []
            assert pool.commands == []

    run(scenario())


def test_what_is_valid_is_served_and_the_connection_goes_on() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            for name, raw in ALLOWED.items():
                found = [status for status in statuses(await talk(it, raw + NEXT)) if status != 100]
                assert found == [200, 200], name
            assert [seen.body for seen in pool.seen] == [BODY] * len(ALLOWED)

    run(scenario())


def test_nothing_of_trailers_or_of_hop_by_hop_headers_reaches_a_front() -> None:
    trailers = b"Authorization: Bearer late\r\nX-Late: 1\r\nX-Override-Rid: mine\r\n\r\n"
    named = (b"Connection: keep-alive, X-Secret, close", b"X-Secret: 1", b"X-Kept: 1")

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            answer = await talk(it, ask(CHUNKED, *named, body=CHUNKS[:-2] + trailers))
            assert statuses(answer) == [200]
            (seen,) = pool.seen
            assert seen.headers["x-kept"] == "1"
            assert {"authorization", "x-late", "x-secret"} & set(seen.headers) == set()
            assert seen.rid != "mine"

    run(scenario())


def test_an_upgrade_is_ignored_and_ends_the_connection() -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            upgrade = (b"Connection: Upgrade", b"Upgrade: websocket")
            answer = await talk(it, ask(*upgrade, line=b"GET /health HTTP/1.1", body=b"") + NEXT)
            assert statuses(answer) == [200] and answer.endswith(b"<EOF>")

    run(scenario())


@pytest.mark.parametrize(
    ("behind", "served"),
    [(b"GARBAGE\r\n\r\n", 1), (chunks(b"zz\r\n"), 1), (ask(LENGTH) + chunks(b"zz\r\n"), 2)],
    ids=["no request", "a request without an end", "a request and one without an end"],
)
def test_garbage_behind_requests_does_not_spoil_their_answers(behind: bytes, served: int) -> None:
    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = stream_slowly(tokens=5, gap_s=0.05)
            data = BODY[:-1] + b',"stream":true}'
            length = b"Content-Length: %d" % len(data)
            answer = await talk(it, ask(length, body=data) + behind + NEXT)
            assert statuses(answer) == [200] * served
            assert answer.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == served
            assert answer.endswith(b"<EOF>")
            await until(it.settled, "settled")

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [b"", b"POST /generate HTT", ask(LENGTH, body=BODY[:5]), chunks(b"5\r\nab")],
    ids=["nothing", "half a head", "half a body", "half a chunk"],
)
def test_a_request_that_does_not_arrive_ends_its_connection(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StrictProtocol, "patience_s", 0.1)

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            assert await talk(it, data) == b"<EOF>"
            assert pool.seen == []

    run(scenario())


@pytest.mark.parametrize("behind", [b"POST /generate HTT", b"GARBAGE\r\n\r\n"])
def test_what_does_not_arrive_behind_a_request_does_not_cut_its_answer(
    behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StrictProtocol, "patience_s", 0.1)

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = stream_slowly(tokens=8, gap_s=0.05)
            data = BODY[:-1] + b',"stream":true}'
            answer = await talk(it, ask(b"Content-Length: %d" % len(data), body=data) + behind)
            assert answer.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == 1
            assert answer.endswith(b"<EOF>")
            await until(it.settled, "settled")

    run(scenario())


def test_a_connection_between_requests_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictProtocol, "patience_s", 0.05)

    async def scenario() -> None:
        async with FakePool(1) as pool, running(pool.url) as it:
            await it.ready()
            pool.answer = stream_slowly(tokens=4, gap_s=0.1)
            async with await it.chat(stream=True) as response:
                await response.read()
            await asyncio.sleep(0.3)
            kept = [conn for conns in it.client.connector._conns.values() for conn in conns]
            assert kept and all(conn[0].is_connected() for conn in kept)
            await until(lambda: it.settled(), "settled")

    run(scenario())
