"""Finished simulations in a folder, so that a study that broke off goes on where it was."""

import hashlib
from pathlib import Path

import msgspec
import vertumnus_router
import vertumnus_sim

import vertumnus_bench.study
from vertumnus_bench.study.point import Point, Result, Setup


class _Stored(msgspec.Struct, frozen=True):
    code: str
    point: Point
    result: Result


class Store:
    """One file for each point. A result counts as long as ``code`` is what it was made with;
    with ``any_code`` always."""

    def __init__(self, folder: Path, setup: Setup, code: str, *, any_code: bool = False) -> None:
        self._folder, self._setup = folder, setup
        self._code, self._any_code = code, any_code

    def get(self, point: Point) -> Result | None:
        """None for what is not there, is of other code, or cannot be read."""
        try:
            stored = msgspec.json.decode(self._path(point).read_bytes(), type=_Stored)
        except (OSError, msgspec.MsgspecError):
            return None
        return stored.result if self._any_code or stored.code == self._code else None

    def put(self, point: Point, result: Result) -> None:
        """Whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(point)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(_Stored(self._code, point, result)))
        part.replace(path)

    def clear(self) -> None:
        for path in self._folder.glob("*.json"):
            path.unlink()

    def _path(self, point: Point) -> Path:
        return self._folder / f"{point.digest(self._setup)}.json"


def code_digest(*inputs: str) -> str:
    """Of the code that decides what a simulation gives, the router's, the simulator's and the
    study's own, and of ``inputs``: what it reads besides. Equal for equal files and inputs."""
    found = hashlib.sha256()
    for text in inputs:
        found.update(f"{text}\0".encode())
    for package in (vertumnus_router, vertumnus_sim, vertumnus_bench.study):
        (root,) = map(Path, package.__path__)
        for path in sorted(root.rglob("*")):
            within = path.relative_to(root)
            if path.suffix in (".py", ".json") and within.parts[0] != "io":
                found.update(f"{root.name}/{within}\0".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]
