"""What a pool refuses at start, with the reason. Checked before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_vertumnus.errors import UnsupportedFeature

if TYPE_CHECKING:  # what is refused can be told where no SGLang is installed
    from vertumnus_patches.engine import ModelFacts


@dataclass(frozen=True, slots=True)
class Refusal:
    """A flag of SGLang that does not work in a pool.

    ``allowed`` holds the values that do; everything else is refused with ``reason``.
    """

    field: str
    allowed: tuple[Any, ...]
    reason: str
    #: Whether its value must stay out of terminals and logs.
    is_secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


_OFF = (None, False)
_TOPOLOGY = "the pool lays out its ranks itself, with --pool-size and --cp-degrees"
_UNPROVEN = "it keeps state per rank that is not proven to survive a change of the CP degree"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("tp_size", (1,), "a rank is one full copy of the model; tensor parallel is not"),
    Refusal("pp_size", (1,), "a rank is one full copy of the model; a pipeline stage is not"),
    Refusal("dp_size", (1,), _TOPOLOGY),
    Refusal("attn_dp_size", (1, None), _TOPOLOGY),
    Refusal("attn_cp_size", (1,), _TOPOLOGY),
    Refusal("enable_prefill_cp", _OFF, _TOPOLOGY),
    Refusal("dcp_size", (1,), "decode context parallel shards KV that every rank must hold"),
    Refusal("ep_size", (1,), "experts are replicated on each rank"),
    Refusal("moe_dp_size", (1,), "experts are replicated on each rank"),
    Refusal("enable_dp_attention", _OFF, _TOPOLOGY),
    Refusal("enable_eplb", _OFF, "experts are replicated on each rank"),
    Refusal("elastic_ep_backend", (None, "none"), "experts are replicated on each rank"),
    Refusal("nnodes", (1,), "a pool is one node; start one pool per node behind one router"),
    Refusal("use_ray", _OFF, "ranks share a rendezvous with the process that launched them"),
    Refusal(
        "disaggregation_mode",
        ("null", "prefill"),
        "decode servers are plain SGLang: start them with sglang serve and name them to the "
        "router with --decode",
    ),
    Refusal("enable_pd_role_switch", _OFF, "a pool that prefills does not become another"),
    Refusal(
        "optimistic_prefill_attempts",
        (0,),
        "ranks of a block that serve apart do not know of each other's handshakes",
    ),
    Refusal(
        "disaggregation_decode_allocation_policy",
        ("early",),
        "KV is sent while it is computed, to where decode has said",
    ),
    Refusal("disaggregation_enable_kv_checksum", _OFF, "the home of a request alone sends it"),
    Refusal("enable_pdmux", _OFF, "its split streams bypass the CP prefill path"),
    Refusal("encoder_only", _OFF, "a pool serves text models"),
    Refusal("language_only", _OFF, "a pool serves text models"),
    Refusal("enable_hierarchical_cache", _OFF, f"HiCache: {_UNPROVEN}"),
    Refusal("enable_lmcache", _OFF, _UNPROVEN),
    Refusal("enable_flexkv", _OFF, _UNPROVEN),
    Refusal("enable_hisparse", _OFF, _UNPROVEN),
    Refusal("enable_unified_cache_external_linker", _OFF, _UNPROVEN),
    Refusal("enable_session_radix_cache", _OFF, _UNPROVEN),
    Refusal("enable_streaming_session", _OFF, _UNPROVEN),
    Refusal("disable_radix_cache", _OFF, "placement and reuse of prefixes need the radix cache"),
    Refusal(
        "speculative_algorithm",
        (None,),
        "speculative decoding: its draft state is not mirrored inside a block of ranks",
    ),
    Refusal("enable_lora", _OFF, "adapters are loaded per rank and not mirrored"),
    Refusal("lora_paths", (None,), "adapters are loaded per rank and not mirrored"),
    Refusal("enable_mixed_chunk", _OFF, "a batch of decodes and prefills is not sharded"),
    Refusal("dllm_algorithm", (None,), "block diffusion does not use the CP prefill path"),
    Refusal("enable_two_batch_overlap", _OFF, "it splits a batch that CP has already split"),
    Refusal("enable_single_batch_overlap", _OFF, "it reorders a batch that CP has split"),
    Refusal(
        "enable_prefill_delayer",
        _OFF,
        "it decides by the clock of each rank; the ranks of a block must decide alike",
    ),
    Refusal(
        "min_free_slots_delay",
        (None,),
        "it decides by the state of each rank; the ranks of a block must decide alike",
    ),
    Refusal("scheduler_recv_interval", (1,), "the ranks of a block exchange requests every step"),
    Refusal(
        "load_balance_method",
        ("auto", "round_robin"),
        "it hands requests to ranks that do not lead a worker; the router balances the load",
    ),
    Refusal(
        "schedule_policy",
        ("fcfs", "lof", "priority", "routing-key"),
        "it orders requests by chance or by what a rank has cached; the ranks of a block must "
        "decide alike, and hold different prefixes once they have served apart",
    ),
    Refusal(
        "enable_priority_scheduling",
        _OFF,
        "preempted requests are queued again in an order of each rank's own; the router has "
        "priorities",
    ),
    Refusal("cp_strategy", (None, "zigzag"), "ranks of a block share a prefill in zigzag order"),
    Refusal("tokenizer_worker_num", (1,), "the pool has one front process"),
    Refusal("skip_tokenizer_init", _OFF, "the front warms its workers with text"),
    Refusal(
        "api_key",
        (None,),
        "clients show their keys to the router; keep the pool on loopback or a private network "
        "(--admin-api-key works)",
        is_secret=True,
    ),
    Refusal("ssl_certfile", (None,), "the pool activates its composition over plain HTTP"),
    Refusal("skip_server_warmup", _OFF, "the pool takes its composition while it warms up"),
    Refusal("is_embedding", _OFF, "CP prefill is proven for generation only"),
    Refusal("smg_grpc_mode", _OFF, "the pool is controlled through its HTTP front"),
    Refusal("grpc_mode", _OFF, "the pool is controlled through its HTTP front"),
    Refusal("enable_http2", _OFF, "the pool is controlled through its HTTP/1.1 front"),
    Refusal("enable_memory_saver", _OFF, "released weights would break ranks that share a step"),
    Refusal("enable_symm_mem", _OFF, "the groups of a pool do not register symmetric memory"),
    Refusal("base_gpu_id", (0,), "name the devices of the pool in CUDA_VISIBLE_DEVICES"),
    Refusal("gpu_id_step", (1,), "name the devices of the pool in CUDA_VISIBLE_DEVICES"),
    Refusal("kv_events_config", (None,), "the pool publishes KV events on ports of its own"),
)

#: Attention backends whose CP prefill has been proven in a pool, by device.
CP_BACKENDS: dict[str, tuple[str, ...]] = {"cpu": ("torch_native",)}
#: Those that have CP prefill, ours or upstream's, and have not run in a pool.
UNPROVEN_BACKENDS: dict[str, tuple[str, ...]] = {"cuda": ("flashinfer", "fa3", "fa4")}


def check_flags(server_args: Any) -> None:
    """Refuse what the command line asks for and a pool cannot do.

    ``server_args`` is SGLang's parsed, unresolved record.

    Raises:
        UnsupportedFeature: naming every flag at once.
    """
    reasons = [
        f"{refusal.flag}{_shown(refusal, getattr(server_args, refusal.field))}: {refusal.reason}"
        for refusal in REFUSALS
        if getattr(server_args, refusal.field) not in refusal.allowed
    ]
    if reasons:
        raise UnsupportedFeature(reasons)


@dataclass(frozen=True, slots=True)
class ModelRefusal:
    """A property of models that CP prefill of a pool does not cover."""

    feature: str
    applies: Callable[[ModelFacts], bool]
    reason: str


MODEL_REFUSALS: tuple[ModelRefusal, ...] = (
    ModelRefusal(
        "MLA",
        lambda m: m.attention == "MLA",
        "MLA attention keeps a latent KV cache; CP of a pool covers "
        "multi-head and grouped-query attention",
    ),
    ModelRefusal(
        "linear attention, state-space layers",
        lambda m: m.attention == "SSM" or m.is_hybrid,
        "state-space and linear-attention layers carry a state that zigzag CP cannot split",
    ),
    ModelRefusal(
        "sliding window",
        lambda m: bool(m.sliding_window_tokens),
        "sliding-window attention is not covered by zigzag CP of a pool",
    ),
    ModelRefusal(
        "attention sinks",
        lambda m: m.has_attention_sinks,
        "attention sinks are not covered by zigzag CP of a pool",
    ),
    ModelRefusal(
        "multimodal",
        lambda m: m.is_multimodal,
        "image and audio inputs are not mirrored inside a block of ranks",
    ),
    ModelRefusal(
        "encoder and decoder",
        lambda m: m.is_encoder_decoder,
        "cross attention is not covered by zigzag CP of a pool",
    ),
    ModelRefusal(
        "embedding, reward, classification",
        lambda m: not m.is_generation,
        "CP prefill is proven for generation only",
    ),
)


def check_model(
    model: ModelFacts, *, device: str, attention_backend: str, allow_unproven_gpu: bool = False
) -> None:
    """Refuse a model or backend without a CP prefill path that is proven, or allowed to be tried.

    Raises:
        UnsupportedFeature: naming every reason.
    """
    reasons = [f"{model.name}: {each.reason}" for each in MODEL_REFUSALS if each.applies(model)]
    reasons.extend(_backend_reasons(device, attention_backend, allow_unproven_gpu))
    if reasons:
        raise UnsupportedFeature(reasons)


def _backend_reasons(device: str, backend: str, allow_unproven_gpu: bool) -> Iterator[str]:
    proven = CP_BACKENDS.get(device, ())
    unproven = UNPROVEN_BACKENDS.get(device, ())
    supported = (*proven, *(unproven if allow_unproven_gpu else ()))
    if supported and backend not in supported:
        yield (
            f"--attention-backend {backend}: it has no context-parallel prefill on {device}; "
            f"use {' or '.join(supported)}"
        )
    elif not supported:
        remedy = "run this one with --device cpu"
        if unproven:
            remedy += ", or try it with --allow-unproven-gpu (docs/support-matrix.md)"
        yield (
            f"--device {device}: pools are proven on {' and '.join(CP_BACKENDS)} only so far; "
            f"{remedy}"
        )


def _shown(refusal: Refusal, value: Any) -> str:
    return "" if value is True or refusal.is_secret else f" {value}"
