"""Modules that exist for one test, and seams bound to a recorder."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from vertumnus_patches.seams import ControllerSeam, FrontSeam, RankSeam, seams

ModuleMaker = Callable[[str], ModuleType]


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleMaker]:
    """Makes an importable module of a source text; it has a file, so it can be inspected."""
    numbers = itertools.count()
    names: list[str] = []

    def make(source: str) -> ModuleType:
        name = f"throwaway_{next(numbers)}_{tmp_path.name}".replace("-", "_")
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        made = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(made)
        return made

    yield make
    for name in names:
        del sys.modules[name]


def around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """As SGLang wraps a function that a hook goes around."""
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


class Bound:
    """The runtime that the hooks under test call."""

    def __init__(self) -> None:
        self.rank = Mock(spec=RankSeam)
        self.controller = Mock(spec=ControllerSeam)
        self.front = Mock(spec=FrontSeam)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    runtime = Bound()
    for name in ("rank", "controller", "front"):
        monkeypatch.setattr(seams, f"_{name}", getattr(runtime, name))
    return runtime
