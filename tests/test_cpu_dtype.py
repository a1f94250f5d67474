"""The number format of a CPU pool is the one that computes faster here."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from sgl_vertumnus import cpu_dtype  # noqa: E402
from sgl_vertumnus.cpu_dtype import faster_dtype  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    faster_dtype.cache_clear()
    yield
    faster_dtype.cache_clear()
    torch.set_num_threads(threads)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the products take: float32 and bfloat16 of a prefill, then of a decode."""
    seconds: list[float] = []

    def next_time(product: Any) -> float:
        assert torch.get_num_threads() == 1, "a rank's share, not the whole machine"
        product()
        return seconds.pop(0)

    monkeypatch.setattr(cpu_dtype, "_fastest_s", next_time)
    return seconds


@pytest.mark.parametrize(
    ("taken", "dtype"),
    [
        ([4.0, 1.0, 2.0, 1.0], "bfloat16"),
        ([1.0, 4.0], "float32"),
        ([4.0, 1.0, 1.0, 1.0], "float32"),
        ([1.0, 1.0], "float32"),
    ],
)
def test_bfloat16_must_win_both(times: list[float], taken: list[float], dtype: str) -> None:
    times += taken
    torch.set_num_threads(2)
    assert faster_dtype() == dtype
    assert times == [], "no product was measured in vain"
    assert torch.get_num_threads() == 2
    assert faster_dtype() == dtype, "and it is measured once"


def test_a_failure_gives_the_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(product: Any) -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cpu_dtype, "_fastest_s", fail)
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="no such kernel"):
        faster_dtype()
    assert torch.get_num_threads() == 2


def test_here() -> None:
    began = time.monotonic()
    assert faster_dtype() in ("float32", "bfloat16")
    assert time.monotonic() - began < 5
