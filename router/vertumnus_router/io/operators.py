"""Who may command the ranks through the router: whoever the gate takes for an operator."""

from fastapi import Request

from vertumnus_router.io.access import ANONYMOUS, ASKER, Asker
from vertumnus_router.io.api_errors import ApiError


def require_operator(request: Request, control_key: str | None) -> None:
    """``ApiError`` 403 unless the request is an operator's (``access.Gate``)."""
    asker: Asker = request.scope.get(ASKER, ANONYMOUS)
    if not asker.operator:
        remedy = "present the control key" if control_key else "start the router with --control-key"
        what = f"{request.method} {request.url.path}"
        raise ApiError(403, "operators_only", f"{what} is for operators: {remedy}")
