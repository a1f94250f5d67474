"""Who may command the ranks through the router: whoever the gate takes for an operator."""

from fastapi import Request

from vertumnus_router.io.access import ANONYMOUS, ASKER, Asker
from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.asgi import read_body

#: No order is longer.
_MOST_BYTES = 1024 * 1024


def require_operator(request: Request, control_key: str | None) -> None:
    """``ApiError`` 403 unless the request is an operator's (``access.Gate``)."""
    asker: Asker = request.scope.get(ASKER, ANONYMOUS)
    if not asker.operator:
        remedy = "present the control key" if control_key else "start the router with --control-key"
        what = f"{request.method} {request.url.path}"
        raise ApiError(403, "operators_only", f"{what} is for operators: {remedy}")


async def order_of(request: Request, control_key: str | None) -> bytes:
    """The body of an operator's request. ``ApiError`` 403 as ``require_operator``, 413 for what no
    order can be; ``ClientGone``."""
    require_operator(request, control_key)
    return await read_body(request.scope, request.receive, _MOST_BYTES)
