"""Who may ask for what: one table, and the gate that every request passes first.

| path | needs |
| --- | --- |
| health, readiness, ``/metrics`` | nothing: probes and scrapers carry no keys |
| inference, ``/explain``, and whatever only tells something | an API key, if there are any |
| all else: commands, and paths that are not known here | an operator |

An operator presents the control key. Without one of those, and as long as there are no API keys
either, whoever is on the same host counts as one, if the router listens on loopback only: what
listens for others may have a proxy in front, behind which everybody seems to be here.
"""

import base64
import binascii
import ipaddress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from urllib.parse import urlsplit

from vertumnus_router.io.api_errors import ApiError
from vertumnus_router.io.asgi import Headers, Scope, header
from vertumnus_router.io.keys import ApiKey, Keyring

#: Where the gate leaves the ``Asker`` in the scope of a request.
ASKER = "vertumnus.asker"

_OPERATOR = "operator"
_READS = frozenset(("GET", "HEAD", "OPTIONS"))


class Level(Enum):
    OPEN = "open"
    DATA = "data"
    OPERATOR = "operator"


_OPEN = frozenset(
    (
        "/health",
        "/health_generate",
        "/liveness",
        "/readiness",
        "/ready",
        "/metrics",
        "/engine_metrics",
    )
)
#: Any method.
_INFERENCE = frozenset(
    (
        "/generate",
        "/explain",
        "/encode",
        "/classify",
        "/rerank",
        "/tokenize",
        "/detokenize",
    )
)
#: To look at only.
_TELLS = frozenset(
    (
        "/openapi.json",
        "/workers",
        "/get_loads",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/vertumnus/composition",
        "/vertumnus/prefixes",
    )
)


#: Can be read in one way only.
_KNOWN = _OPEN | _INFERENCE | _TELLS | {"/v1/chat/completions", "/v1/completions", "/v1/models"}


def level(method: str, path: str) -> Level:
    """What a request needs; what is not known needs an operator."""
    if path in _OPEN and method in _READS:
        return Level.OPEN
    if path in _INFERENCE or path.startswith("/v1/"):
        return Level.DATA
    if method in _READS and (
        path in _TELLS or path == "/ui" or path.startswith(("/workers/", "/ui/"))
    ):
        return Level.DATA
    return Level.OPERATOR


@dataclass(frozen=True, slots=True)
class Asker:
    """Who a request is from. ``name`` is the name of an API key, ``operator`` for the control key
    or ``anonymous``: few, so a label of metrics. ``limited``: what limits there are hold for it.
    ``max_priority``: no request of it counts as more; None for any."""

    name: str
    operator: bool
    limited: bool = True
    max_priority: int | None = None


#: Who asks where no gate is in front.
ANONYMOUS = Asker("anonymous", operator=False)
_LOCAL = Asker("anonymous", operator=True)


class Gate:
    """Recognises who asks, and refuses what is not for them."""

    def __init__(self, keys: tuple[ApiKey, ...], control_key: str | None, host: str) -> None:
        """``host`` is the address that the router listens on."""
        every = [(one.name, one.key) for one in keys]
        if control_key is not None:
            every.append((_OPERATOR, control_key))
        self._keys = Keyring(every)
        self._has_operator, self._has_clients = control_key is not None, bool(keys)
        self._known = {one.name: Asker(one.name, operator=False, max_priority=0) for one in keys}
        self._known[_OPERATOR] = Asker(_OPERATOR, operator=True, limited=False)
        self._trusts_local = not keys and listens_on_loopback(host)

    def admit(self, scope: Scope) -> Asker:
        """Who asks. ``ApiError`` 400 for a path that could be read in two ways, 401 without a key
        where one is needed, 403 for what is for operators."""
        method, path = scope["method"], scope["path"]
        if path not in _KNOWN:
            _check_path(path)
        needed = level(method, path)
        # Some commands are reads by their method, which any page can have a browser ask for.
        by_browser = method in _READS and needed is not Level.OPERATOR
        asker = self._recognise(scope, by_browser)
        if needed is Level.OPERATOR and not (asker is not None and asker.operator):
            raise self._operators_only(f"{method} {path}")
        if needed is Level.DATA and asker is None:
            raise _unauthorized(method)
        return asker or ANONYMOUS

    def _recognise(self, scope: Scope, by_browser: bool) -> Asker | None:
        presented = _presented(header(scope, b"authorization"), by_browser)
        if presented is not None:
            name = self._keys.owner(presented)
            if name is not None:
                return self._known[name]
        if self._has_clients:
            return None
        return _LOCAL if self._trusts_local and _is_local(scope) else ANONYMOUS

    def _operators_only(self, what: str) -> ApiError:
        present = "present {} control key as 'Authorization: Bearer KEY'"
        if self._has_operator:
            remedy = present.format("the router's")
        else:
            remedy = f"start the router with --control-key and {present.format('that')}"
        here = ""
        if self._trusts_local:
            here = "call it on the host of the router, or "
        elif not self._has_clients:
            here = "let the router listen on loopback only and call it there, or "
        return ApiError(403, "operators_only", f"{what} is for operators: {here}{remedy}")


def listens_on_loopback(host: str) -> bool:
    """Whether nobody on another host can reach a router that listens on ``host``."""
    return host == "localhost" or _is_loopback(host)


def _check_path(path: str) -> None:
    # A server behind this one may take a/../b for b, which would get it past the table.
    if any(part in (".", "..") for part in path.split("/")) or not path.isprintable():
        raise ApiError(
            400,
            "invalid_path",
            "the path has a '.' or '..' segment, or a character that cannot be printed",
            headers=[(b"connection", b"close")],
        )
    # Of a server's URL: what is below /workers/ is answered here and goes to nobody.
    named = path.startswith(("/workers/http://", "/workers/https://"))
    if "\\" in path or path.count("//") > named:
        raise ApiError(400, "invalid_path", "the path has '//' or a backslash in it")


def _presented(authorization: bytes | None, by_browser: bool) -> bytes | None:
    """The key of a request. Browsers can only send one as the password of Basic; because they do
    so without being asked, for pages of others too, that counts for looking at things only."""
    if authorization is None:
        return None
    scheme, _, given = authorization.partition(b" ")
    given = given.strip()
    match scheme.lower():
        case b"bearer":
            return given
        case b"basic" if by_browser:
            try:
                return base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
    return None


def _unauthorized(method: str) -> ApiError:
    schemes: Headers = [(b"www-authenticate", b'Bearer realm="sgl-vertumnus"')]
    if method in _READS:
        schemes = [(b"www-authenticate", b'Basic realm="sgl-vertumnus"')]
    return ApiError(
        401,
        "invalid_api_key",
        "present an API key of this router as 'Authorization: Bearer KEY'",
        # The body is not read.
        headers=[*schemes, *([] if method in _READS else [(b"connection", b"close")])],
    )


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    if not client or not _is_loopback(client[0]):
        return False
    # A page from elsewhere in a browser on this host: it says so itself, or it has come under a
    # name that its owner made lead here (DNS rebinding).
    if header(scope, b"sec-fetch-site") not in (None, b"none", b"same-origin"):
        return False
    host = header(scope, b"host")
    return host is None or _names_loopback(host)


def _names_loopback(host: bytes) -> bool:
    """Whether a ``host`` header, with its port, names nobody but the host itself."""
    try:
        name = urlsplit(b"//" + host).hostname
    except ValueError:
        return False
    if name is None or b"@" in host:
        return False
    text = name.decode("latin-1")
    return text.endswith(".localhost") or listens_on_loopback(text)


@lru_cache(256)
def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # a socket for both families sees ::ffff:…
    return bool((mapped or address).is_loopback)
