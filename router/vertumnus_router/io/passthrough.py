"""Every path that the router does not know goes to a worker as it came.

It is placed, reserved, tried again and cancelled like any other request, as a prompt of as many
tokens as its body may have.
"""

from fastapi import Request

from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.asgi import Receive, Scope, Send
from vertumnus_router.io.operators import require_operator
from vertumnus_router.io.router import Router

#: Below ``/v1/`` SGLang answers clients; elsewhere there are commands, such as those that change
#: its weights.
_FOR_CLIENTS = ("/v1/",)
_FOR_CLIENTS_TOO = frozenset(("/rerank", "/classify", "/encode", "/tokenize", "/detokenize"))
#: Paths that sglang-router has and SGLang has not.
ALIASES = {"/rerank": "/v1/rerank"}
#: Doing these twice does no harm.
REPEATABLE = frozenset(
    (
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/classify",
        "/v1/score",
        "/v1/tokenize",
        "/v1/detokenize",
        "/classify",
        "/encode",
        "/tokenize",
        "/detokenize",
    )
)
#: They decode, which a server that prefills only does not do.
DECODES = ("/v1/responses", "/v1/messages", "/invocations", "/vertex_generate")
#: The protocol between routers and pools is nobody else's.
_CLOSED = ("/vertumnus/",)
_DOTS = frozenset((".", ".."))


class Passthrough:
    """The ASGI application behind all others. ``ApiError`` when the request may not pass."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ApiError(404, "not_found", "the router speaks HTTP only")
        asked: str = scope["path"]
        path = ALIASES.get(asked, asked)
        # A proxy between router and server may resolve dots: what is below /v1/ must stay there.
        if path.startswith(_CLOSED) or not _DOTS.isdisjoint(path.split("/")):
            raise ApiError(404, "not_found", f"{scope['method']} {path}: Not Found")
        if not path.startswith(_FOR_CLIENTS) and path not in _FOR_CLIENTS_TOO:
            require_operator(Request(scope), self._router.config.control_key)
        if self._router.model.prefill_only and path.startswith(DECODES):
            raise ApiError(
                501,
                "unsupported_with_decode_servers",
                f"{path} does not work with separate decode servers: ask /v1/chat/completions",
            )
        await self._router.hot.pass_on(
            path,
            repeatable=scope["method"] in ("GET", "HEAD") or path in REPEATABLE,
            scope=scope,
            receive=receive,
            send=send,
        )
