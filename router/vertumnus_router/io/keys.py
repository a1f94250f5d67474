"""API keys: how clients say who they are, and how a presented key is recognised."""

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vertumnus_router.core.config import ConfigError

#: Names are labels of metrics: few, short, and fit to be printed anywhere.
MOST_KEYS = 1000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")
#: What the router calls those who present no API key.
RESERVED_NAMES = frozenset(("anonymous", "operator"))
_NAME_RULE = (
    "a name has up to 64 letters, digits, '_', '.' or '-', and is neither anonymous nor operator"
)
_KEY_RULE = "a key has 8 to 512 printable ASCII characters and no spaces"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The key is in no representation of it. ``ConfigError`` if it cannot be one."""

    name: str
    key: str = field(repr=False)

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None or self.name in RESERVED_NAMES:
            raise ConfigError(f"API key {self.name!r}: {_NAME_RULE}")
        if _KEY.fullmatch(self.key) is None:
            raise ConfigError(f"API key {self.name}: {_KEY_RULE}")


def read_api_keys(path: Path) -> list[ApiKey]:
    """The keys of a file, one ``name:key`` a line; empty lines and those with ``#`` in front do
    not count. ``ConfigError`` names the line, never what is in it."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the API keys in {path} cannot be read: {exc}") from exc
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = line.strip().partition(":")
        try:
            found.append(ApiKey(name.strip(), key.strip()))
        except ConfigError:
            # Not in the words of that error: a key may stand where the name belongs.
            raise ConfigError(
                f"{path}, line {number}: a line has the form name:key, {_NAME_RULE}; {_KEY_RULE}"
            ) from None
    return found


def check_api_keys(keys: Iterable[ApiKey], control_key: str | None) -> None:
    """``ConfigError`` unless every key is one client's, and none is the operators'."""
    by_key: dict[str, str] = {}
    names: set[str] = set()
    for one in keys:
        if one.key == control_key:
            raise ConfigError(f"API key {one.name} is the control key: operators need their own")
        if one.key in by_key:
            raise ConfigError(f"API keys {by_key[one.key]} and {one.name} are the same")
        if one.name in names:
            raise ConfigError(f"two API keys have the name {one.name}")
        by_key[one.key] = one.name
        names.add(one.name)
    if len(names) > MOST_KEYS:
        raise ConfigError(f"{len(names)} API keys: at most {MOST_KEYS}, each is a label of metrics")


class Keyring:
    """Whose key it is.

    What is looked up is a digest under a secret of this process, so that the time it takes says
    nothing about the keys; and the same for each of any number of them.
    """

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        """``keys``: names and keys."""
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(key.encode()): name for name, key in keys}

    def owner(self, presented: bytes) -> str | None:
        """The name that the key belongs to, None for an unknown one."""
        return self._names.get(self._digest(presented))

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")
