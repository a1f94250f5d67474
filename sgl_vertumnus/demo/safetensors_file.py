"""Write safetensors checkpoints tensor by tensor, with numpy alone.

The format is a little-endian u64 header length, a JSON header and the raw bytes. numpy has no
bfloat16, so tensors are handed over as raw bytes next to their dtype, one at a time: a
checkpoint never needs to lie in memory as a whole.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]


class StorageType(Enum):
    """How float32 values are stored; the value is the name that model configs use."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def tag(self) -> str:
        """The name in a safetensors header."""
        return {"float32": "F32", "bfloat16": "BF16"}[self.value]

    @property
    def item_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.value]

    def encode(self, values: Float32Array) -> bytes:
        """The bytes of ``values`` in C order, little-endian."""
        contiguous = np.ascontiguousarray(values, dtype="<f4")
        if self is StorageType.FLOAT32:
            return contiguous.tobytes()
        return round_to_bfloat16(contiguous).astype("<u2").tobytes()


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose float32 values are produced when it is its turn to be written."""

    shape: tuple[int, ...]
    values: Callable[[], Float32Array]


def round_to_bfloat16(values: Float32Array) -> NDArray[np.uint16]:
    """The bit patterns of ``values`` rounded to the nearest bfloat16, ties to even.

    Finite values only: a NaN could round to infinity, and no checkpoint holds one.
    """
    if not np.isfinite(values).all():
        raise ValueError("only finite values can be rounded to bfloat16")
    bits = values.view(np.uint32)
    # Adding 0x7fff plus the last kept bit carries exactly when the dropped half rounds up.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    storage: StorageType,
    on_written: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write ``tensors`` in order; ``on_written(done, total)`` follows every tensor.

    Raises ``ValueError`` when a tensor's values do not have the shape it declared.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + prod(tensor.shape) * storage.item_bytes
        header[name] = {
            "dtype": storage.tag,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as readers that map the file expect
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for done, (name, tensor) in enumerate(tensors.items(), start=1):
            values = tensor.values()
            if values.shape != tensor.shape:
                raise ValueError(f"{name}: declared {tensor.shape}, got {values.shape}")
            stream.write(storage.encode(values))
            on_written(done, len(tensors))
