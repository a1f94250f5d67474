"""The converted checkpoint under Hugging Face transformers, which knows nothing of us."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sgl_vertumnus.demo import embedded_model

transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello world",
    "  leading, and\ttabs\n\n\nnewlines  ",
    "3.14159 and 2024-01-31 and 1,000,000",
    "naïve café, 中文, 🙂, Ωμέγα",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # it's",
]


def test_answers_like_the_original(embedded_model_path: str) -> None:
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        embedded_model_path, dtype=torch.float32
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    # It stopped by itself: the end of turn is known as the end of the sequence.
    assert answer[-1] == tokenizer.eos_token_id


def test_every_reader_sees_the_same_tokens(embedded_model_path: str) -> None:
    """The router hashes what ``tokenizers`` reads, SGLang what transformers reads."""
    plain = Tokenizer.from_file(f"{embedded_model_path}/tokenizer.json")
    wrapped = transformers.AutoTokenizer.from_pretrained(embedded_model_path)
    for text in TEXTS:
        assert plain.encode(text).ids == wrapped.encode(text)
        assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_the_chat_template_is_the_models_own(embedded_model_path: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model_path)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_second_preparation_finds_the_first(embedded_model_path: str) -> None:
    path = Path(embedded_model_path)
    assert embedded_model.find(path.parent) == path
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert embedded_model.prepare(path.parent) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_command_line_prints_the_directory(embedded_model_path: str) -> None:
    cache = str(Path(embedded_model_path).parent)
    command = [sys.executable, "-m", "sgl_vertumnus.demo.embedded_model", "--cache", cache]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{embedded_model_path}\n"


def test_command_line_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-m", "sgl_vertumnus.demo.embedded_model"]
    command += ["--cache", str(tmp_path / "cache"), "--gguf", str(tmp_path / "bad.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "SHA-256" in done.stderr
    assert embedded_model.find(tmp_path / "cache") is None
