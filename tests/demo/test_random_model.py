"""A random checkpoint must be one on which two wrong implementations do not agree."""

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest

from sgl_vertumnus.demo.random_model import Architecture, RandomModelSpec, write_random_model
from sgl_vertumnus.demo.safetensors_file import StorageType

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def load(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def spec(architecture: Architecture, **changes: Any) -> RandomModelSpec:
    sizes = {"hidden": 256, "layers": 4, "query_heads": 4, "kv_heads": 2, "intermediate": 512}
    sizes |= {"experts": 4}
    return RandomModelSpec(architecture=architecture, **{**sizes, **changes})


@pytest.fixture(scope="module", params=list(Architecture), ids=lambda kind: kind.value)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("random")
    return load(write_random_model(directory, spec(request.param)))


def random_ids(model: Any, length: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, length), generator=generator)


def test_embeddings_are_not_tied(model: Any) -> None:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding.data_ptr() != head.data_ptr()
    assert not torch.equal(embedding, head)
    assert model.config.max_position_embeddings >= 16384


@torch.no_grad()
def test_the_past_decides_the_next_token(model: Any) -> None:
    """Same last token, another past, or the same past in another order: other logits."""
    ids = random_ids(model, 512, seed=0)
    other = random_ids(model, 512, seed=1)
    other[0, -1] = ids[0, -1]
    shuffled = ids.clone()
    shuffled[0, :-1] = ids[0, torch.randperm(511, generator=torch.Generator().manual_seed(2))]
    far = ids.clone()
    far[0, :64] = other[0, :64]
    last, *changed = (model(each).logits[0, -1] for each in (ids, other, shuffled, far))
    for logits in changed:
        assert (logits - last).std() > 0.25 * last.std()


@torch.no_grad()
def test_logits_are_neither_flat_nor_certain(model: Any) -> None:
    logits = model(random_ids(model, 512, seed=3)).logits[0]
    top = logits.topk(2).values
    assert 2.0 < logits.std() < 4.0
    # The likeliest token leads by far more than the 1e-4 that equality tests allow.
    assert (top[:, 0] - top[:, 1]).median() > 0.1
    assert logits.softmax(-1).max(-1).values.median() < 0.9


@torch.no_grad()
def test_greedy_output_does_not_repeat_itself(model: Any) -> None:
    prompt = random_ids(model, 64, seed=4)
    output = model.generate(
        prompt, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert output[0, 64:].unique().numel() > 16


def test_equal_specs_give_equal_files_and_other_seeds_others(tmp_path: Path) -> None:
    kind = spec(Architecture.LLAMA)
    one, two = (write_random_model(tmp_path / name, kind) for name in ("one", "two"))
    other = write_random_model(tmp_path / "other", spec(Architecture.LLAMA, seed=1))
    names = sorted(path.name for path in one.iterdir())
    assert filecmp.cmpfiles(one, two, names, shallow=False) == (names, [], [])
    assert filecmp.cmpfiles(one, other, names, shallow=False)[1] == ["model.safetensors"]


def test_tokenizer_reads_every_byte_and_the_chat_template(tmp_path: Path) -> None:
    write_random_model(tmp_path, spec(Architecture.QWEN3))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "naïve café, 中文 🙂\n 123"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) == json.loads((tmp_path / "config.json").read_text())["vocab_size"]


def test_takes_over_the_embedded_models_tokenizer(tmp_path: Path, embedded_model_path: str) -> None:
    kind = spec(Architecture.LLAMA, layers=1, storage=StorageType.BFLOAT16)
    write_random_model(tmp_path, kind, Path(embedded_model_path))
    copied, original = (
        transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path, embedded_model_path)
    )
    text = "What is the capital of France? 1234"
    assert copied.encode(text) == original.encode(text)
    assert copied.chat_template == original.chat_template
    assert copied.model_max_length == kind.context_tokens
    model = load(tmp_path)
    assert model.get_output_embeddings().weight.shape == (49152, kind.hidden)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="8 query heads do not share 3 KV heads"):
        RandomModelSpec(kv_heads=3)
    with pytest.raises(ValueError, match="9 of 8 experts"):
        RandomModelSpec(experts_per_token=9)
    with pytest.raises(ValueError, match="even head dimension"):
        RandomModelSpec(head_dim=33)
