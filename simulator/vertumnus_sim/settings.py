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
    for name, text in settings.items():
        config = _replaced(config, name.split("."), text, name)
    return config


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


def _replaced(config: Any, path: list[str], text: str, name: str) -> Any:
    first, *rest = path
    if not is_dataclass(config) or first not in {field.name for field in fields(config)}:
        raise ValueError(f"no setting {name!r}")
    at = getattr(config, first)
    if rest:
        return replace(config, **{first: _replaced(at, rest, text, name)})  # type: ignore[type-var]
    kind = typing.get_type_hints(type(config))[first]
    return replace(config, **{first: _parsed(kind, text, name)})  # type: ignore[type-var]


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
