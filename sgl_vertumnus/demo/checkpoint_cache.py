"""Directories that are built once, whole or not at all, and noticed when damaged.

A build runs in a sibling directory and is renamed into place with a manifest of every file's
size and digest. A directory whose manifest is missing (an interrupted build), or does not
match its files or the recipe, is built again. Builders of the same directory take turns.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sgl_vertumnus.demo.progress import Progress, Quiet

MANIFEST = "manifest.json"
CACHE_VARIABLE = "VERTUMNUS_CACHE"


class FileRecord(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished directory holds. ``recipe`` names the way it was built."""

    recipe: str
    files: dict[str, FileRecord]


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """``$VERTUMNUS_CACHE``, else ``sgl-vertumnus`` in the user's XDG cache directory."""
    chosen = environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "sgl-vertumnus"


def damage(directory: Path, recipe: str) -> str | None:
    """Why ``directory`` cannot be used, or None when every byte is as it was built."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return "not built" if not directory.exists() else f"{MANIFEST} is missing"
    except (OSError, msgspec.MsgspecError) as exc:
        return f"{MANIFEST} is unreadable ({exc})"
    if manifest.recipe != recipe:
        return f"built by recipe {manifest.recipe!r}, this release has {recipe!r}"
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record.size_bytes:
            return f"{name} has {path.stat().st_size} bytes, not {record.size_bytes}"
        if _sha256(path) != record.sha256:
            return f"{name} has changed"
    return None


def materialise(
    directory: Path,
    recipe: str,
    build: Callable[[Path], None],
    progress: Progress | None = None,
) -> Path:
    """``directory``, built by ``build(empty_directory)`` unless it stands and is intact.

    Whatever ``build`` raises is passed on, and ``directory`` is then as it was before.
    """
    progress = progress if progress is not None else Quiet()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _turn(directory, progress):
        reason = damage(directory, recipe)
        if reason is None:
            return directory
        if directory.exists():
            progress.step(f"{directory}: {reason}; building it again")
        # Only the holder of the lock builds: what lies here is left from a killed build.
        for leftover in directory.parent.glob(f".{directory.name}.*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        prefix = f".{directory.name}."
        partial = Path(tempfile.mkdtemp(".partial", prefix, directory.parent))
        try:
            built = partial / "new"
            built.mkdir()
            build(built)
            _seal(built, recipe)
            if directory.exists():
                directory.rename(partial / "old")
            built.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


@contextmanager
def _turn(directory: Path, progress: Progress) -> Iterator[None]:
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step(f"waiting for another process that is building {directory}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _seal(directory: Path, recipe: str) -> None:
    files = {
        path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, _sha256(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = msgspec.json.encode(Manifest(recipe=recipe, files=files))
    (directory / MANIFEST).write_bytes(msgspec.json.format(manifest, indent=2))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
