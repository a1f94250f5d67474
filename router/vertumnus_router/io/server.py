"""Run the router as a process: listen, announce, stop gracefully on a signal."""

import asyncio
import contextlib
import gc
import json
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST

from vertumnus_router.clock import WallClock
from vertumnus_router.io.admin import build_app
from vertumnus_router.io.asgi import Receive, Scope, Send, respond
from vertumnus_router.io.config import RouterConfig
from vertumnus_router.io.direct import DirectProtocol
from vertumnus_router.io.router import Router
from vertumnus_router.io.tls import server_context

log = logging.getLogger(__name__)

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn without its signal handling and its ten wake-ups a second."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stop.wait()
        self.should_exit = True


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let the streams end for ``limits.stop_s``.

    Raises ``OSError`` if the address cannot be bound, ``ProfileError`` for a bad profile,
    ``ConfigError`` for certificates that cannot be used.
    """
    server_context(config.tls)  # before anything listens
    router = Router(config, WallClock())
    listener = listen(config.host, config.port)
    metrics = None if config.prometheus is None else listen(*config.prometheus)
    _raise_file_limit()
    if config.warning is not None:
        log.warning(config.warning)
    print(f"router configuration:\n{_indent(config.describe())}", flush=True)
    # What has been imported stays: no search for garbage need look at it again.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signalled(router, listener, metrics))


async def _serve_until_signalled(
    router: Router, listener: socket.socket, metrics: socket.socket | None
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()  # a second signal: do not wait for streams
        log.info("stopping: no new requests, streams may end")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await serve(router, listener, stop, hurry, metrics)


async def serve(
    router: Router,
    listener: socket.socket,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    metrics: socket.socket | None = None,
) -> None:
    """Serve on ``listener`` until ``stop``, then until the streams have ended, their time is
    up, or ``hurry``; metrics on ``metrics`` all the while. The router is closed on return."""
    config = router.config
    tls = server_context(config.tls)
    server = _Server(
        uvicorn.Config(
            build_app(router),
            http=DirectProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            # Whose X-Forwarded-For counts: the environment's FORWARDED_ALLOW_IPS could let any
            # client say that it is on this host.
            forwarded_allow_ips=["127.0.0.1", "::1"],
            ws="none",
            timeout_keep_alive=30,
            # None would wait for ever; uvicorn takes whole seconds.
            timeout_graceful_shutdown=max(1, round(config.limits.stop_s)),
            ssl_context_factory=None if tls is None else lambda _, __: tls,
        ),
        stop,
    )

    async def watch() -> None:
        await stop.wait()
        router.hot.stopping = True
        await hurry.wait()
        server.force_exit = True

    _drop_clients_that_do_not_read(listener, config.limits.client_idle_s)
    await router.start()
    over = asyncio.Event()
    scraped = None
    if metrics is not None:
        scraped = asyncio.create_task(serve_metrics(router, metrics, over))
    watching = asyncio.create_task(watch())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        _announce(config, listener)
        await serving
    finally:
        watching.cancel()
        over.set()
        try:
            if scraped is not None:
                await scraped
        finally:
            await router.close()


async def serve_metrics(router: Router, listener: socket.socket, over: asyncio.Event) -> None:
    """Serve the metrics, and nothing else, until ``over``."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found = scope["path"] in ("/", "/metrics")
        body = router.metrics.exposition() if found else b"the metrics are at /metrics\n"
        kind = CONTENT_TYPE_LATEST if found else "text/plain"
        await respond(send, 200 if found else 404, body, [], kind.encode())

    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=1,  # None would wait for ever for a scraper that does not read
    )
    log.info("metrics on port %d", listener.getsockname()[1])
    await _Server(config, over).serve(sockets=[listener])


def _drop_clients_that_do_not_read(listener: socket.socket, after_s: float) -> None:
    """Where the system can (Linux), connections inherit this from the listener: one whose peer
    has taken nothing of what was sent for so long is closed by the kernel."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and after_s * 1000 < 2**31:
        listener.setsockopt(socket.IPPROTO_TCP, option, round(after_s * 1000))


def _announce(config: RouterConfig, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'https' if config.tls.listens else 'http'}://{host}:{port}"
    print(f"router listening on {url}", flush=True)
    if config.ready_file is not None:
        config.ready_file.write_text(json.dumps({"url": url, "port": port}) + "\n")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ``OSError`` says which address could not be had."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Connections made from now on wait for the server instead of being refused.
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    listener.setblocking(False)
    return listener


def _raise_file_limit() -> None:
    """A stream takes two descriptors, and many systems start at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < 4096:
        log.warning("only %d open files allowed: about %d streams at once", hard, hard // 2)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
