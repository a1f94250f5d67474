"""Serve the live page. It loads nothing from elsewhere, and can run no script but its own."""

from pathlib import Path

import orjson
from fastapi import FastAPI
from fastapi.responses import Response

from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.router import Router
from vertumnus_router.io.ui.state import state

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_ui(app: FastAPI, router: Router) -> None:
    """``GET /ui``, its files below it, and ``GET /ui/state``."""
    files = {path.name: path.read_bytes() for path in _folder().iterdir() if path.suffix in _TYPES}

    async def page() -> Response:
        return _file("index.html")

    async def now() -> Response:
        body = orjson.dumps(state(router))
        return Response(body, headers=_HEADERS, media_type="application/json")

    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "not_found", f"the live page has no file {name!r}: open /ui")
        return _file(name)

    def _file(name: str) -> Response:
        return Response(files[name], headers=_HEADERS, media_type=_TYPES[Path(name).suffix])

    for path, answer in (("/ui", page), ("/ui/state", now), ("/ui/{name}", file)):
        app.add_api_route(path, answer, methods=["GET"], include_in_schema=False)


def _folder() -> Path:
    return Path(__file__).parent / "static"
