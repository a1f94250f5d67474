"""The SGLang flags that a pool adds to the operator's."""

import json
from collections.abc import Collection, Sequence

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.cpu_dtype import faster_dtype

KV_TOPIC = "kv-events"
#: Batches of KV events that a rank keeps for routers that join late or missed some. One holds the
#: tokens of a step's new blocks, 3.5 bytes each: many are memory that only seems to leak.
REPLAY_BATCHES = 10_000


#: Share of a machine's free memory that the KV caches of a CPU pool may fill together. SGLang
#: sizes each rank's as if it had the machine to itself.
CPU_KV_SHARE = 0.4
_LARGEST_ELEMENT_BYTES = 4


def complete_flags(
    config: PoolConfig,
    passed: Sequence[str],
    chosen: Collection[str] = (),
    *,
    cpu_kv_tokens: int | None = None,
) -> list[str]:
    """``passed`` plus what makes it a pool; defaults only where the operator chose nothing.

    ``chosen`` names the fields of SGLang's record that differ from its defaults: the operator
    may have set them by a configuration file or an abbreviated flag. ``cpu_kv_tokens`` is the
    default KV capacity of a rank of a CPU pool; None leaves it to SGLang.
    """
    flags = [*passed]
    flags += ["--dp-size", str(config.size), "--kv-events-config", kv_events(config)]
    for flag, *value in _defaults(config, cpu_kv_tokens):
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
            # Hashes that depend on a request's extra key and salt: tenants do not share blocks.
            "format": "dynamo",
        }
    )


def cpu_kv_tokens(config: PoolConfig, elements_per_token: int, free_bytes: int) -> int:
    """KV tokens per rank that keep all ranks within ``CPU_KV_SHARE`` of ``free_bytes``."""
    rank_bytes = free_bytes * CPU_KV_SHARE / config.size
    return int(rank_bytes / (elements_per_token * _LARGEST_ELEMENT_BYTES))


def _defaults(config: PoolConfig, cpu_kv_tokens: int | None) -> list[tuple[str, ...]]:
    defaults: list[tuple[str, ...]] = [
        ("--sleep-on-idle",),
        # A rank changes its block between two steps (vertumnus_patches/in_hand.py). The overlap
        # schedule has one under way, whose result is not there, whenever a command is read.
        ("--disable-overlap-schedule",),
        # Evicts by priority, then by age: how surplus copies of a block's ranks go first.
        ("--radix-eviction-policy", "priority"),
    ]
    if config.device == "cpu":
        defaults += [
            ("--device", "cpu"),
            ("--attention-backend", "torch_native"),
            ("--page-size", "16"),
            ("--dtype", faster_dtype()),
        ]
        if cpu_kv_tokens is not None:
            defaults.append(("--max-total-tokens", str(cpu_kv_tokens)))
    else:
        defaults += [("--attention-backend", "flashinfer"), ("--page-size", "64")]
    return defaults


def _given(flags: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in flags)
