"""What the router itself reads of an inference request. All else in it is for SGLang, whose own
document describes it, and travels on as it came.
"""

from typing import Annotated, Any

import msgspec

_NotEmpty = msgspec.Meta(min_length=1)
_POSITIVE = msgspec.Meta(ge=1)


class _Inference(msgspec.Struct, kw_only=True):
    stream: bool = False
    #: higher goes first in the router's queue
    priority: int = 0


class Chat(_Inference):
    """``POST /v1/chat/completions``, as OpenAI has it."""

    messages: Annotated[list[dict[str, Any]], _NotEmpty]
    model: str | None = None
    max_tokens: Annotated[int, _POSITIVE] | None = None
    max_completion_tokens: Annotated[int, _POSITIVE] | None = None


class Completion(_Inference):
    """``POST /v1/completions``, as OpenAI has it: one prompt or several, text or token ids."""

    prompt: Annotated[str, _NotEmpty] | Annotated[list[Any], _NotEmpty]
    model: str | None = None
    max_tokens: Annotated[int, _POSITIVE] | None = None


class Generate(_Inference):
    """``POST /generate``, SGLang's own: one of ``text``, ``input_ids`` and ``input_embeds``."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
