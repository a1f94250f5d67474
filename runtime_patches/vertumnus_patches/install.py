"""Check every patch against the installed SGLang, apply all of them, prove they are live.

The order matters: nothing is changed before everything has been checked, and a process whose
patches are not all live stops with every reason at once. SGLang's own plugin loader only logs
such failures and then serves unpatched.
"""

import hashlib
import inspect
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from vertumnus_patches import SGLANG_VERSION
from vertumnus_patches.record import Kind, Patch, source_fingerprint

logger = logging.getLogger(__name__)


def manifest(patches: Sequence[Patch]) -> str:
    """Digest of the patch set as written: ids, targets, kinds and our hooks' source.

    Needs no SGLang, so a router can compute what it expects its ranks to report.
    """
    digest = hashlib.sha256(SGLANG_VERSION.encode())
    for patch in sorted(patches, key=lambda patch: patch.id):
        line = f"{patch.id} {patch.target} {patch.kind.value} {patch.source_digest}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def install(patches: Sequence[Patch]) -> str:
    """Apply ``patches`` in this process and return their manifest.

    Raises:
        SystemExit: listing every patch that cannot be or was not applied.
    """
    problems = list(_version_problems())
    originals: dict[str, Callable[..., Any]] = {}
    for patch in patches:
        try:
            originals[patch.target] = resolve(patch)
        except PatchError as exc:
            problems.append(f"{patch.id}: {exc}")
            continue
        if (drift := _drift(patch, originals[patch.target])) is None:
            continue
        if patch.kind is Kind.REPLACE:
            problems.append(f"{patch.id}: {drift}")
        else:
            logger.warning("patch %s: %s", patch.id, drift)
    _stop_on(problems)
    _register(patches)
    _stop_on(_not_live(patches, originals))
    return manifest(patches)


class PatchError(Exception):
    """Why a patch does not fit the installed SGLang."""


class Target(Protocol):
    """A function as somebody expects it to be; a ``Patch`` is one."""

    @property
    def target(self) -> str: ...

    @property
    def signature(self) -> tuple[str, ...]: ...


def resolve(patch: Target) -> Callable[..., Any]:
    """The function that ``patch`` targets, as defined by its own owner.

    Raises:
        PatchError: when it is missing, inherited, a property, async, or has other parameters.
    """
    owner_path, _, name = patch.target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
    except (ImportError, AttributeError) as exc:
        raise PatchError(f"{owner_path} does not exist ({exc})") from exc
    except Exception as exc:
        raise PatchError(f"{owner_path} cannot be imported ({exc!r})") from exc
    raw = vars(owner).get(name)
    if raw is None:
        inherited = " (it is inherited)" if hasattr(owner, name) else ""
        raise PatchError(f"{owner_path} has no {name} of its own{inherited}")
    if isinstance(raw, (classmethod, staticmethod)):
        raw = raw.__func__
    if not isinstance(raw, types.FunctionType):
        raise PatchError(f"{patch.target} is a {type(raw).__name__}, not a plain function")
    if inspect.iscoroutinefunction(raw) or inspect.isasyncgenfunction(raw):
        raise PatchError(f"{patch.target} is async; a hook would hide that from its callers")
    found = tuple(inspect.signature(raw).parameters)
    if found != patch.signature:
        raise PatchError(
            f"{patch.target} takes ({', '.join(found)}), "
            f"the patch expects ({', '.join(patch.signature)})"
        )
    return raw


def _version_problems() -> Iterator[str]:
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        yield f"sglang is not installed; install sglang=={SGLANG_VERSION}"
        return
    if installed != SGLANG_VERSION:
        yield (
            f"sglang {installed} is installed, the patches are proven on {SGLANG_VERSION}; "
            f"install sglang=={SGLANG_VERSION}"
        )


def _drift(patch: Patch, original: Callable[..., Any]) -> str | None:
    found = source_fingerprint(original)
    if found == patch.fingerprint:
        return None
    return (
        f"the source of {patch.target} is {found}, the patch was written against "
        f"{patch.fingerprint}: review it, then update the fingerprint"
    )


def _register(patches: Sequence[Patch]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for patch in patches:
        HookRegistry.register(patch.target, patch.hook, HookType(patch.kind.value))
    HookRegistry.apply_hooks()


def _not_live(patches: Sequence[Patch], originals: dict[str, Callable[..., Any]]) -> list[str]:
    problems = []
    for patch in patches:
        owner_path, _, name = patch.target.rpartition(".")
        live = inspect.getattr_static(pkgutil.resolve_name(owner_path), name)
        if isinstance(live, (classmethod, staticmethod)):
            live = live.__func__
        if not _calls(live, patch.hook):
            problems.append(f"{patch.id}: {patch.target} was not replaced")
        problems.extend(
            f"{patch.id}: {alias} still is the original {patch.target}"
            for alias in _aliases(originals[patch.target])
        )
    return problems


def _calls(live: Callable[..., Any], hook: Callable[..., Any]) -> bool:
    """Whether the chain of wrappers that ``live`` starts runs ``hook``."""
    link: Any = live
    while link is not None:
        cells = getattr(link, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        link = getattr(link, "__wrapped__", None)
    return False


def _aliases(original: Callable[..., Any]) -> Iterator[str]:
    """Module attributes that still name the unpatched function."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                yield f"{module.__name__}.{name}"


def _stop_on(problems: list[str]) -> None:
    if not problems:
        return
    raise SystemExit(
        "sgl-vertumnus cannot run on this SGLang:\n" + "\n".join(f"  - {p}" for p in problems)
    )
