"""A patch, as data."""

import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """How the hook meets its target; the names are those of SGLang's ``HookType``."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Process(Enum):
    """The processes of a pool in which a patch does something."""

    FRONT = "front"
    CONTROLLER = "controller"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Patch:
    """One change to one function of SGLang.

    ``target`` is the dotted path of a function or method, ``signature`` the names of its
    parameters and ``fingerprint`` the digest of its source in the supported release: a hook
    is only right for the function it was written against.
    """

    id: str
    target: str
    kind: Kind
    hook: Callable[..., Any]
    processes: tuple[Process, ...]
    why: str
    upstream: str
    remove_when: str
    signature: tuple[str, ...]
    fingerprint: str

    @property
    def source_digest(self) -> str:
        """Digest of our hook and of what stands in its file, so that two installations can be
        told apart."""
        source = inspect.getsource(sys.modules[self.hook.__module__])
        return _digest(f"{self.hook.__qualname__}\n{source}")


def source_fingerprint(function: Callable[..., Any]) -> str:
    """First 16 hex digits of the SHA-256 of the function's dedented source."""
    return _digest(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
