"""The OpenAPI 3.1 document of the router, from the table of operations."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import orjson

from vertumnus_router.io.access import Level, level
from vertumnus_router.io.api_errors import error_type
from vertumnus_router.io.openapi.answers import Error
from vertumnus_router.io.openapi.bodies import Generate
from vertumnus_router.io.openapi.operations import CODES, JSON, OPERATIONS, Answer, Operation

_REFS = "#/components/{}/{}"
_SCHEMES = {
    "api_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "One of --api-key or --api-keys-file. Without any, the router asks for none."
        " To look at things (GET) it may come as the password of HTTP Basic.",
    },
    "control_key": {
        "type": "http",
        "scheme": "bearer",
        "description": "--control-key. Without one, and without API keys, who calls from the host "
        "of a router that listens on loopback only is an operator.",
    },
}
_SECURITY: dict[Level, list[dict[str, list[str]]]] = {
    Level.OPEN: [],
    Level.DATA: [{"api_key": []}, {"control_key": []}],
    Level.OPERATOR: [{"control_key": []}],
}
_WITHOUT_KEY: dict[Level, tuple[str, ...]] = {
    Level.OPEN: (),
    Level.DATA: ("401",),
    Level.OPERATOR: ("403",),
}
#: Errors that come before a request has reached its operation.
_COMMON = {
    "400": "not valid HTTP/1.1, or to be read in two ways: `invalid_http`, `invalid_path`, …",
    "401": "`invalid_api_key`: present an API key of this router",
    "403": "`operators_only`: present the control key",
    "431": "`headers_too_large`: more than 64 KiB or 100 headers",
}
_MARKS = {
    "x-request-id": ("string", "the client's own, or the router's"),
    "x-vertumnus-worker": ("string", "the worker that answered"),
    "x-vertumnus-cp-degree": ("integer", "its degree"),
    "x-vertumnus-attempts": ("integer", "which attempt this is the answer of"),
}
_FORWARDED: tuple[dict[str, Any], ...] = (
    {
        "name": "x-request-id",
        "in": "header",
        "description": "comes back with the answer; up to 128 characters",
        "schema": {"type": "string"},
    },
    {
        "name": "x-request-deadline-ms",
        "in": "header",
        "description": "what the first byte may take; heeded with --reject-late",
        "schema": {"type": "integer", "minimum": 1, "maximum": 86_400_000},
    },
)
_DESCRIPTION = (
    "What the router answers by itself, and how inference goes through it. Bodies of inference are "
    "described as far as the router reads them; all else in them is SGLang's. Paths that are not "
    "here go to a worker as they came: those below /v1/ for clients, all others for operators. "
    "Every error has OpenAI's shape."
)


@cache
def openapi_json() -> bytes:
    """The document, as it is served."""
    return orjson.dumps(document())


def document() -> dict[str, Any]:
    """The document. Its parts are new each time."""
    shapes, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, shapes)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sgl-vertumnus router",
            "version": _version(),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": _SCHEMES,
            "responses": {
                f"Refused{status}": _response(Answer(status, meaning, Error), shapes)
                for status, meaning in _COMMON.items()
            },
        },
    }


def _schemas() -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """The schema of each shape in the table, and the components that these refer to."""
    shapes = [Error, *(answer.shape for one in OPERATIONS for answer in one.answers)]
    shapes += [shape for one in OPERATIONS for shape in one.body]
    used = list(dict.fromkeys(shape for shape in shapes if shape is not None))
    schemas, components = msgspec.json.schema_components(
        used, ref_template=_REFS.format("schemas", "{name}")
    )
    # A struct cannot say that one of some fields must be there.
    components[Generate.__name__]["anyOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("text", "input_ids", "input_embeds")
    ]
    return dict(zip(used, schemas, strict=True)), components


def _operation(one: Operation, shapes: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    access = level(one.method, one.path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _names(one.path)
    ]
    parameters += [
        {"name": q.name, "in": "query", "description": q.meaning, "schema": q.schema}
        for q in one.query
    ]
    if one.forwarded:
        parameters += _FORWARDED
    responses = {answer.status: _response(answer, shapes) for answer in one.answers}
    for status in ("400", "431", *_WITHOUT_KEY[access]):
        common = {"$ref": _REFS.format("responses", f"Refused{status}")}
        responses.setdefault(status, common)
    told: dict[str, Any] = {
        "operationId": one.id,
        "tags": [one.tag],
        "summary": one.summary,
        "parameters": parameters,
        "responses": dict(sorted(responses.items())),
        "security": _SECURITY[access],
    }
    if one.body:
        schemas = [shapes[shape] for shape in one.body]
        content = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
        if one.example is not None:
            content["example"] = one.example
        told["requestBody"] = {"required": one.example is not None, "content": {JSON: content}}
    return told


def _response(answer: Answer, shapes: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {} if answer.shape is None else {"schema": shapes[answer.shape]}
    if answer.codes:
        content["example"] = _fault(int(answer.status), answer.codes[0])
    told: dict[str, Any] = {"description": answer.meaning or answer.status}
    if answer.media:
        told["content"] = dict.fromkeys(answer.media, content)
    headers = dict(_MARKS) if answer.marked else {}
    if answer.status == "429":
        headers["retry-after"] = ("integer", "seconds; without it, waiting would not help")
    if headers:
        told["headers"] = {
            name: {"description": meaning, "schema": {"type": kind}}
            for name, (kind, meaning) in headers.items()
        }
    return told


def _fault(status: int, code: str) -> dict[str, Any]:
    return {
        "error": {
            "message": CODES[status][code],
            "type": error_type(status),
            "param": None,
            "code": code,
        }
    }


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _version() -> str:
    try:
        return version("sgl-vertumnus")
    except PackageNotFoundError:  # run out of a checkout
        return "unknown"
