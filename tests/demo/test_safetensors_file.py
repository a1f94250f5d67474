from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_vertumnus.demo.safetensors_file import (
    LazyTensor,
    StorageType,
    round_to_bfloat16,
    write_safetensors,
)

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

# What lies above rounds to infinity.
LARGEST_BFLOAT16 = float.fromhex("0x1.fep127")
finite = st.floats(-LARGEST_BFLOAT16, LARGEST_BFLOAT16, width=32)


@given(st.lists(finite, min_size=1, max_size=64))
@example([0.0, -0.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1e-45])
def test_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy()
    assert (round_to_bfloat16(array) == expected.view(np.uint16)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        round_to_bfloat16(np.array([value], dtype=np.float32))


@pytest.mark.parametrize("storage", list(StorageType))
def test_reads_back_with_the_real_reader(tmp_path: Path, storage: StorageType) -> None:
    values = np.random.default_rng(0).standard_normal((7, 5), dtype=np.float32)
    tensors = {
        "a.weight": LazyTensor((7, 5), lambda: values),
        # Not contiguous: the bytes must follow the shape, not the memory.
        "b.weight": LazyTensor((5, 7), lambda: values.T),
        "c.weight": LazyTensor((3,), lambda: values[0, :3]),
    }
    seen: list[tuple[int, int]] = []
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors, storage, lambda done, total: seen.append((done, total)))
    loaded = safetensors_torch.load_file(path)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert list(loaded) == list(tensors)
    dtype = getattr(torch, storage.value)
    for name, tensor in tensors.items():
        expected = torch.from_numpy(np.ascontiguousarray(tensor.values())).to(dtype)
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], expected)


def test_refuses_a_wrong_shape(tmp_path: Path) -> None:
    tensors = {"a": LazyTensor((2, 2), lambda: np.zeros(4, dtype=np.float32))}
    with pytest.raises(ValueError, match=r"a: declared \(2, 2\), got \(4,\)"):
        write_safetensors(tmp_path / "x", tensors, StorageType.FLOAT32)
