"""Write the tokenizer files that transformers, SGLang and ``tokenizers`` load from a directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_ML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_ML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The roles of special tokens, by id."""

    bos: int
    eos: int
    pad: int
    unk: int


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer with everything a chat endpoint needs to know of it."""

    tokenizer: Tokenizer
    specials: SpecialTokens
    chat_template: str
    context_tokens: int

    def write(self, directory: Path) -> None:
        """Write ``tokenizer.json``, its configuration, and the generation defaults."""
        named = {
            "bos_token": self.tokenizer.id_to_token(self.specials.bos),
            "eos_token": self.tokenizer.id_to_token(self.specials.eos),
            "pad_token": self.tokenizer.id_to_token(self.specials.pad),
            "unk_token": self.tokenizer.id_to_token(self.specials.unk),
        }
        self.tokenizer.save(str(directory / "tokenizer.json"))
        write_json(
            directory / "tokenizer_config.json",
            {
                **named,
                "add_prefix_space": False,
                "chat_template": self.chat_template,
                "clean_up_tokenization_spaces": False,
                "model_max_length": self.context_tokens,
                # The generic class takes tokenizer.json as it is; a model's own class
                # rebuilds the pre-tokenizer, and ids would differ from those of the router.
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
        )
        write_json(directory / "special_tokens_map.json", named)
        write_json(
            directory / "generation_config.json",
            {
                "bos_token_id": self.specials.bos,
                "eos_token_id": self.specials.eos,
                "pad_token_id": self.specials.pad,
            },
        )


def byte_pair_tokenizer(
    pieces: list[str], merges: list[tuple[str, str]], special_pieces: list[str]
) -> Tokenizer:
    """A byte-level BPE that splits digits one by one; ids are positions in ``pieces``."""
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in special_pieces]
    )
    return tokenizer


def read_tokenizer(directory: Path, context_tokens: int) -> ChatTokenizer:
    """The tokenizer that ``ChatTokenizer.write`` put into ``directory``, for another context."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    return ChatTokenizer(
        tokenizer=tokenizer,
        specials=SpecialTokens(
            bos=_token_id(tokenizer, settings["bos_token"]),
            eos=_token_id(tokenizer, settings["eos_token"]),
            pad=_token_id(tokenizer, settings["pad_token"]),
            unk=_token_id(tokenizer, settings["unk_token"]),
        ),
        chat_template=settings["chat_template"],
        context_tokens=context_tokens,
    )


def _token_id(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    if token is None:
        raise ValueError(f"the tokenizer has no token {piece!r}")
    return token


def byte_tokenizer(context_tokens: int) -> ChatTokenizer:
    """One token per byte of UTF-8 and three special tokens: 259 ids, nothing to download."""
    pieces = [*CHAT_ML_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return ChatTokenizer(
        tokenizer=byte_pair_tokenizer(pieces, [], list(CHAT_ML_SPECIALS)),
        specials=SpecialTokens(bos=1, eos=2, pad=2, unk=0),
        chat_template=CHAT_ML_TEMPLATE,
        context_tokens=context_tokens,
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
