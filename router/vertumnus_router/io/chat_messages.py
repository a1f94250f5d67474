"""The messages and tools that reach the chat template, as SGLang prepares them.

Follows ``entrypoints/openai/{protocol,serving_chat}.py`` and ``parser/jinja_template_utils.py``
of SGLang 0.5.23: request models keep known fields only, content parts are flattened or kept
by the template's content format, tool-call arguments become objects, a last message of the
assistant is either continued or turned into one of the user. Whatever is not understood here
raises ``NotReproducible``: then the router estimates instead of guessing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

Json = dict[str, Any]

_GENERIC_ROLES = frozenset(
    ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root")
)
_TOOL_ROLES = frozenset(("root", "system", "developer"))
#: (field, type) of a message that is not the user's, in the order SGLang dumps them
_GENERIC_FIELDS: tuple[tuple[str, type], ...] = (
    ("tool_call_id", str),
    ("name", str),
    ("phase", str),
    ("reasoning_content", str),
)
_SCHEMA_TYPES = frozenset(("string", "number", "integer", "boolean", "array", "object", "null"))


class NotReproducible(Exception):
    """SGLang's prompt cannot be computed here; ``reason`` is a bounded label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def prepare_messages(messages: Any, content_format: str) -> list[Json]:
    """The messages as the template sees them, before the last one is looked at."""
    if not isinstance(messages, list) or not messages:
        raise NotReproducible("invalid", "messages")
    return [_prepare(message, content_format) for message in messages]


def split_last_assistant(messages: list[Json], continue_final: bool) -> tuple[list[Json], str]:
    """``_handle_last_assistant_message``: the messages, and the text to continue ("" if none)."""
    last = messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        return messages, ""
    if continue_final:
        return messages[:-1], str(last["content"])
    return [*messages[:-1], {"role": "user", "content": last["content"]}], ""


def prepare_tools(tools: Any, tool_choice: Any) -> list[Json] | None:
    """The tools as the template sees them, None when it sees none."""
    if tools is None or tools == []:
        if isinstance(tool_choice, dict):
            raise NotReproducible("invalid", "tool_choice without tools")
        return None
    if not isinstance(tools, list):
        raise NotReproducible("invalid", "tools")
    prepared = [_tool(tool) for tool in tools]
    match tool_choice:
        case None | "auto" | "required":
            return prepared
        case "none":
            return None
        case {"function": {"name": str(name)}}:
            return [tool for tool in prepared if tool["function"]["name"] == name] or None
        case _:
            raise NotReproducible("invalid", "tool_choice")


def functions_only(tools: Sequence[Json]) -> list[Json]:
    """What SGLang tries when the template fails on the wrapped tools."""
    return [tool.get("function", tool) for tool in tools]


def _prepare(message: Any, content_format: str) -> Json:
    dumped = _dump(message)
    content = dumped["content"]
    if content is None:
        dumped["content"] = ""
    elif isinstance(content, list):
        parts = [_text_part(part) for part in content]
        if content_format == "openai":
            del dumped["content"]  # SGLang then puts it last, which a template can see
        flat = content_format == "string" or dumped["role"] == "tool"
        dumped["content"] = " ".join(p["text"] for p in parts) if flat else parts
    return dumped


def _dump(message: Any) -> Json:
    """``model_dump`` of a chat message without its None fields, content kept as it came."""
    if not isinstance(message, dict):
        raise NotReproducible("invalid", "a message is not an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise NotReproducible("invalid", "role")
    if role == "user":
        if not isinstance(content, str | list):
            raise NotReproducible("invalid", "content")
        return {"role": role, "content": content}
    role = role.lower()
    if role not in _GENERIC_ROLES or not isinstance(content, str | list | None):
        raise NotReproducible("invalid", "role or content")
    if message.get("tools") is not None and role in _TOOL_ROLES:
        raise NotReproducible("message_tools")
    if message.get("tools") is not None or message.get("prefix") is not None:
        raise NotReproducible("unsupported_field", "tools or prefix of a message")
    dumped: Json = {"role": role, "content": content}
    for name, kind in _GENERIC_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise NotReproducible("invalid", name)
        dumped[name] = value
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise NotReproducible("invalid", "tool_calls")
        dumped["tool_calls"] = [_tool_call(call, role) for call in calls]
    return dumped


def _text_part(part: Any) -> dict[str, str]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "thinking" | "reasoning" | "tool_reference"}:
            raise NotReproducible("unsupported_field", "content part")
        case {"type": str()}:
            raise NotReproducible("multimodal")
        case _:
            raise NotReproducible("invalid", "content part")


def _tool_call(call: Any, role: str) -> Json:
    match call:
        case {"function": dict(function)}:
            pass
        case _:
            raise NotReproducible("invalid", "tool_calls")
    if call.get("type", "function") != "function":
        raise NotReproducible("invalid", "tool call type")
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as exc:
            raise NotReproducible("invalid", "tool call arguments") from exc
        if not isinstance(arguments, dict):
            raise NotReproducible("invalid", "tool call arguments")
    elif arguments is not None and not isinstance(arguments, str | dict):
        raise NotReproducible("invalid", "tool call arguments")
    for name, kind in (("id", str), ("index", int)):
        if call.get(name) is not None and type(call[name]) is not kind:
            raise NotReproducible("invalid", f"tool call {name}")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _tool(tool: Any) -> Json:
    """``Tool.model_dump``: the function keeps the client's key order, missing fields follow."""
    match tool:
        case {"function": {"name": str()} as function}:
            pass
        case _:
            raise NotReproducible("invalid", "tools")
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise NotReproducible("unsupported_field", "defer_loading")
    strict, description = function.get("strict"), function.get("description")
    if not isinstance(strict, bool | None) or not isinstance(description, str | None):
        raise NotReproducible("invalid", "tools")
    if not _plain_schema(function.get("parameters")):
        raise NotReproducible("unsupported_field", "tool parameter types")
    known: Json = {
        "description": description,
        "name": function["name"],
        "parameters": function.get("parameters"),
    }
    if strict is not None:
        known["strict"] = strict
    ordered = {key: known[key] for key in function if key in known}
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise NotReproducible("invalid", "tools")
    return {"type": kind, "function": {**ordered, **known}, "defer_loading": None}


def _plain_schema(schema: Any) -> bool:
    """False when SGLang would rewrite a type (``normalize_json_schema_types``)."""
    if isinstance(schema, list):
        return all(_plain_schema(item) for item in schema)
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str) and kind not in _SCHEMA_TYPES:
            return False
    return all(_plain_schema(value) for value in schema.values())
