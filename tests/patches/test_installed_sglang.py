"""Every patch against the SGLang that is installed, and against what a release might do to it.

A failure here after an upgrade is the upgrade's checklist: read the upstream diff of the
function, adapt the hook if it must be, then set its new fingerprint (runtime_patches/README.md).
"""

import inspect
import pkgutil
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from vertumnus_patches import install
from vertumnus_patches.install import resolve
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.record import Kind, Patch, source_fingerprint

from tests.patches.conftest import ModuleMaker

sglang = pytest.importorskip("sglang", reason="needs sglang")

each_patch = pytest.mark.parametrize("patch", ALL_PATCHES, ids=lambda patch: patch.id)
POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


@each_patch
def test_target_is_as_the_patch_expects(patch: Patch) -> None:
    found = source_fingerprint(resolve(patch))
    assert found == patch.fingerprint, f"review the upstream diff of {patch.target}"


@each_patch
def test_hook_can_be_called_like_its_target(patch: Patch) -> None:
    """SGLang's registry passes a hook what the caller wrote: by position or by name."""
    expected = list(inspect.signature(resolve(patch)).parameters.values())
    takes = inspect.signature(patch.hook)
    extra = [object()] if patch.kind in (Kind.AFTER, Kind.AROUND) else []
    bound_self = "." in patch.target and expected[:1] and expected[0].name in ("self", "cls")
    first = [object()] if bound_self else []
    rest = expected[1:] if bound_self else expected
    plain = [p for p in rest if p.kind is POSITIONAL_OR_KEYWORD]
    required = [p for p in plain if p.default is p.empty]
    named_only = {p.name: p.name for p in rest if p.kind is p.KEYWORD_ONLY}
    takes.bind(*extra, *first, *(p.name for p in plain), **named_only)
    takes.bind(*extra, *first, *(p.name for p in required), **named_only)
    takes.bind(*extra, *first, **{p.name: p.name for p in plain}, **named_only)
    if any(p.kind is p.VAR_POSITIONAL for p in rest):
        takes.bind(*extra, *first, *(p.name for p in plain), "more", **named_only)
    if any(p.kind is p.VAR_KEYWORD for p in rest):
        takes.bind(*extra, *first, *(p.name for p in plain), **named_only, more="more")


# -- what a release might do ----------------------------------------------------------------------


class Upstream:
    """The owner of a patch's target, to be changed for one test."""

    def __init__(self, patch: Patch, changes: pytest.MonkeyPatch) -> None:
        self.path, _, self.name = patch.target.rpartition(".")
        self.owner = pkgutil.resolve_name(self.path)
        self._changes = changes

    def rename(self) -> None:
        self._changes.delattr(self.owner, self.name)

    def replace(self, value: object) -> None:
        self._changes.setattr(self.owner, self.name, value)

    def inherit(self) -> None:
        module_path, _, class_name = self.path.rpartition(".")
        heir = type(class_name, (self.owner,), {"__slots__": ()})
        self._changes.setattr(pkgutil.resolve_name(module_path), class_name, heir)


def of_class(patch: Patch) -> bool:
    return isinstance(pkgutil.resolve_name(patch.target.rpartition(".")[0]), type)


@pytest.fixture
def refuse_to_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that wrongly passes its checks must not reach this process's SGLang."""

    def unexpected(patches: object) -> None:
        raise AssertionError("the check let a broken target through")

    monkeypatch.setattr(install, "_register", unexpected)


@pytest.fixture
def stop_reason(refuse_to_apply: None) -> Any:
    def reason(*patches: Patch) -> str:
        with pytest.raises(SystemExit) as stop:
            install.install(patches)
        return str(stop.value)

    return reason


@each_patch
def test_a_renamed_target_stops_the_process(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, stop_reason: Any
) -> None:
    Upstream(patch, monkeypatch).rename()
    assert f"{patch.id}: " in (reason := stop_reason(patch))
    assert "of its own" in reason


@pytest.mark.parametrize("patch", filter(of_class, ALL_PATCHES), ids=lambda patch: patch.id)
def test_an_inherited_target_stops_the_process(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, stop_reason: Any
) -> None:
    Upstream(patch, monkeypatch).inherit()
    assert f"{patch.id}: " in (reason := stop_reason(patch))
    assert "inherited" in reason


@each_patch
def test_a_target_that_became_a_property_stops_the_process(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, stop_reason: Any
) -> None:
    Upstream(patch, monkeypatch).replace(property(lambda self: None))
    assert "is a property" in stop_reason(patch)


def written(module: ModuleMaker, patch: Patch, *, head: str = "def", parameters: str = "") -> Any:
    """A function with the target's parameters and another source."""
    if not parameters:
        bare = [
            p.replace(annotation=p.empty, default=None if p.default is not p.empty else p.empty)
            for p in inspect.signature(resolve(patch)).parameters.values()
        ]
        parameters = str(inspect.Signature(bare))
    made: ModuleType = module(f"{head} changed{parameters}:\n    return 'changed'\n")
    assert isinstance(made.changed, FunctionType)
    return made.changed


@each_patch
def test_a_target_that_became_async_stops_the_process(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, module: ModuleMaker, stop_reason: Any
) -> None:
    changed = written(module, patch, head="async def")
    Upstream(patch, monkeypatch).replace(changed)
    assert "is async" in stop_reason(patch)


@each_patch
def test_a_target_with_other_parameters_stops_the_process(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, module: ModuleMaker, stop_reason: Any
) -> None:
    changed = written(module, patch, parameters="(self, something_new)")
    Upstream(patch, monkeypatch).replace(changed)
    assert "something_new" in stop_reason(patch)


@each_patch
def test_a_target_with_another_source_is_noticed(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, module: ModuleMaker, stop_reason: Any
) -> None:
    Upstream(patch, monkeypatch).replace(written(module, patch))
    changed = resolve(patch)
    assert (drift := install._drift(patch, changed)) is not None and "review it" in drift
    if patch.kind is Kind.REPLACE:
        assert drift in stop_reason(patch)


def test_every_broken_patch_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, stop_reason: Any
) -> None:
    for patch in ALL_PATCHES:
        Upstream(patch, monkeypatch).rename()
    _, *lines = stop_reason(*ALL_PATCHES).splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"  - {p.id}" for p in ALL_PATCHES]


def test_the_checks_leave_no_trace() -> None:
    """Runs after the tests above: this process still has an unpatched SGLang."""
    for patch in ALL_PATCHES:
        assert Path(inspect.getfile(resolve(patch))).is_relative_to(Path(sglang.__file__).parent)
