"""A tiny GGUF written the way llama.cpp's converter does it, read back as a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers

from sgl_vertumnus.demo.gguf_llama import GgufError, LlamaGguf
from sgl_vertumnus.demo.gguf_tokenizer import chat_tokenizer
from sgl_vertumnus.demo.safetensors_file import StorageType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECES = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "he", "hel"]
ROWS = {
    "token_embd": (len(PIECES), HIDDEN),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (INNER, HIDDEN),
    "blk.0.ffn_up": (INNER, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, INNER),
}


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    untied: bool = False,
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(PIECES)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(PIECES) - len(SPECIALS)))
    writer.add_token_merges(["1 2", "h e", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in weights.items():
        if name.endswith("attn_q"):
            values = llama_cpp_permute(values, HEADS)
        elif name.endswith("attn_k"):
            values = llama_cpp_permute(values, KV_HEADS)
        packed = quants.quantize(values, GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.full(HIDDEN, 0.5, dtype=np.float32))
    if untied:
        writer.add_tensor("output.weight", weights["token_embd"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape, dtype=np.float32) for name, shape in ROWS.items()
    }


def test_tensors_come_back_in_their_own_order(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_gguf(tmp_path / "m.gguf", weights)
    tensors = LlamaGguf(tmp_path / "m.gguf").tensors()
    original = {
        "model.embed_tokens": "token_embd",
        "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
        "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }
    norms = {
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    }
    assert set(tensors) == {f"{name}.weight" for name in original.keys() | norms}
    for name, source in original.items():
        tensor = tensors[f"{name}.weight"]
        values = tensor.values()
        assert tensor.shape == values.shape == weights[source].shape
        # 4 bits per value with a scale and an offset per 32: half a step of the range.
        step = np.ptp(weights[source]) / 15
        assert np.abs(values - weights[source]).max() <= 0.6 * step
    assert (tensors["model.norm.weight"].values() == 0.5).all()


def test_config(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "tied.gguf", weights)
    write_gguf(tmp_path / "untied.gguf", weights, untied=True)
    config = LlamaGguf(tmp_path / "tied.gguf").config(StorageType.BFLOAT16)
    assert config["tie_word_embeddings"] is True
    assert config["head_dim"] == HEAD_DIM
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert config["vocab_size"] == len(PIECES)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    untied = LlamaGguf(tmp_path / "untied.gguf")
    assert untied.config(StorageType.BFLOAT16)["tie_word_embeddings"] is False
    assert "lm_head.weight" in untied.tensors()


def test_tokenizer(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "m.gguf", weights)
    chat = chat_tokenizer(LlamaGguf(tmp_path / "m.gguf"))
    encoding = chat.tokenizer.encode("<|im_start|>hello 12é<|im_end|>")
    # Digits stay apart although a merge of "1" and "2" exists: that is what "smollm" means.
    assert encoding.tokens == [
        *("<|im_start|>", "hel", "l", "o", "Ġ", "1", "2", "Ã", "©", "<|im_end|>"),
    ]
    assert chat.tokenizer.decode(encoding.ids) == "hello 12é"
    assert chat.context_tokens == 128


def test_refuses_what_it_does_not_know(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_gguf(tmp_path / "qwen.gguf", weights, architecture="qwen2")
    with pytest.raises(GgufError, match="'qwen2' model, not a llama"):
        LlamaGguf(tmp_path / "qwen.gguf")
    write_gguf(tmp_path / "pre.gguf", weights, pre="llama-bpe")
    with pytest.raises(GgufError, match="pre-tokenizer 'llama-bpe'"):
        chat_tokenizer(LlamaGguf(tmp_path / "pre.gguf"))
    write_gguf(tmp_path / "odd.gguf", {**weights, "blk.0.attn_sinks": weights["token_embd"]})
    with pytest.raises(GgufError, match=r"no tensor 'blk\.0\.attn_sinks\.weight'"):
        LlamaGguf(tmp_path / "odd.gguf").tensors()
