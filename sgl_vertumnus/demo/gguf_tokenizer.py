"""Read the byte-pair tokenizer and the chat template out of a GGUF file."""

from sgl_vertumnus.demo.gguf_llama import GgufError, LlamaGguf
from sgl_vertumnus.demo.tokenizer_files import ChatTokenizer, SpecialTokens, byte_pair_tokenizer

#: ``tokenizer.ggml.token_type`` of tokens that never come out of merging text.
_CONTROL = 3


def chat_tokenizer(model: LlamaGguf) -> ChatTokenizer:
    """The file's tokenizer; ``GgufError`` when it splits text in a way not known here."""
    kind, split = model.value("tokenizer.ggml.model"), model.value("tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise GgufError(f"cannot rebuild a {kind!r} tokenizer with pre-tokenizer {split!r}")
    pieces = [str(piece) for piece in model.value("tokenizer.ggml.tokens")]
    types = model.value("tokenizer.ggml.token_type")
    merges = [
        (left, right)
        for left, _, right in (
            str(merge).partition(" ") for merge in model.value("tokenizer.ggml.merges")
        )
    ]
    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind == _CONTROL]
    return ChatTokenizer(
        tokenizer=byte_pair_tokenizer(pieces, merges, control),
        specials=SpecialTokens(
            bos=int(model.value("tokenizer.ggml.bos_token_id")),
            eos=int(model.value("tokenizer.ggml.eos_token_id")),
            pad=int(model.value("tokenizer.ggml.padding_token_id")),
            unk=int(model.value("tokenizer.ggml.unknown_token_id")),
        ),
        chat_template=str(model.value("tokenizer.chat_template")),
        context_tokens=int(model.value("llama.context_length")),
    )
