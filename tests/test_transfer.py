"""What a prefill pool needs of its machine, and what it says when that is missing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_vertumnus import transfer
from sgl_vertumnus.errors import UnsupportedFeature
from sgl_vertumnus.transfer import transfer_backend

Put = Callable[[str], None]


@pytest.fixture
def engine_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Put:
    """Puts a module in the place of Mooncake's."""

    def put(source: str) -> None:
        (tmp_path / "stand_in.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        found = transfer.Engine(
            "stand_in", transfer._MOONCAKE.package, transfer._MOONCAKE.libraries
        )
        monkeypatch.setattr(transfer, "_ENGINES", {"mooncake": found, "mooncake_tcp": found})

    return put


@pytest.mark.parametrize(("devices", "backend"), [([], "mooncake_tcp"), (["mlx5_0"], "mooncake")])
def test_mooncake_takes_rdma_where_there_is_some(
    engine_that: Put, tmp_path: Path, devices: list[str], backend: str
) -> None:
    engine_that("")
    rdma = tmp_path / "infiniband"
    assert transfer_backend("mooncake", device="cpu", rdma_devices=rdma) == "mooncake_tcp"
    rdma.mkdir()
    for name in devices:
        (rdma / name).mkdir()
    assert transfer_backend("mooncake", device="cpu", rdma_devices=rdma) == backend
    assert transfer_backend("mooncake_tcp", device="cpu", rdma_devices=rdma) == "mooncake_tcp"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", ["ModuleNotFoundError", "sgl-vertumnus[pd]"]),
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file')",
            ["libibverbs.so.1", "apt-get install libibverbs1"],
        ),
        ("import os; os._exit(7)", ["exit status 7", "apt-get install"]),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    engine_that: Put, source: str, said: list[str]
) -> None:
    engine_that(source)
    with pytest.raises(UnsupportedFeature) as refused:
        transfer_backend("mooncake_tcp", device="cpu")
    for part in ("--disaggregation-transfer-backend mooncake_tcp", *said):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("backend", "said"), [("nixl", "use mooncake_tcp on a CPU"), ("mori", "use one of mooncake,")]
)
def test_what_cannot_work_is_refused(backend: str, said: str) -> None:
    with pytest.raises(UnsupportedFeature, match=said):
        transfer_backend(backend, device="cpu")
