"""The SGLang flags of a pool: ours where the operator chose nothing, his wherever he did."""

import json
from pathlib import Path
from typing import Any

import pytest
from vertumnus_patches import engine

from sgl_vertumnus.sglang_flags import KV_TOPIC, complete_flags, cpu_kv_tokens, kv_events
from tests.worker.configs import config_of

pytest.importorskip("sglang", reason="needs sglang")
CPU = config_of(4, (1, 2, 4))
CUDA = config_of(4, (1, 2, 4), device="cuda")
PASSED = ["--model-path", "model", "--host", "127.0.0.1"]

#: (field, what the operator writes, what SGLang then reads)
CHOICES: list[tuple[str, list[str], Any]] = [
    ("page_size", ["--page-size", "32"], 32),
    ("page_size", ["--page-size=32"], 32),
    ("page_size", ["--page-s", "32"], 32),
    ("dtype", ["--dtype", "bfloat16"], "bfloat16"),
    ("dtype", ["--dtype", "auto"], "auto"),
    ("attention_backend", ["--attention-backend", "triton"], "triton"),
    ("device", ["--device", "cpu"], "cpu"),
]


def parsed(config: Any, passed: list[str]) -> Any:
    asked = engine.parse_flags(passed)
    return engine.parse_flags(complete_flags(config, passed, engine.chosen_fields(asked)))


def test_the_pool_is_made_of_data_parallel_replicas() -> None:
    args = parsed(CPU, PASSED)
    assert (args.dp_size, args.tp_size, args.attn_cp_size) == (4, 1, 1)


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (
            CPU,
            {
                "device": "cpu",
                "attention_backend": "torch_native",
                "page_size": 16,
                "sleep_on_idle": True,
                "disable_overlap_schedule": True,
            },
        ),
        (
            CUDA,
            {
                "attention_backend": "flashinfer",
                "page_size": 64,
                "sleep_on_idle": True,
                "disable_overlap_schedule": True,  # in_hand: no step under way at a move
            },
        ),
    ],
    ids=["cpu", "cuda"],
)
def test_defaults(config: Any, defaults: dict[str, Any]) -> None:
    args = parsed(config, PASSED)
    assert {name: getattr(args, name) for name in defaults} == defaults
    assert args.dtype in ("float32", "bfloat16") if config is CPU else args.dtype == "auto"


@pytest.mark.parametrize(("field", "flags", "value"), CHOICES, ids=lambda v: str(v))
def test_the_operators_choice_counts(field: str, flags: list[str], value: Any) -> None:
    assert getattr(parsed(CPU, [*PASSED, *flags]), field) == value


def test_a_configuration_file_is_a_choice(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("page-size: 32\ndtype: bfloat16\n")
    args = parsed(CPU, [*PASSED, "--config", str(file)])
    assert (args.page_size, args.dtype) == (32, "bfloat16")
    assert args.attention_backend == "torch_native"


def test_what_the_operator_wrote_stays_as_it_was() -> None:
    passed = [*PASSED, "--random-seed", "7", "--json-model-override-args", '{"a": 1}']
    flags = complete_flags(CPU, passed)
    assert flags[: len(passed)] == passed
    assert passed == [*PASSED, "--random-seed", "7", "--json-model-override-args", '{"a": 1}']


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_kv_events_are_what_sglang_reads(host: str) -> None:
    from sglang.srt.disaggregation.kv_events import KVEventsConfig

    config = config_of(4, host=host)
    text = kv_events(config)
    events = KVEventsConfig.from_cli(text)
    assert json.loads(text)["publisher"] == events.publisher == "zmq"
    assert events.topic == KV_TOPIC
    assert events.endpoint == f"tcp://{host}:{config.ports.kv_events}"
    assert events.replay_endpoint == f"tcp://{host}:{config.ports.kv_replay}"
    assert events.buffer_steps >= 10_000
    assert events.format == "dynamo"
    assert parsed(config, PASSED).kv_events_config == text


def test_a_hostile_pool_cannot_break_out_of_the_json() -> None:
    assert json.loads(kv_events(config_of(4, host='"}, {"')))["topic"] == KV_TOPIC


def test_all_ranks_of_a_cpu_pool_together_leave_memory_free() -> None:
    free_bytes, elements = 20 * 2**30, 30 * 3 * 128
    tokens = cpu_kv_tokens(CPU, elements, free_bytes)
    assert tokens * elements * 4 * CPU.size <= free_bytes / 2
    assert tokens > 10_000
    flags = complete_flags(CPU, [], cpu_kv_tokens=tokens)
    assert flags[flags.index("--max-total-tokens") + 1] == str(tokens)


def test_the_operators_kv_capacity_wins() -> None:
    flags = complete_flags(CPU, ["--max-total-tokens", "4096"], cpu_kv_tokens=99)
    assert flags.count("--max-total-tokens") == 1 and "99" not in flags
