"""``/workers``: which servers there are, and to have one join or leave. As sglang-router has it."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar
from uuid import NAMESPACE_URL, uuid5

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.composition import decode_contents, worker_content
from vertumnus_router.io.decodes import DecodeLink
from vertumnus_router.io.fleet import AlreadyThere, Link, Role
from vertumnus_router.io.operators import order_of, require_operator
from vertumnus_router.io.pool import PoolLink
from vertumnus_router.io.router import Router

_ROLES = {"regular": Role.WORKER, "prefill": Role.PREFILL, "decode": Role.DECODE}


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /workers``. ``priority``, ``cost`` and ``labels`` are kept and shown; what
    places requests are predicted times. Of sglang-router's other fields none has a meaning here."""

    url: str
    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    api_key: str | None = None
    priority: int = 50
    cost: float = 1.0
    labels: dict[str, str] = {}


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``PUT /workers/{id}``; None leaves things as they are."""

    priority: int | None = None
    cost: float | None = None
    labels: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Notes:
    """What an operator wrote of a server."""

    priority: int = 50
    cost: float = 1.0
    labels: tuple[tuple[str, str], ...] = ()


Body = TypeVar("Body", Join, Update)


class Servers:
    """Answers for the servers of a router, and keeps the notes on them by URL."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._notes: dict[str, Notes] = {}

    def content(self) -> dict[str, Any]:
        """``GET /workers``: every worker, then every decode server, then what is not one yet."""
        router = self._router
        links = {_pool_id(link): link for link in router.pools if link.description is not None}
        workers = [
            worker_content(worker) | self._shared(links[str(worker.pool)])
            for worker in router.core.workers(router.clock.now())
        ]
        decodes = [
            content | self._shared(link)
            for content, link in zip(decode_contents(router), router.decodes, strict=True)
        ]
        for content in (*workers, *decodes):
            content["is_healthy"] = content["state"] == "serving"
        found = [*workers, *decodes]
        return {
            "workers": found,
            "total": len(found),
            "stats": {
                f"{kind}_count": sum(one["worker_type"] == kind for one in found)
                for kind in ("prefill", "decode", "regular")
            },
            "queued": router.core.queued_count,
            "pending": router.core.pending_count,
            "pools": [
                {
                    "url": pool.url,
                    "pool": _pool_id(pool),
                    "server_id": server_id(pool.url),
                    "trouble": pool.trouble,
                    "stale_s": pool.stale_s,
                }
                for pool in router.pools
            ],
        }

    def one(self, name: str) -> dict[str, Any]:
        """``GET /workers/{id}``: a worker, or a server with its workers. ``ApiError`` 404."""
        found = self.content()["workers"]
        for worker in found:
            if worker["id"] == name and worker["worker_type"] != "decode":
                return dict(worker)
        link = self._find(name)
        mine = [worker for worker in found if worker["url"] == link.url]
        kinds = {worker["worker_type"] for worker in mine}
        role = self._router.role(link.url)
        here = link.visit is not None
        return {
            **self._shared(link),
            "id": server_id(link.url),
            "worker_type": kinds.pop() if len(kinds) == 1 else _type_of(role),
            "is_healthy": any(worker["is_healthy"] for worker in mine),
            "load": sum(worker["load"] for worker in mine),
            "state": ("leaving" if self._router.is_leaving(link.url) else "here")
            if here
            else "missing",
            "reason": _trouble(link),
            "workers": mine,
        }

    def join(self, body: bytes) -> dict[str, Any]:
        """``POST /workers``. ``ApiError`` 400, 409, 422."""
        asked = _decode(body, Join, '{"url": "http://10.0.0.1:30000"}')
        if asked.api_key is not None:
            raise ApiError(
                400,
                "unsupported",
                "a server has no key of its own here: clients' keys are passed on to it, and "
                "commands go under --control-key",
                param="api_key",
            )
        try:
            self._router.join(
                asked.url, _ROLES[asked.worker_type], bootstrap_port=asked.bootstrap_port
            )
        except ConfigError as exc:
            raise ApiError(400, "bad_url", str(exc), param="url") from exc
        except AlreadyThere as exc:
            raise ApiError(409, "already_there", str(exc), param="worker_type") from exc
        url = asked.url.rstrip("/")
        self._notes[url] = Notes(asked.priority, asked.cost, tuple(asked.labels.items()))
        return {
            **_accepted(url, "the server is looked for; GET its location"),
            "url": url,
            "location": f"/workers/{server_id(url)}",
        }

    def update(self, name: str, body: bytes) -> dict[str, Any]:
        """``PUT /workers/{id}``. ``ApiError`` 404, 422."""
        url = self._find(name).url
        asked = _decode(body, Update, '{"priority": 50}')
        notes = self._notes.get(url, Notes())
        if asked.priority is not None:
            notes = replace(notes, priority=asked.priority)
        if asked.cost is not None:
            notes = replace(notes, cost=asked.cost)
        if asked.labels is not None:
            notes = replace(notes, labels=tuple(asked.labels.items()))
        self._notes[url] = notes
        return _accepted(url, "noted; requests are placed by predicted times")

    def leave(self, name: str) -> dict[str, Any]:
        """``DELETE /workers/{id}``. ``ApiError`` 404; 409 for one worker of several."""
        url = self._find(name).url
        self._router.leave(url)
        self._notes.pop(url, None)
        return _accepted(url, "it gets no new requests, and goes when those that it has have ended")

    def _find(self, name: str) -> Link:
        links: list[Link] = [*self._router.pools, *self._router.decodes]
        for link in links:
            if name.rstrip("/") in (server_id(link.url), link.url, _pool_id(link)):
                return link
        pool = name.rpartition("/")[0]
        mine = [w for w in self._router.core.workers(self._router.clock.now()) if w.pool == pool]
        if name in [worker.id for worker in mine]:
            if len(mine) > 1:
                raise ApiError(
                    409,
                    "not_alone",
                    f"{name} is one of {len(mine)} workers of its server: name that, {pool}",
                )
            return self._find(pool)
        raise ApiError(404, "worker_not_found", f"Worker {name} not found")

    def _shared(self, link: Link) -> dict[str, Any]:
        """What the workers of a server have in common."""
        notes = self._notes.get(link.url, Notes())
        return {
            "url": link.url,
            "server_id": server_id(link.url),
            "model_id": _model(link) or "unknown",
            "priority": notes.priority,
            "cost": notes.cost,
            "connection_mode": "HTTP",
            "metadata": {"served_model_name": _model(link) or "unknown", **dict(notes.labels)},
            "disable_health_check": False,
        }


def add_servers(app: FastAPI, router: Router) -> None:
    """The routes."""
    servers = Servers(router)
    key = router.config.control_key

    @app.get("/workers")
    async def workers() -> Response:
        return _json(servers.content())

    @app.post("/workers")
    async def join(request: Request) -> Response:
        return _json(servers.join(await order_of(request, key)), 202)

    @app.get("/workers/{name:path}")
    async def worker(name: str) -> Response:
        return _json(servers.one(name))

    @app.put("/workers/{name:path}")
    async def update(name: str, request: Request) -> Response:
        return _json(servers.update(name, await order_of(request, key)), 202)

    @app.delete("/workers/{name:path}")
    async def leave(name: str, request: Request) -> Response:
        require_operator(request, key)
        return _json(servers.leave(name), 202)


def server_id(url: str) -> str:
    """A UUID that is the same in every router and after every restart."""
    return str(uuid5(NAMESPACE_URL, url))


def _accepted(url: str, message: str) -> dict[str, Any]:
    return {"status": "accepted", "worker_id": server_id(url), "message": message}


def _pool_id(link: Link) -> str | None:
    known = isinstance(link, PoolLink) and link.description is not None
    return link.description.pool_id if known else None  # type: ignore[attr-defined]


def _model(link: Link) -> str | None:
    match link:
        case PoolLink(description=description) if description is not None:
            return description.model.served_name
        case DecodeLink(server=server) if server is not None:
            return server.served_model_name or server.model_path
    return None


def _trouble(link: Link) -> str | None:
    return link.trouble if isinstance(link, PoolLink | DecodeLink) else None


def _type_of(role: Role | None) -> str:
    return next((kind for kind, one in _ROLES.items() if one is role), "regular")


def _decode(body: bytes, kind: type[Body], example: str) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise ApiError(422, "bad_body", f"the body must be like {example}: {exc}") from exc
    except msgspec.MsgspecError as exc:
        raise ApiError(400, "invalid_json", f"the body must be like {example}: {exc}") from exc


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
