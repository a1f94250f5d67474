"""Headless Chromium over its DevTools protocol: open a page, ask it, look at it."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


@contextlib.contextmanager
def browser() -> Iterator[int]:
    """A browser's DevTools port, until the end of the block."""
    assert PATH is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        command = [PATH, *_FLAGS, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _port(Path(home) / "DevToolsActivePort", process)
        finally:
            process.terminate()
            process.wait(10)


def _port(told: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return int(told.read_text().splitlines()[0])
        time.sleep(0.02)
    raise AssertionError(f"chromium did not start (exit status {process.poll()})")


class Page:
    """One tab. ``complaints`` are errors of scripts, broken loads and refused violations."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call DevTools; fails if it refuses."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            told = json.loads((await self._socket.receive()).data)
            if told.get("id") == number:
                assert "error" not in told, told
                return dict(told["result"])
            self._heard(told)

    def _heard(self, told: dict[str, Any]) -> None:
        match told.get("method"):
            case "Log.entryAdded":
                entry = told["params"]["entry"]
                if entry["level"] == "error":
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["params"]["exceptionDetails"])[:500])

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        told = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def text(self, selector: str = "body") -> str:
        """What a person reads there, in one line; empty if there is no such element."""
        found = await self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return " ".join(str(found).split())

    async def until(self, expression: str, limit_s: float = 15.0) -> None:
        """Wait until ``expression`` is true; fails with what the page says instead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while not await self.js(f"Boolean({expression})"):
            if loop.time() > deadline:
                raise AssertionError(f"not true: {expression}; the page: {await self.text()}")
            await asyncio.sleep(0.05)

    async def screenshot(self, path: Path) -> None:
        """The whole page."""
        height = await self.js("document.documentElement.scrollHeight")
        await self.size(await self.js("innerWidth"), height)
        shot = await self.ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def size(self, width: int, height: int) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def scheme(self, name: str) -> None:
        """``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": name}
        await self.ask("Emulation.setEmulatedMedia", features=[feature])


@contextlib.asynccontextmanager
async def page(port: int, url: str, width: int = 1440) -> AsyncIterator[Page]:
    """A new tab at ``url``, closed at the end."""
    tools = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as client:
        async with client.put(f"{tools}/json/new?about:blank") as answer:
            tab = await answer.json(content_type=None)
        socket = client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        async with socket as connection:
            it = Page(connection)
            for domain in ("Page", "Runtime", "Log"):
                await it.ask(f"{domain}.enable")
            await it.ask("Emulation.setFocusEmulationEnabled", enabled=True)
            await it.size(width, 900)
            await it.ask("Page.navigate", url=url)
            try:
                yield it
            finally:
                async with client.get(f"{tools}/json/close/{tab['id']}"):
                    pass
