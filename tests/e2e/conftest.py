"""Real SGLang on this machine. One server at a time: a module owns what it starts."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_vertumnus.demo.random_model import RandomModelSpec, write_random_model
from sgl_vertumnus.demo.servers import Server, pool
from sgl_vertumnus.errors import UnsupportedFeature
from sgl_vertumnus.transfer import transfer_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("sglang") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if missing:
                item.add_marker(pytest.mark.skip(reason="the worker extra is not installed"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untied checkpoint with random weights: equality on it means something."""
    directory = tmp_path_factory.mktemp("random-model")
    spec = RandomModelSpec(
        hidden=256, layers=4, query_heads=8, kv_heads=2, head_dim=32, intermediate=512
    )
    write_random_model(directory, spec)
    return directory


@pytest.fixture(scope="session")
def transfer_engine() -> None:
    """Skips where KV cannot be sent to decode servers, and says what is missing."""
    try:
        transfer_backend("mooncake_tcp", device="cpu")
    except UnsupportedFeature as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def small_pool(random_model: Path) -> Iterator[Server]:
    """Three workers of two degrees behind a router."""
    with pool(
        random_model,
        size=4,
        degrees=(1, 2),
        composition="2x1,1x2",
        flags=("--max-total-tokens", "32768"),
    ) as server:
        yield server
