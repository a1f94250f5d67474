"""Everything but inference: health, what is served, who serves, why, and metrics."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from vertumnus_router.core.effects import Decision
from vertumnus_router.core.types import WorkerState
from vertumnus_router.io.access import ASKER
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.asgi import (
    App,
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond_error,
)
from vertumnus_router.io.client_request import endpoint_of, parse
from vertumnus_router.io.composition import composition, reconfigure
from vertumnus_router.io.every_server import ask_all, engine_metrics, flushed, loads
from vertumnus_router.io.openapi.document import openapi_json
from vertumnus_router.io.operators import order_of, require_operator
from vertumnus_router.io.passthrough import Passthrough
from vertumnus_router.io.prefixes import prefixes, reclaim, replicate
from vertumnus_router.io.router import Router
from vertumnus_router.io.servers import add_servers
from vertumnus_router.io.ui.pages import add_ui

_JSON = "application/json"
_PASS_TIMEOUT_S = 120.0
#: GET, answered by the front of the first pool.
_FROM_A_FRONT = (
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
)
#: What SGLang tells everybody of how it was started (``ServerArgs.resolved_dict``) and is nobody's
#: business here: the control key of this router is among it.
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "launch_command")
#: Commands of operators, sent to the front of every pool.
_TO_EVERY_FRONT = {
    "/start_profile": ["POST"],
    "/stop_profile": ["POST"],
}


def build_app(router: Router) -> App:
    """The whole ASGI application: inference in front, administration behind it."""
    admin = _admin(router)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[ASKER] = router.gate.admit(scope)
            except ApiError as error:
                router.metrics.refused("", error.code)
                await respond_error(send, error, [])
                return
            if await router.serve(scope["path"], scope, receive, send):
                return
        await admin(scope, receive, send)

    return app


def _admin(router: Router) -> FastAPI:
    app = FastAPI(title="sgl-vertumnus router", openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_fault)

    @app.get("/health")
    @app.get("/liveness")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/readiness")
    @app.get("/ready")
    async def readiness() -> Response:
        reasons = router.not_ready()
        workers = router.core.workers(router.clock.now())
        content = {
            "status": "not ready" if reasons else "ready",
            "ready": not reasons,
            "reasons": reasons,
            "healthy_workers": sum(worker.state is WorkerState.SERVING for worker in workers),
            "total_workers": len(workers),
        }
        return _json(content, 503 if reasons else 200)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        serves = router.core.is_ready() and not router.core.lacks_decode
        return _json({"status": "ok" if serves else "no worker serves"}, 200 if serves else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        cards = router.model.cards()
        return _json({"object": "list", "data": cards}, 200 if cards else 503)

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        router.model.check(model)
        cards = router.model.cards()
        if not cards:
            raise ApiError(503, "no_pool", "no pool has joined this router yet")
        return _json(cards[0])

    @app.post("/explain")
    async def explain(request: Request) -> Response:
        body = await read_body(request.scope, request.receive, router.config.limits.body_bytes)
        endpoint = endpoint_of(_object(body))
        asked = parse(endpoint, body)
        router.model.check(asked.model)
        described = await router.hot.describe(asked, router.hot.new_id())
        decision = router.core.explain(described, router.clock.now())
        return _json(
            {
                "endpoint": endpoint.value,
                "input_tokens": described.input_tokens,
                "output_tokens": described.output_tokens,
                "exact": described.exact,
                "blocks": len(described.blocks),
                **_decision(decision),
                "ttft": router.metrics.recent_splits.content(),
                **(_pairing(decision) if router.model.prefill_only else {}),
            }
        )

    @app.get("/vertumnus/composition")
    async def composition_now() -> Response:
        return _json(await composition(router))

    @app.post("/vertumnus/reconfigure")
    async def reconfigure_pool(request: Request) -> Response:
        return _json(await reconfigure(router, request))

    @app.get("/vertumnus/prefixes")
    async def prefixes_now(request: Request) -> Response:
        return _json(prefixes(router, request))

    @app.post("/vertumnus/replicate")
    async def replicate_prefix(request: Request) -> Response:
        return _json(await replicate(router, request))

    @app.post("/vertumnus/reclaim")
    async def reclaim_prefix(request: Request) -> Response:
        return _json(await reclaim(router, request))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/get_loads")
    async def get_loads() -> Response:
        return _json(await loads(router))

    @app.get("/engine_metrics")
    async def metrics_of_engines() -> Response:
        return Response(await engine_metrics(router), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> Response:
        require_operator(request, router.config.control_key)
        _require_a_pool(router)
        names = ("authorization", "content-type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        answers = await ask_all(
            router, "POST", "/flush_cache", query=request.url.query, headers=headers
        )
        status, content = flushed(answers)
        return _json(content, status)

    @app.get("/openapi.json")
    async def document() -> Response:
        return Response(openapi_json(), media_type=_JSON)

    add_servers(app, router)
    app.router.default = Passthrough(router)
    add_ui(app, router)
    for path in _FROM_A_FRONT:
        app.add_api_route(path, _from_a_front(router, path), methods=["GET"])
    for path, methods in _TO_EVERY_FRONT.items():
        app.add_api_route(path, _to_every_front(router, path), methods=methods)
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            route.methods.add("HEAD")  # some balancers look with it; uvicorn leaves the body out
    return app


def _from_a_front(router: Router, path: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        url = next((pool.url for pool in router.pools if pool.description), None)
        if url is None:
            raise ApiError(503, "no_pool", "no pool has joined this router yet")
        own = router.credentials.header(_authorization(request))
        status, body, content_type = await _ask(router, "GET", url + path, request, own)
        return Response(_without_secrets(body), status, media_type=content_type)

    return answer


def _without_secrets(body: bytes) -> bytes:
    try:
        return orjson.dumps(_hidden(orjson.loads(body)))
    except orjson.JSONDecodeError:
        return b"" if any(name.encode() in body for name in _SECRETS) else body


def _hidden(told: Any) -> Any:
    """``internal_states`` has every argument once more for each rank."""
    if isinstance(told, list):
        return [_hidden(one) for one in told]
    if isinstance(told, dict):
        return {
            name: "(hidden)" if value and name in _SECRETS else _hidden(value)
            for name, value in told.items()
        }
    return told


def _require_a_pool(router: Router) -> None:
    if not any(pool.description for pool in router.pools):
        raise ApiError(503, "no_pool", "no pool has joined this router yet")


def _to_every_front(router: Router, path: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        body = await order_of(request, router.config.control_key)
        urls = [pool.url for pool in router.pools if pool.description]
        if not urls:
            raise ApiError(503, "no_pool", "no pool has joined this router yet")
        own = _authorization(request)
        if not router.credentials.passes_on:
            own = router.key_header().get("authorization", "").encode() or None
        answers = await asyncio.gather(
            *(_ask(router, "POST", url + path, request, own, body) for url in urls)
        )
        worst = max(status for status, _, _ in answers)
        lines = [
            f"{url}: {text.decode('utf-8', 'replace').strip()}"
            for url, (_, text, _) in zip(urls, answers, strict=True)
        ]
        return Response("\n".join(lines) + "\n", worst, media_type="text/plain")

    return answer


async def _ask(
    router: Router,
    method: str,
    url: str,
    request: Request,
    authorization: bytes | None,
    body: bytes = b"",
) -> tuple[int, bytes, str]:
    """Pass a client's request on."""
    headers = {}
    if (content_type := request.headers.get("content-type")) is not None:
        headers["content-type"] = content_type
    if authorization is not None:
        headers["authorization"] = authorization.decode("latin-1")
    try:
        async with router.session.request(
            method,
            url,
            params=request.url.query,
            headers=headers,
            data=body or None,
            timeout=aiohttp.ClientTimeout(total=_PASS_TIMEOUT_S),
        ) as answer:
            return answer.status, await answer.read(), answer.headers.get("content-type", _JSON)
    except (TimeoutError, aiohttp.ClientError, OSError) as exc:
        raise ApiError(502, "front_unreachable", f"{url}: {exc or type(exc).__name__}") from exc


def _authorization(request: Request) -> bytes | None:
    return header(request.scope, b"authorization")


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type=_JSON)


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    return content


def _decision(decision: Decision) -> dict[str, Any]:
    """Every candidate with its terms, best first: total = queue + β·service + λ·extra. A pull is
    part of the service."""
    return {
        "policy": decision.policy,
        "choice": decision.chosen.worker if decision.candidates else None,
        "candidates": [
            {
                "worker": terms.worker,
                "degree": terms.degree,
                "cached_tokens": terms.cached_tokens,
                "reconcile_tokens": terms.reconcile_tokens,
                "pull_tokens": terms.pull_tokens,
                "pull_s": terms.pull_s,
                "queue_s": terms.queue_s,
                "service_s": terms.service_s,
                "extrapolated": terms.extrapolated,
                "extra_gpu_s": terms.extra_gpu_s,
                "beta": terms.beta,
                "lambda": terms.lam,
                "lambda_term_s": terms.lam * terms.extra_gpu_s,
                "total_s": terms.total,
            }
            for terms in decision.candidates
        ],
        "excluded": [{"worker": worker, "reason": reason} for worker, reason in decision.excluded],
    }


def _pairing(decision: Decision) -> dict[str, Any]:
    """The decode server that would be taken, and all of them."""
    return {
        "decode": decision.decode,
        "decodes": [
            {
                "decode": terms.decode,
                "load": terms.rooms,
                "limit": terms.limit,
                "doubted": terms.doubted,
            }
            for terms in decision.decodes
        ],
    }


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body(), error.status, headers=headers, media_type=_JSON)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    headers = []
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        headers, detail = [(b"allow", allowed.encode())], f"{detail}; it takes {allowed}"
    code = str(error.detail).lower().replace(" ", "_")
    return await _on_api_error(request, ApiError(error.status_code, code, detail, headers=headers))


def _methods(request: Request) -> set[str]:
    """All that the path takes; the framework tells of the first route only."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    return {name for one in routes if one.path_regex.match(path) for name in one.methods or ()}


async def _on_fault(request: Request, _: Exception) -> Response:
    # The exception goes on from here, into the log.
    message = "the router failed; see its log"
    return await _on_api_error(request, ApiError(500, "internal_error", message))


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)
