"""Which headers travel between client and front, and how a request names its rank and itself.

SGLang 0.5.23 takes ``x-override-routed-dp-rank`` and ``x-override-rid`` on ``/generate`` and
``/v1/chat/completions`` (``entrypoints/request_headers.py``), if the front has
``SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`` set; ``/v1/completions`` takes the rank from
``x-data-parallel-rank``, as chat does too. So both are sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

Headers = list[tuple[bytes, bytes]]

#: The engine's request id is this much of the router's, then the attempt in hex: ids keep one
#: width, because the engine aborts by prefix, and no attempt can be taken for another.
_ID_CHARS = 30

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_TO_FRONT = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-data-parallel-rank",
    b"x-request-id",
}
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"server", b"date", b"x-request-id"}
_OURS = (b"x-override-", b"x-vertumnus-")


def engine_rid(request_id: str, attempt: int) -> str:
    """The id of one attempt at the engine: 32 characters, like the request's own."""
    return f"{request_id[:_ID_CHARS]}{attempt & 0xFF:02x}"


def request_key(rid: str) -> str:
    """What the ids of a request and of all its attempts have in common. SGLang makes
    ``RID_0``, ``RID_1``, … of the prompts of a batch."""
    return rid[:_ID_CHARS]


def attempt_of(rid: str) -> int | None:
    """The attempt that an engine id names, None for an id that is none of ours."""
    digits = rid[_ID_CHARS : _ID_CHARS + 2]
    try:
        return int(digits, 16) if len(digits) == 2 else None
    except ValueError:
        return None


def engine_rids(rid: str, items: int | None) -> list[str]:
    """Every id that the engine knows an attempt by (``GenerateReqInput._normalize_rid``).

    The samples of one prompt (``n`` above 1) get ids of the engine's own: those end when the
    engine notices that the connection is closed.
    """
    return [rid] if items is None else [f"{rid}_{item}" for item in range(items)]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the servers behind the router get to see as ``authorization``: the client's own, if it
    is not a key of this router, or else ``key``."""

    passes_on: bool = True
    key: str | None = field(default=None, repr=False)

    def header(self, client: bytes | None) -> bytes | None:
        """The value to send in place of the client's."""
        if self.passes_on and client is not None:
            return client
        return None if self.key is None else b"Bearer " + self.key.encode()


def to_front(
    headers: Iterable[tuple[bytes, bytes]], credentials: Credentials = Credentials()
) -> Headers:
    """What of a client's headers goes on; nobody but the router says where a request runs."""
    kept, client, dropped = [], None, _NOT_TO_FRONT
    for name, value in headers:
        if name == b"authorization":
            client = value if client is None else client
        elif name not in _NOT_TO_FRONT and not name.startswith(_OURS):
            kept.append((name, value))
        elif name == b"connection":
            dropped |= _names(value)
    if dropped is not _NOT_TO_FRONT:
        kept = [(name, value) for name, value in kept if name not in dropped]
    authorization = credentials.header(client)
    if authorization is not None:
        kept.append((b"authorization", authorization))
    return kept


def _names(connection: bytes) -> frozenset[bytes]:
    """The headers that a ``connection`` header declares to be for the next hop only."""
    return frozenset(name.strip().lower() for name in connection.split(b","))


def routing(home: int, rid: str, request_id: bytes) -> Headers:
    """The headers that give an attempt its home rank and its id."""
    rank = str(home).encode()
    return [
        (b"x-override-routed-dp-rank", rank),
        (b"x-data-parallel-rank", rank),
        (b"x-override-rid", rid.encode()),
        (b"x-request-id", request_id),
    ]


def addressed(body: bytes, *, rid: str, dp_rank: int | None) -> bytes:
    """The body for a server of plain SGLang, which takes id and rank from there only. What a
    client wrote there does not count."""
    return _with_fields(body, {"rid": rid, "routed_dp_rank": dp_rank, "data_parallel_rank": None})


def lowered(body: bytes, fields: Any, most: int) -> bytes:
    """The body with no priority above ``most``: engines keep the KV of a request with a higher one
    before that of others, and may let it go first. ``fields`` is what the body says."""
    given = fields.get("priority") if isinstance(fields, dict) else None
    if given is None or (type(given) is int and given <= most):
        return body
    return _with_fields(body, {"priority": most})


def paired_bodies(
    body: bytes,
    *,
    host: str,
    port: int,
    room: int,
    dp_rank: int,
    rid: str,
    plain: bool = False,
) -> tuple[bytes, bytes]:
    """The body for the prefill leg, and for the decode leg. ``dp_rank`` is that of the prefill; a
    ``plain`` server is told in the body.

    Decode servers are plain SGLang, which takes all of this from the body only. What a client
    wrote there does not count.
    """
    fields = {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": room,
        "disagg_prefill_dp_rank": dp_rank,
        "rid": rid,
    }
    anywhere = {"routed_dp_rank": None, "data_parallel_rank": None}
    here = {"routed_dp_rank": dp_rank, "data_parallel_rank": None} if plain else {}
    return _with_fields(body, fields | here), _with_fields(body, fields | anywhere)


def _with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The body, a JSON object that is not empty, with ``fields`` behind its own: where a name
    comes twice JSON parsers take the last one."""
    return body.rstrip()[:-1] + b"," + orjson.dumps(fields)[1:]


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What of a front's headers goes on to the client."""
    return [(name, value) for name, value in headers if name not in _NOT_TO_CLIENT]
