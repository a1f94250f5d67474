"""What a pool refuses at start: every flag and model, with its reason, all at once."""

import argparse
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
from vertumnus_patches import engine
from vertumnus_patches.engine import ModelFacts

from sgl_vertumnus.errors import UnsupportedFeature
from sgl_vertumnus.preflight import (
    CP_BACKENDS,
    REFUSALS,
    UNPROVEN_BACKENDS,
    Refusal,
    check_flags,
    check_model,
)

pytest.importorskip("sglang", reason="needs sglang")

each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)


@pytest.fixture(scope="module")
def defaults() -> Any:
    return engine.parse_flags(["--model-path", "model"])


@pytest.fixture(scope="module")
def options() -> dict[str, argparse.Action]:
    """SGLang's command-line options by name."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {name: action for action in parser._actions for name in action.option_strings}


def changed(defaults: Any, **fields: Any) -> Any:
    values = {name: getattr(defaults, name) for name in type(defaults).__struct_fields__}
    return SimpleNamespace(**values | fields)


def forbidden(refusal: Refusal, options: dict[str, argparse.Action]) -> list[Any]:
    """Values of the flag that must be refused; every choice that is not allowed, if it has any."""
    action = options[refusal.flag]
    if isinstance(action, argparse._StoreTrueAction):
        return [True]
    if action.choices is not None:
        return [choice for choice in action.choices if choice not in refusal.allowed]
    return [2] if refusal.allowed == (1,) or 1 in refusal.allowed else ["something"]


# -- flags ----------------------------------------------------------------------------------------


def test_what_sglang_does_by_default_is_accepted(defaults: Any) -> None:
    check_flags(defaults)


@each_refusal
def test_a_refused_field_exists_and_its_default_is_allowed(refusal: Refusal, defaults: Any) -> None:
    assert refusal.field in type(defaults).__struct_fields__, "upstream renamed it"
    assert getattr(defaults, refusal.field) in refusal.allowed


@each_refusal
def test_a_refused_flag_is_the_operators_name_for_it(
    refusal: Refusal, options: dict[str, argparse.Action]
) -> None:
    assert options[refusal.flag].dest == refusal.field


@each_refusal
def test_every_other_value_is_refused_with_the_reason(
    refusal: Refusal, defaults: Any, options: dict[str, argparse.Action]
) -> None:
    values = forbidden(refusal, options)
    assert values
    for value in values:
        with pytest.raises(UnsupportedFeature) as refused:
            check_flags(changed(defaults, **{refusal.field: value}))
        (reason,) = refused.value.reasons
        shown = "" if value is True or refusal.is_secret else f" {value}"
        assert reason == f"{refusal.flag}{shown}: {refusal.reason}"


@each_refusal
def test_allowed_values_are_allowed(refusal: Refusal, defaults: Any) -> None:
    for value in refusal.allowed:
        check_flags(changed(defaults, **{refusal.field: value}))


def test_everything_is_refused_at_once(defaults: Any, options: dict[str, argparse.Action]) -> None:
    wrong = {refusal.field: forbidden(refusal, options)[0] for refusal in REFUSALS}
    with pytest.raises(UnsupportedFeature) as refused:
        check_flags(changed(defaults, **wrong))
    assert len(refused.value.reasons) == len(REFUSALS)
    for refusal in REFUSALS:
        assert f"  - {refusal.flag}" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tp", "2"], ["--tp-size 2"]),
        (["--pp-size", "2", "--enable-hierarchical-cache"], ["--pp-size 2", "--enable-hier"]),
        (["--speculative-algorithm", "EAGLE"], ["--speculative-algorithm EAGLE"]),
        (["--disaggregation-mode", "decode"], ["--disaggregation-mode decode"]),
        (
            ["--disaggregation-mode", "prefill", "--optimistic-prefill-attempts", "1"],
            ["--optimistic-prefill-attempts 1"],
        ),
        (["--dp", "4", "--attn-cp-size", "2"], ["--dp-size 4", "--attn-cp-size 2"]),
        (["--disable-radix-cache"], ["--disable-radix-cache"]),
        (["--load-balance-method", "total_tokens"], ["--load-balance-method total_tokens"]),
        (["--schedule-policy", "random"], ["--schedule-policy random"]),
        # Longest cached prefix first: merged ranks hold different ones.
        (["--schedule-policy", "lpm"], ["--schedule-policy lpm"]),
        (["--is-embedding"], ["--is-embedding"]),
        (["--api-key", "k"], ["--api-key"]),
        (["--ssl-certfile", "c", "--ssl-keyfile", "k"], ["--ssl-certfile c"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_as_written_on_a_command_line(flags: list[str], named: list[str]) -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        check_flags(engine.parse_flags(["--model-path", "model", *flags]))
    assert len(refused.value.reasons) == len(named)
    assert all(name in str(refused.value) for name in named)


def test_a_key_is_not_repeated() -> None:
    """Refusals are printed, and a terminal's output is kept in logs."""
    with pytest.raises(UnsupportedFeature) as refused:
        check_flags(engine.parse_flags(["--model-path", "model", "--api-key", "opensesame"]))
    assert "--api-key" in str(refused.value) and "opensesame" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--page-size", "32"],
        ["--admin-api-key", "opensesame"],
        ["--chunked-prefill-size", "512", "--max-total-tokens", "4096"],
        ["--schedule-policy", "lof"],
        ["--elastic-ep-backend", "none"],
        ["--enable-metrics", "--log-level", "warning"],
        ["--disable-overlap-schedule", "--dtype", "bfloat16"],
    ],
    ids=" ".join,
)
def test_ordinary_flags_pass(flags: list[str]) -> None:
    check_flags(engine.parse_flags(["--model-path", "model", *flags]))


# -- models ---------------------------------------------------------------------------------------

PLAIN = ModelFacts(
    name="LlamaForCausalLM",
    attention="MHA",
    sliding_window_tokens=None,
    is_hybrid=False,
    is_multimodal=False,
    is_encoder_decoder=False,
    is_generation=True,
    has_attention_sinks=False,
    context_tokens=8192,
    kv_elements_per_token=1024,
)
REFUSED_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"attention": "MLA"}, "MLA"),
    ({"attention": "SSM"}, "state-space"),
    ({"is_hybrid": True}, "state-space"),
    ({"sliding_window_tokens": 4096}, "sliding-window"),
    ({"has_attention_sinks": True}, "attention sinks"),
    ({"is_multimodal": True}, "image and audio"),
    ({"is_encoder_decoder": True}, "cross attention"),
    ({"is_generation": False}, "generation only"),
]


def refusal_of(model: ModelFacts, device: str = "cpu", backend: str = "torch_native") -> list[str]:
    try:
        check_model(model, device=device, attention_backend=backend)
    except UnsupportedFeature as refused:
        return refused.reasons
    return []


@pytest.mark.parametrize(
    ("device", "backend"), [(d, b) for d, backends in CP_BACKENDS.items() for b in backends]
)
def test_a_plain_model_is_accepted_on_every_proven_backend(device: str, backend: str) -> None:
    assert refusal_of(PLAIN, device, backend) == []


@pytest.mark.parametrize(("facts", "reason"), REFUSED_MODELS, ids=lambda v: str(v))
def test_a_model_without_proven_cp_is_refused(facts: dict[str, Any], reason: str) -> None:
    (why,) = refusal_of(dataclasses.replace(PLAIN, **facts))
    assert why.startswith("LlamaForCausalLM: ") and reason in why


@pytest.mark.parametrize("window", [None, 0])
def test_a_window_that_is_off_is_no_window(window: int | None) -> None:
    assert refusal_of(dataclasses.replace(PLAIN, sliding_window_tokens=window)) == []


@pytest.mark.parametrize(
    ("device", "backend", "reason"),
    [
        ("cpu", "triton", "--attention-backend triton: .* use torch_native"),
        ("cpu", "intel_amx", "use torch_native"),
        ("cuda", "fa3", "--device cuda: pools are proven on cpu only.*--allow-unproven-gpu"),
        ("npu", "ascend", "--device npu: pools are proven on cpu only"),
    ],
)
def test_a_backend_without_cp_is_refused(device: str, backend: str, reason: str) -> None:
    (why,) = refusal_of(PLAIN, device, backend)
    assert re.search(reason, why)


@pytest.mark.parametrize("backend", UNPROVEN_BACKENDS["cuda"])
def test_a_gpu_is_tried_only_if_the_operator_says_so(backend: str) -> None:
    check_model(PLAIN, device="cuda", attention_backend=backend, allow_unproven_gpu=True)
    assert refusal_of(PLAIN, "cuda", backend)


@pytest.mark.parametrize(
    ("device", "backend", "reason"),
    [
        ("cuda", "triton", "--attention-backend triton: .* use flashinfer or fa3 or fa4"),
        ("npu", "ascend", "--device npu: pools are proven on cpu only so far; run .* cpu$"),
        ("cpu", "flashinfer", "no context-parallel prefill on cpu; use torch_native"),
    ],
)
def test_what_has_no_cp_is_not_tried(device: str, backend: str, reason: str) -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        check_model(PLAIN, device=device, attention_backend=backend, allow_unproven_gpu=True)
    (why,) = refused.value.reasons
    assert re.search(reason, why)


def test_every_reason_of_a_model_is_named_at_once() -> None:
    everything: dict[str, Any] = {}
    for facts, _ in REFUSED_MODELS:
        everything |= facts
    reasons = refusal_of(dataclasses.replace(PLAIN, **everything), backend="triton")
    texts = [text for facts, text in REFUSED_MODELS if facts != {"attention": "MLA"}]
    assert all(any(text in reason for reason in reasons) for text in texts)
    assert any("--attention-backend" in reason for reason in reasons)


def test_a_model_that_is_refused_says_what_the_facts_are_of(random_model_path: str) -> None:
    """Facts of a real checkpoint, read through SGLang."""
    facts = engine.model_facts(
        engine.parse_flags(["--model-path", random_model_path, "--device", "cpu"])
    )
    assert refusal_of(facts) == []
    assert (facts.name, facts.attention) == ("LlamaForCausalLM", "MHA")
    # layers x (K and V) x KV heads x head width of the fixture's specification
    assert facts.kv_elements_per_token == 4 * 2 * 2 * 64
