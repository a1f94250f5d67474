"""Fixtures that more than one folder of tests uses."""

import pytest
from hypothesis import settings

from sgl_vertumnus.demo import embedded_model
from sgl_vertumnus.demo.gguf_source import ModelUnavailableError
from sgl_vertumnus.demo.random_model import RandomModelSpec, write_random_model


@pytest.fixture(scope="session")
def embedded_model_path() -> str:
    """The prepared embedded model; skips, saying why, where it cannot be had."""
    try:
        return str(embedded_model.prepare())
    except ModelUnavailableError as exc:
        pytest.skip(f"the embedded model cannot be had: {exc}")


@pytest.fixture(scope="session")
def random_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random llama, untied, with grouped query heads and one token per byte."""
    spec = RandomModelSpec(hidden=256, layers=4, query_heads=4, kv_heads=2, intermediate=512)
    return str(write_random_model(tmp_path_factory.mktemp("random-model"), spec))


# Two busy cores make any single example slow now and then.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
