"""What only a GPU can show. Everything here is skipped, and says so, where there is none."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from vertumnus_bench.flashinfer_kernel import missing  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacks = missing()
    for item in items:
        if lacks and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs {lacks}"))
