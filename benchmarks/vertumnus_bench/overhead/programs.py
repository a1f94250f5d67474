"""Compile the C programs of this package once, and again when their text changes."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from sgl_vertumnus.demo.checkpoint_cache import cache_root

_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")


class CompilerError(Exception):
    """There is no program, and why."""


def program(name: str, cache: Path | None = None) -> Path:
    """The executable of ``NAME.c``, below ``cache`` (default: the user's).

    Raises ``CompilerError`` without gcc, or when it refuses the text.
    """
    source = Path(__file__).with_name(f"{name}.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = (cache if cache is not None else cache_root()) / "programs"
    built = folder / f"{name}-{digest}"
    if built.exists():
        return built
    compiler = shutil.which("gcc")
    if compiler is None:
        raise CompilerError("gcc is not installed: apt-get install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed into place, so that nobody runs half of it.
    part = folder / f"{built.name}.{os.getpid()}"
    made = subprocess.run(
        [compiler, *_FLAGS, "-o", str(part), str(source)], capture_output=True, text=True
    )
    if made.returncode != 0:
        raise CompilerError(f"gcc refuses {source}:\n{made.stderr}")
    return part.rename(built)
