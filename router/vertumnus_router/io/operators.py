"""Who may command the ranks through the router: whoever is on its host, or has its key."""

import hmac
import ipaddress

from fastapi import Request

from vertumnus_router.io.api_errors import ApiError


def require_operator(request: Request, control_key: str | None) -> None:
    """``ApiError`` 403 unless the client is on loopback or presents ``control_key``."""
    if _is_local(request) or (control_key is not None and _presents(request, control_key)):
        return
    what = f"{request.method} {request.url.path}"
    remedy = (
        "start the router with --control-key and present that key as 'Authorization: Bearer KEY'"
        if control_key is None
        else "present the router's control key as 'Authorization: Bearer KEY'"
    )
    raise ApiError(
        403,
        "operators_only",
        f"{what} is for operators: call it on the host of the router, or {remedy}",
    )


def _is_local(request: Request) -> bool:
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # a socket for both families sees ::ffff:…
    return (mapped or address).is_loopback


def _presents(request: Request, control_key: str) -> bool:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = key.strip().encode("latin-1")  # as the bytes came
    return scheme.lower() == "bearer" and hmac.compare_digest(given, control_key.encode())
