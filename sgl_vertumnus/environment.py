"""The only module that reads or writes environment variables."""

import os
from collections.abc import Mapping

import msgspec

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.errors import ConfigurationError

POOL_VARIABLE = "VERTUMNUS_POOL"


def pool_config() -> PoolConfig | None:
    """The pool this process belongs to; None in an ordinary SGLang process."""
    text = os.environ.get(POOL_VARIABLE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=PoolConfig)
    except msgspec.MsgspecError as exc:
        raise ConfigurationError(
            f"{POOL_VARIABLE} is set by launch_server and not meant to be written by hand: {exc}"
        ) from exc


def publish_pool_config(config: PoolConfig) -> None:
    """Hand the configuration to this process's future children."""
    os.environ[POOL_VARIABLE] = msgspec.json.encode(config).decode()


def hide_gpus() -> None:
    """From this process and its future children, whatever the machine's default is."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set variables that the operator has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
