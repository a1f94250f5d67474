"""Read a llama-architecture GGUF file as the checkpoint that it was converted from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from sgl_vertumnus.demo.safetensors_file import Float32Array, LazyTensor, StorageType

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufError(ValueError):
    """The file is not a GGUF model that this reader understands."""


class LlamaGguf:
    """Metadata and dequantised tensors of one file, under the names transformers uses."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise GgufError(f"{path} holds a {architecture!r} model, not a llama")

    def value(self, key: str) -> Any:
        """The metadata value ``key``; ``GgufError`` when the file has none."""
        field = self._reader.get_field(key)
        if field is None:
            raise GgufError(f"the file has no metadata {key!r}")
        return field.contents()

    @property
    def query_heads(self) -> int:
        return int(self.value("llama.attention.head_count"))

    @property
    def kv_heads(self) -> int:
        return int(self.value("llama.attention.head_count_kv"))

    def config(self, storage: StorageType) -> dict[str, Any]:
        """The content of ``config.json``."""
        hidden = int(self.value("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": int(self.value("tokenizer.ggml.bos_token_id")),
            "dtype": storage.value,
            "eos_token_id": int(self.value("tokenizer.ggml.eos_token_id")),
            "head_dim": hidden // self.query_heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": int(self.value("llama.feed_forward_length")),
            "max_position_embeddings": int(self.value("llama.context_length")),
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.query_heads,
            "num_hidden_layers": int(self.value("llama.block_count")),
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": int(self.value("tokenizer.ggml.padding_token_id")),
            # The file stores a float32: seven digits are what the original config said.
            "rms_norm_eps": float(f"{self.value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(self.value("llama.rope.freq_base")),
            "tie_word_embeddings": "output.weight" not in self._names(),
            "use_cache": True,
            "vocab_size": int(self.value("llama.vocab_size")),
        }

    def tensors(self) -> dict[str, LazyTensor]:
        """Every tensor, dequantised to float32 when it is read."""
        return {
            _checkpoint_name(tensor.name): LazyTensor(
                # GGUF lists the fastest dimension first.
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                values=self._dequantiser(tensor),
            )
            for tensor in self._reader.tensors
        }

    def _names(self) -> set[str]:
        return {tensor.name for tensor in self._reader.tensors}

    def _dequantiser(self, tensor: Any) -> Callable[[], Float32Array]:
        heads = {"attn_q": self.query_heads, "attn_k": self.kv_heads}
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""

        def values() -> Float32Array:
            rows: Float32Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            return unpermute_rope(rows, heads[kind]) if kind in heads else rows

        return values


def unpermute_rope(rows: Float32Array, heads: int) -> Float32Array:
    """Undo llama.cpp's reordering of q and k projections.

    ``rows`` is ``[heads * head_dim, hidden]``. llama.cpp rotates neighbouring pairs
    (2i, 2i+1) of a head, transformers and SGLang the pairs (i, i + head_dim/2), so the
    converter interleaved each head's two halves.
    """
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _checkpoint_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.weight"
    raise GgufError(f"a llama model has no tensor {name!r}")
