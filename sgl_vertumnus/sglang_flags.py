"""The SGLang flags that a pool adds to the operator's."""

import json
from collections.abc import Collection, Sequence

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.cpu_dtype import faster_dtype

KV_TOPIC = "kv-events"
#: Batches kept for routers that join late or missed some; about 100 bytes and up each.
REPLAY_BATCHES = 100_000


def complete_flags(
    config: PoolConfig, passed: Sequence[str], chosen: Collection[str] = ()
) -> list[str]:
    """``passed`` plus what makes it a pool; defaults only where the operator chose nothing.

    ``chosen`` names the fields of SGLang's record that differ from its defaults: the operator
    may have set them by a configuration file or an abbreviated flag.
    """
    flags = [*passed]
    flags += ["--dp-size", str(config.size), "--kv-events-config", kv_events(config)]
    for flag, *value in _defaults(config):
        field = flag.removeprefix("--").replace("-", "_")
        if field not in chosen and not _given(passed, flag):
            flags += [flag, *value]
    return flags


def kv_events(config: PoolConfig) -> str:
    """SGLang's ``--kv-events-config``: rank r publishes and replays on base + r."""
    host = config.host
    return json.dumps(
        {
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{config.ports.kv_events}",
            "replay_endpoint": f"tcp://{host}:{config.ports.kv_replay}",
            "topic": KV_TOPIC,
            "buffer_steps": REPLAY_BATCHES,
            "bind": True,
        }
    )


def _defaults(config: PoolConfig) -> list[tuple[str, ...]]:
    defaults: list[tuple[str, ...]] = [("--sleep-on-idle",)]
    if config.device == "cpu":
        defaults += [
            ("--device", "cpu"),
            ("--attention-backend", "torch_native"),
            ("--page-size", "16"),
            ("--dtype", faster_dtype()),
            # There is no second engine to overlap with on a CPU.
            ("--disable-overlap-schedule",),
        ]
    else:
        defaults.append(("--page-size", "64"))
    return defaults


def _given(flags: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in flags)
