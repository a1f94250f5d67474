"""Fixtures that more than one folder of tests uses."""

import pytest

from sgl_vertumnus.demo import embedded_model
from sgl_vertumnus.demo.gguf_source import ModelUnavailableError


@pytest.fixture(scope="session")
def embedded_model_path() -> str:
    """The prepared embedded model; skips, saying why, where it cannot be had."""
    try:
        return str(embedded_model.prepare())
    except ModelUnavailableError as exc:
        pytest.skip(f"the embedded model cannot be had: {exc}")
