"""Load a model's tokenizer and chat template from its files, as SGLang's front ends up with them.

SGLang loads through transformers 5 and then undoes what model-specific classes change
(``utils/hf_transformers/tokenizer.py``): the pre-tokenizer of ``tokenizer.json`` is kept, and
Llama-like classes add a beginning-of-sequence token unless the configuration says no.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from vertumnus_router.io.chat_template import ChatTemplate, TemplateError
from vertumnus_router.io.text_cuts import TextCuts

log = logging.getLogger(__name__)

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
#: Classes whose ``add_bos_token`` SGLang restores, default True.
_ADDS_BOS = frozenset(
    (
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "CodeLlamaTokenizer",
        "CodeLlamaTokenizerFast",
        "GemmaTokenizer",
        "GemmaTokenizerFast",
        "CohereTokenizerFast",
    )
)
#: Architectures whose chat prompt SGLang builds in Python, not with the Jinja template
#: (``entrypoints/openai/chat_encoding.py``, ``parser/python_chat_template.py``).
_CODED_PROMPTS = ("DeepseekV4", "KimiK3", "Inkling", "MossVL", "GlmMoeDsa", "Glm5Next")


class TokenizerError(Exception):
    """The tokenizer cannot be used; prompts will be estimated."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """``chat`` is None, with the reason in ``no_chat``, when chat prompts cannot be rebuilt.

    ``chat_adds_special`` tells whether a rendered chat prompt is encoded with special tokens;
    SGLang turns them off exactly when the tokenizer would add some.
    ``most_chars_per_token`` bounds how much text one token can stand for; None if unknown.
    ``cuts`` is None when a text has to be encoded in one piece.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    no_chat: str | None
    chat_adds_special: bool
    bos_id: int | None
    most_chars_per_token: int | None
    cuts: TextCuts | None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text. Unlike ``Tokenizer.encode``, a batch lets go of the interpreter lock:
        a long text would stop the event loop for as long as it takes."""
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids


def load(path: str, chat_template: str | None) -> ModelTokenizer:
    """The tokenizer in directory ``path``, or in the local Hugging Face cache under that name.

    ``chat_template``, when given, replaces the directory's: Jinja source, a ``.jinja`` file,
    or the name of one of SGLang's built-in templates, which cannot be rebuilt here.
    Raises ``TokenizerError`` when there is nothing usable.
    """
    directory = _directory(path)
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as exc:  # tokenizers raises bare Exception
        raise TokenizerError(f"{directory / 'tokenizer.json'}: {exc}") from exc
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _json(directory / "tokenizer_config.json")
    specials = _special_tokens(config, _json(directory / "special_tokens_map.json"))
    _add_missing(tokenizer, config, specials)
    bos = specials.get("bos_token")
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    if config.get("tokenizer_class") in _ADDS_BOS:
        _restore_bos(tokenizer, config, bos, bos_id)
    chat, no_chat = _chat(directory, config, chat_template, specials)
    return ModelTokenizer(
        tokenizer=tokenizer,
        chat=chat,
        no_chat=no_chat,
        chat_adds_special=not tokenizer.encode("").ids,
        bos_id=bos_id,
        most_chars_per_token=_most_chars_per_token(tokenizer),
        cuts=TextCuts.of(tokenizer),
    )


def _directory(path: str) -> Path:
    directory = Path(path)
    if directory.is_dir():
        return directory
    # A repository name: what the pool downloaded may be in this machine's cache too.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "tokenizer.json")
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise TokenizerError(f"{path} is no directory here; name one with --tokenizer-path")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise TokenizerError(f"{path}: {exc}") from exc
    return content if isinstance(content, dict) else {}


def _text(token: Any) -> str | None:
    match token:
        case str(text) | {"content": str(text)}:
            return text
        case _:
            return None


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; earlier sources win."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKENS:
            text = _text(source.get(name))
            if text is not None:
                found.setdefault(name, text)
    return found


def _add_missing(
    tokenizer: Tokenizer, config: Mapping[str, Any], specials: Mapping[str, str]
) -> None:
    """Tokens that only the configuration names are added, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
            text = _text(token)
            if text is not None and text not in known:
                flags = {k: bool(token.get(k)) for k in ("single_word", "lstrip", "rstrip")}
                special = bool(token.get("special"))
                normalized = bool(token.get("normalized", not special))
                tokenizer.add_tokens(
                    [AddedToken(text, special=special, normalized=normalized, **flags)]
                )
                known.add(text)
    for text in specials.values():
        if text not in known:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
            known.add(text)


def _restore_bos(
    tokenizer: Tokenizer, config: Mapping[str, Any], bos: str | None, bos_id: int | None
) -> None:
    wanted = config.get("add_bos_token")
    if wanted is None:
        wanted = True
    if wanted and bos is not None and bos_id is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, bos_id)],
        )
    else:
        tokenizer.post_processor = TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )


def _chat(
    directory: Path,
    config: Mapping[str, Any],
    override: str | None,
    specials: Mapping[str, str],
) -> tuple[ChatTemplate | None, str | None]:
    architectures = _json(directory / "config.json").get("architectures") or [""]
    if any(str(architectures[0]).startswith(coded) for coded in _CODED_PROMPTS):
        return None, f"SGLang builds the prompts of {architectures[0]} in Python"
    source = _own_source(directory, config) if override is None else _given_source(override)
    if source is None:
        return None, "no Jinja chat template" if override is None else f"template {override!r}"
    try:
        template = ChatTemplate(source, specials)
    except TemplateError as exc:
        return None, str(exc)
    if template.unknown_tokens:
        return None, f"the template uses {', '.join(sorted(template.unknown_tokens))}"
    return template, None


def _own_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The directory's template. Files win over the configuration, and of several named ones
    SGLang takes the first (``TemplateManager._select_named_template``)."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    from_processor = _json(directory / "chat_template.json").get("chat_template")
    if isinstance(from_processor, str):
        return from_processor
    match config.get("chat_template"):
        case str(source):
            return source
        case [{"template": str(source)}, *_]:
            return source
        case _:
            return None


def _given_source(override: str) -> str | None:
    if "{%" in override or "{{" in override:
        return override
    file = Path(override)
    if file.suffix == ".jinja" and file.is_file():
        return file.read_text(encoding="utf-8").strip("\n").replace("\\n", "\n")
    return None


def _most_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """None unless every byte of a text is known to end up in a token."""
    parts = json.loads(tokenizer.to_str())
    splits = _flatten(parts.get("pre_tokenizer"), "pretokenizers")
    byte_level = any(split.get("type") == "ByteLevel" for split in splits)
    if not byte_level or any(split.get("behavior") == "Removed" for split in splits):
        return None
    normalizers = _flatten(parts.get("normalizer"), "normalizers")
    if any(normalizer.get("type") != "NFC" for normalizer in normalizers):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts.get("added_tokens", ())):
        return None
    longest = max(len(token) for token in tokenizer.get_vocab(with_added_tokens=True))
    # Composing folds at most four characters into one.
    return 4 * longest if normalizers else longest


def _flatten(part: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[members]) if part.get("type") == "Sequence" else [part]
