"""Render a model's chat template exactly as Hugging Face's ``apply_chat_template`` does.

Same sandbox, same filters and globals, same variables (``transformers.utils.
chat_template_utils``), without importing transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL_TOKEN_NAMES = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_MESSAGE_NAMES = ("message", "msg", "m")


class TemplateError(Exception):
    """The template cannot be compiled, or refuses these messages."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _Sandbox(ImmutableSandboxedEnvironment):
    """The same sandbox, quicker about what templates do for every message: half of the time of a
    long conversation went into whether ``loop`` and texts are mutable collections."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is LoopContext or type(obj) is str:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the special tokens it may name.

    ``content_format`` is what SGLang detects (``detect_jinja_template_content_format``):
    "openai" when the template walks over content parts itself, else "string".
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            # A chain of mappings as it comes, of which every rendering makes one of these.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as exc:
            raise TemplateError(f"the chat template does not compile: {exc}") from exc
        self.source = source
        self.content_format = _content_format(source, tree)
        self._special_tokens = dict(special_tokens)
        #: special tokens it uses whose text is not known here
        self.unknown_tokens = frozenset(
            jinja2.meta.find_undeclared_variables(tree) & _SPECIAL_TOKEN_NAMES
        ) - frozenset(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
    ) -> str:
        """The prompt with the generation prompt at its end; ``TemplateError`` when the
        template refuses."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **{**self._special_tokens, **extra},
            )
        except Exception as exc:  # a template is code: it can raise anything
            raise TemplateError(f"{type(exc).__name__}: {exc}") from exc


def _content_format(source: str, tree: nodes.Template) -> str:
    if any(word in source for word in _MEDIA_WORDS):
        return "openai"
    for loop in tree.find_all(nodes.For):
        if any(_reads_content(loop.iter, name) for name in _MESSAGE_NAMES):
            return "openai"
    return "string"


def _reads_content(node: nodes.Node, name: str) -> bool:
    """``name.content`` or ``name['content']``, filtered, tested or sliced."""
    match node:
        case nodes.Filter(node=inner) if inner is not None:
            return _reads_content(inner, name)
        case nodes.Test(node=inner):
            return _reads_content(inner, name)
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _reads_content(inner, name)
        case nodes.Getitem(node=nodes.Name(name=found), arg=nodes.Const(value="content")):
            return bool(found == name)
        case nodes.Getattr(node=nodes.Name(name=found), attr="content"):
            return bool(found == name)
        case _:
            return False
