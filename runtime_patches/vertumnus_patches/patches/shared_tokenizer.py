"""Load the tokenizer once for all processes that are forked from one parent."""

import copy
from collections.abc import Callable
from typing import Any

from vertumnus_patches.record import Kind, Patch, Process

_loaded: dict[tuple[Any, ...], Any] = {}


def load_once(original: Callable[..., Any], tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:
    key = (tokenizer_name, args, tuple(sorted(kwargs.items())))
    try:
        hash(key)
    except TypeError:
        return original(tokenizer_name, *args, **kwargs)
    if key not in _loaded:
        _loaded[key] = original(tokenizer_name, *args, **kwargs)
    # Callers set attributes of their own on what they get.
    return copy.copy(_loaded[key])


PATCH = Patch(
    id="shared-tokenizer",
    target="sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer",
    kind=Kind.AROUND,
    hook=load_once,
    processes=(Process.FRONT, Process.RANK),
    why="every rank loads the tokenizer twice, the front and the detokenizer once more, at "
    "about a second of CPU each; forked children inherit the parent's",
    upstream="children are spawned and share nothing",
    remove_when="SGLang offers a fork server",
    signature=(
        "tokenizer_name",
        "args",
        "tokenizer_mode",
        "trust_remote_code",
        "tokenizer_revision",
        "tokenizer_backend",
        "kwargs",
    ),
    fingerprint="d11f92117aac9b39",
)
