"""The only module that reads or writes environment variables."""

import os
from collections.abc import Mapping

import msgspec

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.errors import ConfigurationError

POOL_VARIABLE = "VERTUMNUS_POOL"
CHAOS_VARIABLE = "VERTUMNUS_CHAOS"
TRANSPORT_VARIABLE = "VERTUMNUS_KV_TRANSPORT"
_SECRET_VARIABLE = "VERTUMNUS_SECRET"


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


def chaos_specification() -> str:
    """The faults that a test wants of this pool; none unless it says so."""
    return os.environ.get(CHAOS_VARIABLE, "")


def publish_pool_config(config: PoolConfig) -> None:
    """Hand the configuration to this process's future children."""
    os.environ[POOL_VARIABLE] = msgspec.json.encode(config).decode()


def publish_pool_secret(secret: str) -> None:
    """Hand what lets ranks copy from each other to this process and its future children; only the
    user who runs them can read it there."""
    os.environ[_SECRET_VARIABLE] = secret


def pool_secret() -> str:
    """What ``publish_pool_secret`` has handed over. Raises ``ConfigurationError`` without it."""
    secret = os.environ.get(_SECRET_VARIABLE)
    if not secret:
        raise ConfigurationError(f"{_SECRET_VARIABLE} is set by launch_server and missing here")
    return secret


def forces_mooncake() -> bool:
    """Whether ranks copy prefixes by Mooncake on one machine, too."""
    asked = os.environ.get(TRANSPORT_VARIABLE, "auto")
    if asked not in ("auto", "mooncake"):
        raise ConfigurationError(f"{TRANSPORT_VARIABLE}={asked}: auto or mooncake")
    return asked == "mooncake"


def kubernetes_api() -> tuple[str, str] | None:
    """Host and port of the API server, as Kubernetes tells every pod; None elsewhere."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    return (host, os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")) if host else None


def hide_gpus() -> None:
    """From this process and its future children, whatever the machine's default is."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES; None: all of them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def check_collectives_end() -> None:
    """A rank whose collective has failed or timed out must end: that is how its block fails.

    Raises:
        ConfigurationError: when the environment tells torch to let it live.
    """
    # torch also reads the older name, where the newer one is not set.
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    name, chosen = next(((n, os.environ[n]) for n in names if n in os.environ), (names[0], None))
    if chosen not in (None, "1", "3"):
        raise ConfigurationError(
            f"{name}={chosen} lets a rank live on behind a collective that has failed, and its "
            f"block hang; unset it"
        )


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set variables that the operator has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
