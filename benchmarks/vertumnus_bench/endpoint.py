"""How a request is put, and its stream read, by an endpoint: SGLang's own and OpenAI's two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from vertumnus_bench.trace_prompts import text


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counts. ``cached_tokens`` is None when it does not tell."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Endpoint(Protocol):
    """``events`` are the JSON objects of the stream."""

    @property
    def path(self) -> str: ...

    def body(self, prompt: list[int], output_tokens: int) -> bytes: ...

    def has_token(self, event: Mapping[str, Any]) -> bool:
        """Whether the event brings output, be it without visible text."""
        ...

    def usage(self, event: Mapping[str, Any]) -> Usage | None: ...


@dataclass(frozen=True, slots=True)
class SglangGenerate:
    """``/generate`` with token ids."""

    path: str = "/generate"
    ignore_eos: bool = True

    def body(self, prompt: list[int], output_tokens: int) -> bytes:
        parameters = {
            "max_new_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": self.ignore_eos,
        }
        return orjson.dumps({"input_ids": prompt, "sampling_params": parameters, "stream": True})

    def has_token(self, event: Mapping[str, Any]) -> bool:
        return bool(event["meta_info"]["completion_tokens"])

    def usage(self, event: Mapping[str, Any]) -> Usage | None:
        meta = event["meta_info"]
        return Usage(meta["prompt_tokens"], meta["completion_tokens"], meta.get("cached_tokens"))


@dataclass(frozen=True, slots=True)
class OpenAiCompletions:
    """``/v1/completions`` with token ids, or with words for those that take no ids."""

    model: str
    path: str = "/v1/completions"
    ignore_eos: bool = True
    as_text: bool = False

    def body(self, prompt: list[int], output_tokens: int) -> bytes:
        words = text(prompt) if self.as_text else prompt
        return orjson.dumps({"prompt": words, **_openai_options(self, output_tokens)})

    def has_token(self, event: Mapping[str, Any]) -> bool:
        return bool(event.get("choices"))

    def usage(self, event: Mapping[str, Any]) -> Usage | None:
        return _openai_usage(event)


@dataclass(frozen=True, slots=True)
class OpenAiChat:
    """``/v1/chat/completions`` with one message of words; the server's template adds its own."""

    model: str
    path: str = "/v1/chat/completions"
    ignore_eos: bool = True

    def body(self, prompt: list[int], output_tokens: int) -> bytes:
        message = {"role": "user", "content": text(prompt)}
        return orjson.dumps({"messages": [message], **_openai_options(self, output_tokens)})

    def has_token(self, event: Mapping[str, Any]) -> bool:
        # The first chunk tells the role and nothing else; many servers send it before a token.
        return any(
            not (delta := choice["delta"]).get("role")
            or any(value for key, value in delta.items() if key != "role")
            for choice in event.get("choices", ())
        )

    def usage(self, event: Mapping[str, Any]) -> Usage | None:
        return _openai_usage(event)


def _openai_options(endpoint: OpenAiCompletions | OpenAiChat, output_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # Not OpenAI's: SGLang and vLLM know it, others may refuse it.
    return options | {"ignore_eos": True} if endpoint.ignore_eos else options


def _openai_usage(event: Mapping[str, Any]) -> Usage | None:
    usage = event.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens"))
