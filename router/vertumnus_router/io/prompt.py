"""From the body of a request to the token ids that SGLang will prefill."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vertumnus_router.core.types import BlockHash
from vertumnus_router.io.chat_messages import (
    Json,
    NotReproducible,
    functions_only,
    prepare_messages,
    prepare_tools,
    split_last_assistant,
)
from vertumnus_router.io.chat_template import ChatTemplate, TemplateError
from vertumnus_router.io.client_request import ClientRequest, Endpoint
from vertumnus_router.io.hashing import BlockChain, words_of
from vertumnus_router.io.prefix_cache import PrefixCache
from vertumnus_router.io.text_cuts import TextCuts
from vertumnus_router.io.tokenizer_files import ModelTokenizer

#: Rough size of a token, for prompts that are not tokenised.
BYTES_PER_TOKEN = 4
#: Arguments of ``apply_chat_template`` that are not variables of the template.
_NOT_VARIABLES = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
#: How much of a prompt that comes as ids makes one part for the cache: 4096 tokens.
_PART_BYTES = 4 * 4096
_NAMESPACE_FIELDS = ("extra_key", "cache_salt")
_MEDIA_FIELDS = ("image_data", "video_data", "audio_data")


@dataclass(frozen=True, slots=True)
class Prompt:
    """``blocks`` may be empty for an exact prompt too: then nothing cached can be used, or
    the namespace of its blocks is not known here. ``reason`` says why blocks are missing or
    the count is an estimate; it is a bounded label."""

    input_tokens: int
    blocks: tuple[BlockHash, ...]
    exact: bool
    reason: str | None = None


def estimate(request: ClientRequest, reason: str) -> Prompt:
    """A guess from the size of the body, for prompts that cannot be tokenised (in time)."""
    ids = request.fields.get("input_ids")
    tokens = len(ids) if isinstance(ids, list) else request.body_bytes // BYTES_PER_TOKEN
    return Prompt(max(tokens, 1), (), exact=False, reason=reason)


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What else of the served model matters for a prompt."""

    served_name: str
    block_tokens: int
    context_tokens: int


def tokenise(
    request: ClientRequest,
    model: ModelTokenizer,
    rules: PromptRules,
    cache: PrefixCache | None = None,
) -> Prompt:
    """Count and hash the prompt. Slow (about 1 MB of text a second) but for what ``cache`` knows of
    its beginning: run it off the event loop. ``cache`` is of this ``model`` alone, and does not
    change what is found. Falls back to ``estimate`` for whatever cannot be reproduced exactly."""
    try:
        if request.engine_items is not None:
            raise NotReproducible("batch")
        text = _text(request, model)
        least = _least_tokens(text, model)
        if least > rules.context_tokens:
            # Too long however it is split; counting exactly would take seconds.
            return Prompt(least, (), exact=True, reason="over_long")
        reason = _not_ours(request, rules.served_name)
        named = request.fields if reason is None else {}
        start = BlockChain.start(
            rules.block_tokens,
            extra_key=named.get("extra_key") or None,
            cache_salt=named.get("cache_salt") or None,
        )
        cache = cache or PrefixCache(0)
        if isinstance(text, _Text):
            tokens, blocks = _text_blocks(text, start, model, cache)
        else:
            tokens, blocks = _id_blocks(text, start, cache)
        return Prompt(tokens, blocks if reason is None else (), exact=True, reason=reason)
    except NotReproducible as exc:
        return estimate(request, exc.reason)
    except (OverflowError, TypeError):
        return estimate(request, "invalid")


def _least_tokens(text: "_Text | list[int]", model: ModelTokenizer) -> int:
    limit = model.most_chars_per_token
    if limit is None or not isinstance(text, _Text):
        return 0
    return -(-len(text.content) // limit)


def _id_blocks(
    ids: list[int], start: BlockChain, cache: PrefixCache
) -> tuple[int, tuple[BlockHash, ...]]:
    words = words_of(ids)
    parts = [words[at : at + _PART_BYTES] for at in range(0, len(words), _PART_BYTES)]
    chain, blocks = cache.extend("ids", start, parts, lambda known: parts[known:])
    return chain.tokens, blocks


def _text_blocks(
    text: "_Text", start: BlockChain, model: ModelTokenizer, cache: PrefixCache
) -> tuple[int, tuple[BlockHash, ...]]:
    """Number of tokens and blocks of a text, and of what is encoded behind it on its own."""
    continued = words_of(_continuation(text.continued, model) if text.continued else ())
    if model.cuts is None:
        ids = model.encode(text.content, special=text.special)
        chain, blocks = start.extend(words_of(ids) + continued)
        return chain.tokens, blocks
    before, behind = map(words_of, model.cuts.around(text.special))
    chain, first = start.extend(before)
    chain, blocks = _cut_blocks(text.content, chain, model.cuts, cache)
    chain, last = chain.extend(behind + continued)
    return chain.tokens, first + blocks + last


def _cut_blocks(
    text: str, start: BlockChain, cuts: TextCuts, cache: PrefixCache
) -> tuple[BlockChain, tuple[BlockHash, ...]]:
    parts = cuts.split(text)
    return cache.extend(
        "text",
        start,
        [part.text.encode() for part in parts],
        lambda known: [words_of(ids) for ids in cuts.encode(parts[known:])],
    )


@dataclass(frozen=True, slots=True)
class _Text:
    content: str
    special: bool
    continued: str = ""


def _text(request: ClientRequest, model: ModelTokenizer) -> _Text | list[int]:
    fields = request.fields
    match request.endpoint:
        case Endpoint.CHAT:
            ids = fields.get("input_ids")
            if ids is not None:
                return _ids(ids)
            if model.chat is None:
                raise NotReproducible("no_chat_template")
            content, continued = _render_chat(fields, model.chat)
            return _Text(content, model.chat_adds_special, continued)
        case Endpoint.COMPLETIONS:
            prompt = fields.get("prompt")
            return _Text(prompt, special=True) if isinstance(prompt, str) else _ids(prompt)
        case Endpoint.GENERATE:
            if any(fields.get(name) for name in _MEDIA_FIELDS):
                raise NotReproducible("multimodal")
            if fields.get("input_embeds") is not None or fields.get("session_params"):
                raise NotReproducible("unsupported_field")
            if fields.get("input_ids") is not None:
                return _ids(fields["input_ids"])
            text = fields.get("text")
            if not isinstance(text, str):
                raise NotReproducible("invalid")
            return _Text(text, special=True)


def _ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise NotReproducible("invalid")
    return ids


def _render_chat(fields: Mapping[str, Any], template: ChatTemplate) -> tuple[str, str]:
    """The rendered chat, and the assistant's text to continue."""
    messages = prepare_messages(fields.get("messages"), template.content_format)
    messages, continued = split_last_assistant(
        messages, fields.get("continue_final_message") is True
    )
    if not messages:
        raise NotReproducible("template")
    tools = prepare_tools(fields.get("tools"), fields.get("tool_choice"))
    variables = _variables(fields, template)
    try:
        return template.render(messages, tools, variables), continued
    except TemplateError:
        if not tools:
            raise NotReproducible("template") from None
    try:
        return template.render(messages, functions_only(tools), variables), continued
    except TemplateError:
        raise NotReproducible("template") from None


def _variables(fields: Mapping[str, Any], template: ChatTemplate) -> Json:
    """What ``normalize_reasoning_inputs`` and ``_apply_jinja_template`` pass to the template."""
    given = fields.get("chat_template_kwargs")
    if fields.get("reasoning") is not None or not isinstance(given, dict | None):
        raise NotReproducible("unsupported_field")
    variables: Json = dict(given or {})
    if not _NOT_VARIABLES.isdisjoint(variables):
        raise NotReproducible("unsupported_field")
    effort = fields.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("thinking", effort != "none")
        variables.setdefault("enable_thinking", effort != "none")
    effort = variables.get("reasoning_effort", effort)
    if effort is None:
        variables.pop("reasoning_effort", None)
        return variables
    # Some templates have efforts of their own that SGLang maps by the model's family.
    if not isinstance(effort, str) or "low_effort" in template.source:
        raise NotReproducible("unsupported_field")
    return {**variables, "reasoning_effort": effort}


def _continuation(text: str, model: ModelTokenizer) -> list[int]:
    """``_append_assistant_prefix_to_prompt_ids``: encoded on its own, without a leading BOS."""
    ids = model.encode(text, special=True)
    return ids[1:] if ids and ids[0] == model.bos_id else ids


def _not_ours(request: ClientRequest, served_name: str) -> str | None:
    """Why no cached block can be used, or none that is known here; None if they can."""
    fields = request.fields
    if fields.get("lora_path"):
        return "namespace"
    if request.model is not None and ":" in request.model and request.model != served_name:
        return "namespace"  # model:adapter
    if any(not isinstance(fields.get(name) or "", str) for name in _NAMESPACE_FIELDS):
        return "namespace"  # refused by SGLang: only a batch may have a list of them
    if _wants_prompt_logprobs(request):
        return "prompt_logprobs"  # SGLang then computes the prompt again
    return None


def _wants_prompt_logprobs(request: ClientRequest) -> bool:
    fields = request.fields
    match request.endpoint:
        case Endpoint.GENERATE:
            start = fields.get("logprob_start_len")
            return bool(fields.get("return_logprob")) and start is not None and start != -1
        case Endpoint.COMPLETIONS:
            return bool(fields.get("echo")) and bool(fields.get("logprobs"))
        case Endpoint.CHAT:
            return False
