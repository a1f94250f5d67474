"""Settings by name, as ``--set late.ageing=0.1``: for any nested frozen dataclass."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

Config = TypeVar("Config")


def apply(config: Config, settings: Mapping[str, str]) -> Config:
    """``config`` with ``settings``; a dot leads into a part of it.

    Raises ``ValueError`` for a name that is not there or a value of another type; what the
    configuration itself raises for a value that cannot work passes through.
    """
    for name in settings:
        _check(config, name)
    applied: Config = _replaced(config, settings, "")
    return applied


def names(config: object, prefix: str = "") -> list[str]:
    """Every name that ``apply`` takes for it."""
    found: list[str] = []
    for field in fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += names(value, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def _check(config: object, name: str) -> None:
    at: Any = config
    for part in name.split("."):
        if not is_dataclass(at) or part not in {field.name for field in fields(at)}:
            raise ValueError(f"no setting {name!r}")
        at = getattr(at, part)


def _replaced(config: Any, settings: Mapping[str, str], prefix: str) -> Any:
    """All at once in each part: values that go together may not go with those that were there."""
    changes: dict[str, object] = {}
    kinds = typing.get_type_hints(type(config))
    for field in fields(config):
        name = prefix + field.name
        if name in settings:
            changes[field.name] = _parsed(kinds[field.name], settings[name], name)
        elif any(given.startswith(f"{name}.") for given in settings):
            changes[field.name] = _replaced(getattr(config, field.name), settings, f"{name}.")
    return replace(config, **changes) if changes else config


def _parsed(kind: Any, text: str, name: str) -> object:
    if isinstance(kind, types.UnionType):
        if text == "none" and type(None) in kind.__args__:
            return None
        (kind,) = (one for one in kind.__args__ if one is not type(None))
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        if kind in (int, float, str):
            return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name}={text}: not a value of type {kind.__name__}") from None
    raise ValueError(f"{name} is no single value: set its parts")
