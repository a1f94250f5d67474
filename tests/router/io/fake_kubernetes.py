"""The part of Kubernetes' API that lists and watches EndpointSlices, as a test wants it."""

import asyncio
import json
import ssl
from typing import Any

from aiohttp import web

Slice = dict[str, Any]


def pod(address: str, uid: str | None = None, **conditions: bool) -> dict[str, Any]:
    """An endpoint; ready unless it is said that it is not."""
    found: dict[str, Any] = {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
        "nodeName": "node-1",
        "zone": "a",
    }
    if uid is not None:
        found["targetRef"] = {"kind": "Pod", "name": uid, "namespace": "serving", "uid": uid}
    return found


def endpoints(name: str, *pods: dict[str, Any], **more: Any) -> Slice:
    """A slice as the API gives it, with its one port 30000; ``more`` replaces fields."""
    return {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": f"uid of {name}",
            "resourceVersion": "1",
            "labels": {"app": "pool", "kubernetes.io/service-name": "pool"},
            "managedFields": [{"manager": "kube-controller-manager"}],
        },
        "addressType": "IPv4",
        "endpoints": list(pods) or None,  # Kubernetes writes null for none
        "ports": [{"name": "", "port": 30000, "protocol": "TCP"}],
        **more,
    }


class FakeKubernetes:
    """``slices`` is what a list returns; ``send`` is an event for whoever watches.

    ``refuse`` answers lists with a status, ``refuse_watch`` watches. ``page_size`` splits lists.
    """

    def __init__(self, *slices: Slice, tls: ssl.SSLContext | None = None) -> None:
        self.slices = list(slices)
        self.refuse: int | None = None
        self.refuse_watch: int | None = None
        self.page_size: int | None = None
        self.queries: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.tokens: list[str | None] = []
        self.lists = 0
        #: begun so far
        self.watches = 0
        self._watchers: list[asyncio.Queue[bytes | None]] = []
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeKubernetes":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """At the same port as before, if there was one."""
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/v1/{where:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            self.disconnect()
            await self._runner.cleanup()
            self._runner = None

    def send(self, kind: str, what: dict[str, Any]) -> None:
        self.send_bytes(json.dumps({"type": kind, "object": what}).encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(data)

    def disconnect(self) -> None:
        """Break off every watch."""
        for watcher in self._watchers:
            watcher.put_nowait(None)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("authorization"))
        return await (self._watch(request) if "watch" in request.query else self._list(request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if self.refuse is not None:
            return _status(self.refuse)
        self.lists += 1
        begin = int(request.query.get("continue", 0))
        end = begin + (self.page_size or max(len(self.slices), 1))
        metadata = {"resourceVersion": "1000"}
        if end < len(self.slices):
            metadata |= {"continue": str(end)}
        listing = {"kind": "EndpointSliceList", "metadata": metadata}
        return web.json_response({**listing, "items": self.slices[begin:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.refuse_watch is not None:
            return _status(self.refuse_watch)
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.append(queue)
        self.watches += 1
        try:
            while (data := await queue.get()) is not None:
                await answer.write(data)
            assert request.transport is not None
            request.transport.abort()
            return answer
        finally:
            self._watchers.remove(queue)


def status(code: int) -> dict[str, Any]:
    """The object of an ERROR event."""
    return {"kind": "Status", "status": "Failure", "code": code, "message": "too old"}


def _status(code: int) -> web.Response:
    return web.json_response(status(code), status=code)
