"""Resolving, checking and applying patches, on targets made for the purpose."""

import dataclasses
import logging
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vertumnus_patches import SGLANG_VERSION, install
from vertumnus_patches.install import PatchError, resolve
from vertumnus_patches.record import Kind, Patch, Process, source_fingerprint

from tests.patches.conftest import ModuleMaker

TARGETS = """
import functools


def function(a, b=1):
    return ("function", a, b)


class Base:
    def inherited(self, a):
        return a


class Owner(Base):
    def method(self, a, b=1):
        return ("method", a, b)

    @classmethod
    def of_class(cls, a, b=1):
        return ("of_class", a, b)

    @staticmethod
    def static(a, b=1):
        return ("static", a, b)

    @property
    def prop(self):
        return 1

    async def coroutine(self, a):
        return a

    async def generator(self, a):
        yield a

    class Inner:
        pass

    partial = functools.partial(function, 1)


def user():
    return function(1)
"""


def patch_of(target: str, *signature: str, **changes: Any) -> Patch:
    fields: dict[str, Any] = {
        "id": "p",
        "target": target,
        "kind": Kind.AROUND,
        "hook": around,
        "processes": (Process.RANK,),
        "why": "-",
        "upstream": "-",
        "remove_when": "-",
        "signature": signature,
        "fingerprint": "0" * 16,
    }
    return Patch(**fields | changes)


def fitting(target: str, *signature: str, **changes: Any) -> Patch:
    """A patch whose fingerprint is right."""
    patch = patch_of(target, *signature, **changes)
    return dataclasses.replace(patch, fingerprint=source_fingerprint(resolve(patch)))


def around(original: Any, *args: Any, **kwargs: Any) -> Any:
    return ("around", original(*args, **kwargs))


@pytest.fixture
def targets(module: ModuleMaker) -> ModuleType:
    return module(TARGETS)


# -- resolve --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "signature"),
    [
        ("function", ("a", "b")),
        ("Owner.method", ("self", "a", "b")),
        ("Owner.of_class", ("cls", "a", "b")),
        ("Owner.static", ("a", "b")),
        ("Base.inherited", ("self", "a")),
    ],
)
def test_resolve_finds_functions_of_every_kind(
    targets: ModuleType, path: str, signature: tuple[str, ...]
) -> None:
    found = resolve(patch_of(f"{targets.__name__}.{path}", *signature))
    assert found.__name__ == path.rpartition(".")[2]


@pytest.mark.parametrize(
    ("path", "signature", "reason"),
    [
        ("nothing", (), "has no nothing of its own"),
        ("Nobody.method", (), "does not exist"),
        ("Owner.inherited", ("self", "a"), "it is inherited"),
        ("Owner.prop", ("self",), "is a property"),
        ("Owner.coroutine", ("self", "a"), "is async"),
        ("Owner.generator", ("self", "a"), "is async"),
        ("Owner.Inner", (), "is a type"),
        ("Owner.partial", ("b",), "is a partial"),
        ("Owner.method", ("self", "a"), r"takes \(self, a, b\)"),
        ("Owner.method", ("self", "b", "a"), r"takes \(self, a, b\)"),
        ("function", ("a", "b", "c"), r"expects \(a, b, c\)"),
    ],
)
def test_resolve_refuses(
    targets: ModuleType, path: str, signature: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(PatchError, match=reason):
        resolve(patch_of(f"{targets.__name__}.{path}", *signature))


def test_resolve_refuses_a_module_that_is_gone() -> None:
    with pytest.raises(PatchError, match="does not exist"):
        resolve(patch_of("no_such_module_at_all.function"))


def test_resolve_refuses_a_module_that_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_gpu.py").write_text("raise RuntimeError('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PatchError, match=r"cannot be imported.*no GPU"):
        resolve(patch_of("needs_a_gpu.function"))


# -- drift ----------------------------------------------------------------------------------------


def test_drift_names_both_digests(targets: ModuleType) -> None:
    patch = fitting(f"{targets.__name__}.function", "a", "b")
    assert install._drift(patch, targets.function) is None
    other = dataclasses.replace(patch, fingerprint="1" * 16)
    assert (drift := install._drift(other, targets.function)) is not None
    assert patch.fingerprint in drift and "1" * 16 in drift and patch.target in drift


def test_drift_sees_a_comment_but_not_the_indentation(module: ModuleMaker) -> None:
    plain = module("def f(a):\n    return a\n").f
    method = module("class C:\n    def f(a):\n        return a\n").C.f
    commented = module("def f(a):\n    # why\n    return a\n").f
    assert source_fingerprint(plain) == source_fingerprint(method)
    assert source_fingerprint(plain) != source_fingerprint(commented)


def test_drift_looks_behind_a_wrapper(targets: ModuleType, module: ModuleMaker) -> None:
    wrapper = module("import functools\ndef wrap(f):\n    return functools.wraps(f)(lambda: 0)\n")
    assert source_fingerprint(wrapper.wrap(targets.function)) == source_fingerprint(
        targets.function
    )


# -- nothing happens unless everything fits -------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of what would be registered with SGLang; nothing is."""
    ids: list[str] = []
    monkeypatch.setattr(install, "_register", lambda patches: ids.extend(p.id for p in patches))
    monkeypatch.setattr(install, "_not_live", lambda patches, originals: [])
    return ids


def test_every_failure_is_named_at_once(
    targets: ModuleType, registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "version", lambda name: "0.4.0")
    name = targets.__name__
    patches = [
        patch_of(f"{name}.nothing", id="renamed"),
        patch_of(f"{name}.Owner.inherited", "self", "a", id="moved-up"),
        patch_of(f"{name}.Owner.prop", "self", id="property"),
        patch_of(f"{name}.Owner.coroutine", "self", "a", id="async"),
        patch_of(f"{name}.function", "a", id="parameters"),
        patch_of(f"{name}.function", "a", "b", id="source", kind=Kind.REPLACE),
        fitting(f"{name}.Owner.method", "self", "a", "b", id="fits"),
    ]
    with pytest.raises(SystemExit) as stop:
        install.install(patches)
    message = str(stop.value)
    for patch in patches:
        assert (f"- {patch.id}:" in message) == (patch.id != "fits")
    assert "0.4.0" in message and SGLANG_VERSION in message
    assert registered == []


def test_an_absent_sglang_is_a_failure_like_any_other(
    registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(install, "version", absent)
    with pytest.raises(SystemExit, match=f"install sglang=={SGLANG_VERSION}"):
        install.install([])
    assert registered == []


@pytest.mark.parametrize("kind", Kind)
def test_drift_stops_a_replacement_and_warns_of_the_rest(
    targets: ModuleType,
    registered: list[str],
    kind: Kind,
    caplog: pytest.LogCaptureFixture,
) -> None:
    patch = patch_of(f"{targets.__name__}.function", "a", "b", kind=kind)
    with caplog.at_level(logging.WARNING):
        if kind is Kind.REPLACE:
            with pytest.raises(SystemExit, match="review it"):
                install.install([patch])
            assert registered == []
        else:
            assert install.install([patch]) == install.manifest([patch])
            assert registered == ["p"]
            assert "review it" in caplog.text and patch.target in caplog.text


# -- live or not ----------------------------------------------------------------------------------


def test_not_live_names_what_was_not_replaced(targets: ModuleType) -> None:
    patches = [
        patch_of(f"{targets.__name__}.Owner.{name}", id=name)
        for name in ("method", "of_class", "static")
    ]
    originals = {
        patch.target: vars(targets.Owner)[patch.id]
        if patch.id == "method"
        else vars(targets.Owner)[patch.id].__func__
        for patch in patches
    }
    problems = install._not_live(patches, originals)
    assert [problem.partition(":")[0] for problem in problems] == ["method", "of_class", "static"]
    assert all("was not replaced" in problem for problem in problems)


def test_not_live_names_modules_that_kept_the_original(
    targets: ModuleType, module: ModuleMaker
) -> None:
    original = targets.function
    alias = module(f"from {targets.__name__} import function as renamed\n")
    patch = patch_of(f"{targets.__name__}.function", "a", "b")
    hook = patch.hook
    targets.function = lambda *args: hook(original, *args)  # type: ignore[attr-defined]
    problems = install._not_live([patch], {patch.target: original})
    assert problems == [
        f"p: {alias.__name__}.renamed still is the original {patch.target}",
    ]


def test_calls_follows_the_chain_of_wrappers() -> None:
    def hook() -> None: ...

    def other() -> None: ...

    def wrap(inner: Any, run: Any) -> Any:
        def wrapper() -> None:
            run()

        wrapper.__wrapped__ = inner  # type: ignore[attr-defined]
        return wrapper

    def original() -> None: ...

    assert install._calls(wrap(wrap(original, hook), other), hook)
    assert not install._calls(wrap(original, other), hook)
    assert not install._calls(original, hook)


# -- through SGLang's registry --------------------------------------------------------------------


@pytest.fixture
def registry() -> Any:
    """SGLang's, without what the test adds."""
    pytest.importorskip("sglang", reason="needs sglang")
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks, patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    yield HookRegistry
    HookRegistry.reset()
    HookRegistry._hooks.update(hooks)
    HookRegistry._patched.update(patched)


def before(*args: Any, **kwargs: Any) -> Any:
    return (("before", *args[1:]), kwargs)


def after(result: Any, *args: Any, **kwargs: Any) -> Any:
    return ("after", result)


def instead(*args: Any, **kwargs: Any) -> Any:
    return ("instead", *args)


@pytest.mark.parametrize(
    ("kind", "hook", "expected"),
    [
        (Kind.BEFORE, before, ("function", "before", 2)),
        (Kind.AFTER, after, ("after", ("function", 1, 2))),
        (Kind.AROUND, around, ("around", ("function", 1, 2))),
        (Kind.REPLACE, instead, ("instead", 1, 2)),
    ],
)
def test_installed_hooks_run_in_place_and_behind_aliases(
    registry: Any,
    targets: ModuleType,
    module: ModuleMaker,
    kind: Kind,
    hook: Any,
    expected: tuple[Any, ...],
) -> None:
    alias = module(f"from {targets.__name__} import function as renamed\n")
    patch = fitting(f"{targets.__name__}.function", "a", "b", kind=kind, hook=hook)
    assert install.install([patch]) == install.manifest([patch])
    assert targets.function(1, 2) == expected
    assert alias.renamed(1, 2) == expected


@pytest.mark.parametrize("name", ["method", "of_class", "static"])
def test_installed_hooks_run_on_methods(registry: Any, targets: ModuleType, name: str) -> None:
    first = {"method": ("self",), "of_class": ("cls",), "static": ()}[name]
    install.install([fitting(f"{targets.__name__}.Owner.{name}", *first, "a", "b")])
    assert getattr(targets.Owner(), name)(1, 2) == ("around", (name, 1, 2))


def test_a_hook_that_sglang_could_not_apply_stops_the_process(
    registry: Any, targets: ModuleType, module: ModuleMaker, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = module(
        "class Meta(type):\n"
        "    def __setattr__(cls, name, value):\n"
        "        raise TypeError('frozen')\n"
        "class Owner(metaclass=Meta):\n"
        "    def method(self, a):\n"
        "        return a\n"
    )
    patches = [
        fitting(f"{frozen.__name__}.Owner.method", "self", "a", id="frozen"),
        fitting(f"{targets.__name__}.function", "a", "b", id="good"),
    ]
    with pytest.raises(SystemExit) as stop:
        install.install(patches)
    assert "frozen" in str(stop.value) and "good" not in str(stop.value)
