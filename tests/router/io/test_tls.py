"""TLS to clients, and TLS with certificates of both sides to the servers behind the router."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.tls import TlsConfig, server_context, upstream_context
from vertumnus_router.io.upstream import Body, Broken, End, Front, Message

from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import run, running

trustme = pytest.importorskip("trustme", reason="needs the trustme package")


@dataclass(frozen=True)
class Files:
    """PEM files of one authority: a server on loopback, and who the router says it is."""

    ca: Path
    cert: Path
    key: Path

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)


def make(directory: Path, name: str) -> Files:
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    files = Files(*(directory / f"{name}-{part}.pem" for part in ("ca", "cert", "key")))
    authority.cert_pem.write_to_path(str(files.ca))
    leaf.cert_chain_pems[0].write_to_path(str(files.cert))
    leaf.private_key_pem.write_to_path(str(files.key))
    return files


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("tls"), "mine")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("tls"), "other")


def test_clients_speak_tls_with_the_router(mine: Files) -> None:
    async def scenario() -> None:
        tls = TlsConfig(certfile=mine.cert, keyfile=mine.key)
        async with FakePool(1) as pool, running(pool.url, tls=tls) as it:
            await it.ready()
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            url = it.url.replace("http:", "https:")
            async with aiohttp.ClientSession(url) as client:
                where = "/v1/chat/completions"
                async with client.post(where, json=body, ssl=mine.trusting) as response:
                    assert response.status == 200
                    assert (await response.read()).endswith(b"[DONE]\n\n")
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await client.get("/health")
            with pytest.raises(aiohttp.ClientError):
                await it.client.get("/health")  # in clear

    run(scenario())


def test_old_versions_of_tls_are_not_spoken(mine: Files) -> None:
    context = server_context(TlsConfig(certfile=mine.cert, keyfile=mine.key))
    assert context is not None and context.minimum_version >= ssl.TLSVersion.TLSv1_2


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def ask(url: str, tls: TlsConfig) -> Message:
    """How a call to an engine ends."""
    loop = asyncio.get_running_loop()
    front = Front(url, loop, connect_s=5.0, tls=upstream_context(tls))
    messages: asyncio.Queue[Message] = asyncio.Queue()
    call = front.send(front.post(b"/generate", [], b"{}"), messages.put_nowait)
    try:
        while True:
            match message := await messages.get():
                case Body(data=data):
                    call.consumed(len(data))
                case End() | Broken():
                    return message
    finally:
        front.close()


async def serve_mutual(files: Files) -> tuple[web.AppRunner, str]:
    """A server that wants to see a certificate of its own authority."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 300_000)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key)
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    return runner, f"https://127.0.0.1:{runner.addresses[0][1]}"


def test_engines_and_the_router_show_each_other_certificates(mine: Files, other: Files) -> None:
    async def scenario() -> None:
        runner, url = await serve_mutual(mine)
        known = TlsConfig(
            upstream_ca_file=mine.ca, upstream_certfile=mine.cert, upstream_keyfile=mine.key
        )
        stranger = TlsConfig(
            upstream_ca_file=mine.ca, upstream_certfile=other.cert, upstream_keyfile=other.key
        )
        distrusts = TlsConfig(upstream_ca_file=other.ca)
        try:
            assert isinstance(await ask(url, known), End)
            for refused in (stranger, TlsConfig(upstream_ca_file=mine.ca), distrusts, TlsConfig()):
                ended = await ask(url, refused)
                assert isinstance(ended, Broken), refused
        finally:
            await runner.cleanup()

    run(scenario())


def test_a_pool_behind_tls_joins(mine: Files) -> None:
    """Its front is behind a proxy that ends TLS, as in a service mesh."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def scenario() -> None:
        async with FakePool(1) as pool:
            port = int(pool.url.rpartition(":")[2])

            async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                back, forth = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(relay(reader, forth), relay(back, writer))

            context = server_context(TlsConfig(certfile=mine.cert, keyfile=mine.key))
            server = await asyncio.start_server(on_client, "127.0.0.1", 0, ssl=context)
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with server, running(url, tls=TlsConfig(upstream_ca_file=mine.ca)) as it:
                await it.ready()
                async with await it.chat(stream=True) as response:
                    assert response.status == 200
                    assert (await response.read()).endswith(b"[DONE]\n\n")
                assert len(pool.seen) == 1

    run(scenario())


def test_files_that_cannot_be_used_are_refused(mine: Files, other: Files, tmp_path: Path) -> None:
    (garbage := tmp_path / "garbage.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="--ssl-certfile and --ssl-keyfile go together"):
        TlsConfig(certfile=mine.cert)
    with pytest.raises(ConfigError, match="--upstream-certfile and --upstream-keyfile"):
        TlsConfig(upstream_keyfile=mine.key)
    for cert, key in ((mine.cert, other.key), (garbage, mine.key), (tmp_path / "none", mine.key)):
        with pytest.raises(ConfigError, match="are no certificate and its key"):
            server_context(TlsConfig(certfile=cert, keyfile=key))
        with pytest.raises(ConfigError, match="are no certificate and its key"):
            upstream_context(TlsConfig(upstream_certfile=cert, upstream_keyfile=key))
    for ca in (garbage, tmp_path / "none"):
        with pytest.raises(ConfigError, match="holds no CA certificates"):
            upstream_context(TlsConfig(upstream_ca_file=ca))
