"""Every operation that the router serves by name: one table, from which the document is made."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vertumnus_router.io.composition import Reconfigure
from vertumnus_router.io.openapi import answers
from vertumnus_router.io.openapi.bodies import Chat, Completion, Generate
from vertumnus_router.io.passthrough import ALIASES, DECODES, REPEATABLE
from vertumnus_router.io.prefixes import Order
from vertumnus_router.io.servers import Join, Update

JSON = "application/json"
_TEXT = "text/plain"
_EVENTS = "text/event-stream"

#: What the router's own error codes mean, by the status that they come with.
CODES: dict[int, dict[str, str]] = {
    400: {
        "bad_composition": "no composition of that pool",
        "bad_limit": "no number from 1 to 1000",
        "bad_tip": "no block hash",
        "bad_url": "not an http:// or https:// URL",
        "context_length_exceeded": "more tokens than the model takes",
        "invalid_deadline": "no number of milliseconds",
        "invalid_json": "not JSON, or not what belongs here; the message has an example",
        "invalid_request": "a server refused it, see the message",
        "kv_capacity_exceeded": "more tokens than a rank has room for",
        "missing_messages": "no messages",
        "missing_prompt": "no prompt",
        "plain_server": "plain SGLang, which keeps its composition for life",
        "priority_too_high": "a priority that the key may not ask for",
        "routing_field": "a field that says where a request runs",
        "unsupported": "a field that has no meaning here",
        "unsupported_with_decode_servers": "not with prefill and decode apart",
        "which_pool": "there are several pools, and none is named",
    },
    404: {
        "model_not_found": "another model is served here",
        "not_found": "there is no such thing",
        "pool_not_found": "there is no such pool",
        "worker_not_found": "there is no such worker or server",
    },
    409: {
        "already_there": "the URL is followed in another role",
        "not_alone": "one of several workers of a server: name the server",
        "not_reclaimed": "not deleted, or not all",
        "not_reconfigured": "not reached; `moves` and `composition` say how far it came",
        "not_replicated": "not copied, or not all",
    },
    413: {"body_too_large": "more bytes than the router takes; the connection is closed"},
    422: {"bad_body": "JSON, but with other fields; the message has an example"},
    429: {
        "deadline_unmeetable": "no worker is predicted to begin in time",
        "overloaded": "every worker said that it is full",
        "queue_full": "too many requests wait",
        "rate_limited": "over the key's requests or tokens a minute",
        "too_many_waiting": "too many requests of the key wait",
    },
    500: {"internal_error": "a fault of the router; it is in its log"},
    501: {"unsupported_with_decode_servers": "not with prefill and decode apart"},
    502: {
        "front_unreachable": "the server did not answer",
        "worker_error": "a worker failed",
        "decode_error": "a decode server failed",
    },
    503: {
        "no_decode": "no decode server was there in time",
        "no_pool": "no pool has joined yet",
        "no_worker": "no worker could take it in time",
        "overloaded": "the last worker tried was full",
        "stopping": "the router is stopping",
        "worker_disconnected": "a worker closed the connection",
        "worker_lost": "a worker was lost while it had the request",
        "worker_unreachable": "a worker could not be reached",
        "decode_disconnected": "a decode server closed the connection",
        "decode_lost": "a decode server was lost while it had the request",
        "decode_unreachable": "a decode server could not be reached",
    },
    504: {
        "worker_stalled": "nothing came from a worker for too long",
        "decode_stalled": "nothing came from a decode server for too long",
    },
}
_OF_WORKERS = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` is a number, a family such as ``4XX``, or ``default``. ``shape`` None: not the
    router's to describe. ``codes``: those of the router's errors that it may have. ``marked``: with
    the headers that tell who answered."""

    status: str
    meaning: str
    shape: Any = None
    media: tuple[str, ...] = (JSON,)
    codes: tuple[str, ...] = ()
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    meaning: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """``body``: the shapes that it may have, none for an operation that takes none. ``forwarded``:
    it goes to a worker."""

    method: str
    path: str
    tag: str
    summary: str
    answers: tuple[Answer, ...]
    body: tuple[Any, ...] = ()
    example: Any = None
    query: tuple[Query, ...] = ()
    forwarded: bool = False

    @property
    def id(self) -> str:
        words = self.path.replace("{", "").replace("}", "").strip("/").replace("/", "_")
        return f"{self.method.lower()}_{words}"


def _ok(shape: Any, meaning: str = "Done.", *media: str, status: int = 200) -> Answer:
    return Answer(str(status), meaning, shape, media or (JSON,))


def _errors(**codes: Iterable[str] | str) -> tuple[Answer, ...]:
    """``e404="model_not_found"``: the codes of a status, with what they mean."""
    return tuple(
        _error(int(status[1:]), (names,) if isinstance(names, str) else tuple(names))
        for status, names in codes.items()
    )


def _error(status: int, names: tuple[str, ...]) -> Answer:
    meaning = "\n".join(f"- `{name}`: {CODES[status][name]}" for name in names)
    ordered = status == 409 and names[0].startswith("not_re")
    shape = answers.NotDone if ordered else answers.Error
    return Answer(str(status), meaning, shape, codes=names)


def _all_of(*statuses: int) -> tuple[Answer, ...]:
    return tuple(_error(status, tuple(CODES[status])) for status in statuses)


_OVERLOAD = _all_of(413, 429, 500)
_ENGINE = Answer("4XX", "What the server had against the request.", answers.EngineError)
_OTHERS = Answer("default", "The server's own answer.", None, ())


def _inference(path: str, body: Any, example: Any, summary: str, method: str = "POST") -> Operation:
    prompt = "missing_messages" if body is Chat else "missing_prompt"
    refused = ("invalid_json", prompt, "routing_field", "invalid_deadline")
    limits = ("context_length_exceeded", "kv_capacity_exceeded", "unsupported_with_decode_servers")
    return Operation(
        method,
        path,
        "inference",
        summary,
        (
            Answer("200", "SGLang's answer, byte for byte.", None, (JSON, _EVENTS), marked=True),
            *_errors(e400=(*refused, *limits, "invalid_request"), e404="model_not_found"),
            *_OVERLOAD,
            *_all_of(*_OF_WORKERS),
            _ENGINE,
        ),
        (body,),
        example,
        forwarded=True,
    )


def _passed_on(path: str) -> Operation:
    decodes = path in DECODES
    refused = ("invalid_deadline", "priority_too_high", "context_length_exceeded")
    return Operation(
        "POST",
        path,
        "passed on",
        "Goes to a worker as it came, and counts as load",
        (
            _OTHERS,
            *_errors(e400=(*refused, "kv_capacity_exceeded")),
            *_OVERLOAD,
            *(_all_of(501) if decodes else ()),
            *_all_of(*_OF_WORKERS),
        ),
        (Any,),
        forwarded=True,
    )


def _told(path: str, tag: str, summary: str, shape: Any, *errors: Answer) -> Operation:
    return Operation("GET", path, tag, summary, (_ok(shape), *errors))


def _page(path: str, summary: str, *media: str, **errors: str) -> Operation:
    return Operation("GET", path, "live page", summary, (_ok(None, "", *media), *_errors(**errors)))


def _ordered(path: str, summary: str, shape: Any, body: Any, example: Any, **errors: Any) -> Any:
    found = (_ok(shape), *_errors(**errors, e413="body_too_large"))
    return Operation("POST", path, "composition and prefixes", summary, found, (body,), example)


def _front(path: str) -> Operation:
    found = (
        _ok(dict[str, Any]),
        *_errors(e502="front_unreachable", e503="no_pool"),
        _OTHERS,
    )
    return Operation("GET", path, "servers", "What the first server says of itself", found)


def _profiler(path: str) -> Operation:
    found = (
        _ok(str, "What each server said, a line each.", _TEXT),
        *_errors(e413="body_too_large", e502="front_unreachable", e503="no_pool"),
        Answer("default", "The worst status of all servers, and what each said.", None, ()),
    )
    return Operation("POST", path, "servers", "Told to every pool", found, (Any,))


def _flush(method: str) -> Operation:
    found = (
        _ok(answers.Flushed),
        *_errors(e503="no_pool"),
        Answer("default", "The worst status of all servers.", answers.Flushed),
    )
    return Operation(method, "/flush_cache", "servers", "Empty the caches of every server", found)


_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
_TIP = {"tip": "-8023104560125521733", "worker": "pool/0x1"}
_LIMIT = Query("limit", "of each list", {"type": "integer", "minimum": 1, "maximum": 1000})

OPERATIONS: tuple[Operation, ...] = (
    _inference("/v1/chat/completions", Chat, _CHAT, "Answer a conversation"),
    _inference("/v1/completions", Completion, {"prompt": "Once", "max_tokens": 16}, "Complete"),
    _inference("/generate", Generate, {"text": "Once"}, "SGLang's own completion"),
    _inference("/generate", Generate, {"text": "Once"}, "The same", "PUT"),
    Operation(
        "GET",
        "/v1/models",
        "inference",
        "The model that is served",
        (_ok(answers.ModelList), Answer("503", "No pool has joined yet.", answers.ModelList)),
    ),
    _told(
        "/v1/models/{model}",
        "inference",
        "One model",
        answers.ModelCard,
        *_errors(e404="model_not_found", e503="no_pool"),
    ),
    Operation(
        "POST",
        "/explain",
        "inference",
        "Where a request would go now, and why; it is not sent",
        (
            _ok(answers.Explanation),
            *_errors(
                e400=("invalid_json", "missing_messages", "missing_prompt", "routing_field"),
                e404="model_not_found",
                e413="body_too_large",
            ),
        ),
        (Chat, Completion, Generate),
        _CHAT,
    ),
    *(_passed_on(path) for path in sorted({*REPEATABLE, *ALIASES, *DECODES})),
    _told("/health", "health", "Whether the router runs", answers.Health),
    _told("/liveness", "health", "The same", answers.Health),
    *(
        Operation(
            "GET",
            path,
            "health",
            "Whether requests should come here",
            (_ok(shape), Answer("503", "Not now.", shape)),
        )
        for path, shape in (
            ("/readiness", answers.Readiness),
            ("/ready", answers.Readiness),
            ("/health_generate", answers.Health),
        )
    ),
    Operation(
        "GET", "/metrics", "metrics", "For Prometheus", (_ok(str, "See docs/metrics.md.", _TEXT),)
    ),
    Operation(
        "GET",
        "/engine_metrics",
        "metrics",
        "Those of every server",
        (_ok(str, "Told apart by `worker_addr`.", _TEXT),),
    ),
    _told("/get_loads", "servers", "Tokens that each server has", answers.Loads),
    _told("/workers", "servers", "Who serves", answers.Workers),
    Operation(
        "POST",
        "/workers",
        "servers",
        "Have a server join",
        (
            _ok(answers.Accepted, "It is looked for; GET its location.", status=202),
            *_errors(
                e400=("invalid_json", "bad_url", "unsupported"),
                e409="already_there",
                e413="body_too_large",
                e422="bad_body",
            ),
        ),
        (Join,),
        {"url": "http://10.0.0.1:30000"},
    ),
    _told(
        "/workers/{name}",
        "servers",
        "A worker by its id, or a server by id, URL or pool",
        dict[str, Any],
        *_errors(e404="worker_not_found", e409="not_alone"),
    ),
    Operation(
        "PUT",
        "/workers/{name}",
        "servers",
        "Note something of a server",
        (
            _ok(answers.Accepted, "Noted.", status=202),
            *_errors(
                e400="invalid_json",
                e404="worker_not_found",
                e409="not_alone",
                e413="body_too_large",
                e422="bad_body",
            ),
        ),
        (Update,),
        {"priority": 50},
    ),
    Operation(
        "DELETE",
        "/workers/{name}",
        "servers",
        "Have a server leave when its requests have ended",
        (
            _ok(answers.Accepted, "It leaves.", status=202),
            *_errors(e404="worker_not_found", e409="not_alone"),
        ),
    ),
    *map(_front, ("/server_info", "/get_server_info", "/model_info", "/get_model_info")),
    *map(_profiler, ("/start_profile", "/stop_profile")),
    *map(_flush, ("GET", "POST")),
    _told(
        "/vertumnus/composition",
        "composition and prefixes",
        "Every pool's workers and moves, and what the controller thinks",
        answers.Compositions,
    ),
    _ordered(
        "/vertumnus/reconfigure",
        "Move a pool to a composition",
        answers.Reconfigured,
        Reconfigure,
        {"pool": None, "composition": "2x1,1x2", "dry_run": True},
        e400=("invalid_json", "bad_composition", "which_pool", "plain_server"),
        e404="pool_not_found",
        e409="not_reconfigured",
        e503="no_pool",
    ),
    Operation(
        "GET",
        "/vertumnus/prefixes",
        "composition and prefixes",
        "What is cached where, and what is copied",
        (_ok(answers.Prefixes), *_errors(e400="bad_limit")),
        query=(_LIMIT,),
    ),
    _ordered(
        "/vertumnus/replicate",
        "Copy a prefix to a worker",
        answers.Transferred,
        Order,
        _TIP,
        e400=("invalid_json", "bad_tip"),
        e409="not_replicated",
    ),
    _ordered(
        "/vertumnus/reclaim",
        "Delete a block and what is below it at a worker",
        answers.Transferred,
        Order,
        _TIP,
        e400=("invalid_json", "bad_tip"),
        e409="not_reclaimed",
    ),
    _page("/ui", "The live page", "text/html"),
    _page("/ui/state", "What it shows", JSON),
    _page("/ui/{name}", "Its files", "text/html", "text/css", "text/javascript", e404="not_found"),
    Operation("GET", "/openapi.json", "metrics", "This document", (_ok(dict[str, Any]),)),
)
