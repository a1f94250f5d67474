"""Random checkpoints whose outputs depend on attention; for equality tests and benchmarks.

    python -m sgl_vertumnus.demo.random_model DIR [--architecture qwen3] [--layers 6] ...

With weights near zero, or with tied embeddings, attention hardly reaches the logits and two
wrong implementations agree. Here every projection keeps the scale of its input, attention
scores have a standard deviation of ``SCORE_STD`` (a handful of positions share most of the
weight, at any length up to the context), and logits spread by ``LOGIT_STD``, so that the
likeliest token leads by far more than rounding error.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from sgl_vertumnus.demo import embedded_model
from sgl_vertumnus.demo.safetensors_file import (
    Float32Array,
    LazyTensor,
    StorageType,
    write_safetensors,
)
from sgl_vertumnus.demo.tokenizer_files import (
    ChatTokenizer,
    byte_tokenizer,
    read_tokenizer,
    write_json,
)

SCORE_STD = 2.5
LOGIT_STD = 3.0
#: So far apart, experts are chosen alike whatever the order of sums was.
ROUTER_STD = 2.0


class Architecture(Enum):
    LLAMA = "llama"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"

    @property
    def class_name(self) -> str:
        return {
            "llama": "LlamaForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
        }[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModelSpec:
    """The shape of a random model. Equal specs and tokenizers give equal files.

    A mixture has ``experts`` of width ``intermediate`` in every layer, of which each token takes
    ``experts_per_token``; other architectures leave the two aside.
    """

    architecture: Architecture = Architecture.LLAMA
    hidden: int = 512
    layers: int = 6
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 1408
    experts: int = 8
    experts_per_token: int = 2
    context_tokens: int = 32768
    rope_theta: float = 1e6
    storage: StorageType = StorageType.FLOAT32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads do not share {self.kv_heads} KV heads"
            )
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"{self.experts_per_token} of {self.experts} experts for a token")
        if self.head_dim % 2:
            raise ValueError(f"rotary embeddings need an even head dimension, not {self.head_dim}")


def write_random_model(
    directory: Path, spec: RandomModelSpec, tokenizer: Path | None = None
) -> Path:
    """Write the checkpoint into ``directory`` and return it.

    The tokenizer, and with it the vocabulary, is copied from the directory ``tokenizer``;
    None builds one token per byte.
    """
    chat = (
        read_tokenizer(tokenizer, spec.context_tokens)
        if tokenizer is not None
        else byte_tokenizer(spec.context_tokens)
    )
    directory.mkdir(parents=True, exist_ok=True)
    chat.write(directory)
    write_json(directory / "config.json", _config(spec, chat))
    write_safetensors(
        directory / "model.safetensors",
        _tensors(spec, chat.tokenizer.get_vocab_size()),
        spec.storage,
    )
    return directory


def _config(spec: RandomModelSpec, chat: ChatTokenizer) -> dict[str, Any]:
    mixture = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": spec.intermediate,
        "norm_topk_prob": True,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "router_aux_loss_coef": 0.0,
    }
    return {
        **(mixture if spec.architecture is Architecture.QWEN3_MOE else {}),
        "architectures": [spec.architecture.class_name],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": chat.specials.bos,
        "dtype": spec.storage.value,
        "eos_token_id": chat.specials.eos,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.context_tokens,
        "model_type": spec.architecture.value,
        "num_attention_heads": spec.query_heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "pad_token_id": chat.specials.pad,
        "rms_norm_eps": 1e-6,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": chat.tokenizer.get_vocab_size(),
    }


def _tensors(spec: RandomModelSpec, vocabulary: int) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}

    def normal(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """``[rows, columns]`` that maps inputs of unit variance to variance ``gain``²."""
        tensors[name] = LazyTensor(
            (rows, columns), _normal((spec.seed, len(tensors)), rows, columns, gain)
        )

    def constant(name: str, size: int, value: float = 1.0) -> None:
        tensors[name] = LazyTensor((size,), lambda: np.full(size, value, dtype=np.float32))

    queries, keys = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # A score is q·k/sqrt(head_dim): the product of the two standard deviations.
    score_gain = sqrt(SCORE_STD)
    normed = spec.architecture is not Architecture.LLAMA
    normal("model.embed_tokens.weight", vocabulary, spec.hidden, gain=sqrt(spec.hidden))
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        constant(f"{at}.input_layernorm.weight", spec.hidden)
        normal(f"{at}.self_attn.q_proj.weight", queries, spec.hidden, score_gain)
        normal(f"{at}.self_attn.k_proj.weight", keys, spec.hidden, score_gain)
        if normed:
            constant(f"{at}.self_attn.q_norm.weight", spec.head_dim, score_gain)
            constant(f"{at}.self_attn.k_norm.weight", spec.head_dim, score_gain)
        normal(f"{at}.self_attn.v_proj.weight", keys, spec.hidden)
        normal(f"{at}.self_attn.o_proj.weight", spec.hidden, queries)
        constant(f"{at}.post_attention_layernorm.weight", spec.hidden)
        networks = [f"{at}.mlp"]
        if spec.architecture is Architecture.QWEN3_MOE:
            normal(f"{at}.mlp.gate.weight", spec.experts, spec.hidden, ROUTER_STD)
            networks = [f"{at}.mlp.experts.{expert}" for expert in range(spec.experts)]
        for network in networks:
            normal(f"{network}.gate_proj.weight", spec.intermediate, spec.hidden)
            normal(f"{network}.up_proj.weight", spec.intermediate, spec.hidden)
            normal(f"{network}.down_proj.weight", spec.hidden, spec.intermediate)
    constant("model.norm.weight", spec.hidden)
    normal("lm_head.weight", vocabulary, spec.hidden, LOGIT_STD)
    return tensors


def _normal(
    seed: tuple[int, int], rows: int, columns: int, gain: float
) -> Callable[[], Float32Array]:
    def values() -> Float32Array:
        draw = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
        return draw * np.float32(gain / sqrt(columns))

    return values


def main(argv: list[str] | None = None) -> int:
    """The command line: write one checkpoint and print its directory."""
    default = RandomModelSpec()
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vertumnus.demo.random_model",
        description="Write a random, untied checkpoint.",
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--architecture", choices=[kind.value for kind in Architecture], default="llama"
    )
    parser.add_argument(
        "--dtype", choices=[kind.value for kind in StorageType], default=default.storage.value
    )
    for name in ("hidden", "layers", "query_heads", "kv_heads", "head_dim", "intermediate"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(default, name))
    parser.add_argument("--context-tokens", type=int, default=default.context_tokens)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="directory to copy the tokenizer from (default: the embedded model when it is "
        "prepared, else one token per byte)",
    )
    arguments = parser.parse_args(argv)
    try:
        spec = RandomModelSpec(
            architecture=Architecture(arguments.architecture),
            hidden=arguments.hidden,
            layers=arguments.layers,
            query_heads=arguments.query_heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            intermediate=arguments.intermediate,
            context_tokens=arguments.context_tokens,
            storage=StorageType(arguments.dtype),
            seed=arguments.seed,
        )
    except ValueError as exc:
        parser.error(str(exc))
    tokenizer = arguments.tokenizer or embedded_model.find()
    print(f"tokenizer: {tokenizer or 'one token per byte'}", file=sys.stderr)
    print(write_random_model(arguments.directory, spec, tokenizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
