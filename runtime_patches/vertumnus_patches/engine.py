"""What the worker runtime may ask of a live SGLang process.

Everything here reads or writes SGLang internals; the runtime itself names none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vertumnus_patches.cp_group import CpGroup
from vertumnus_patches.transfers import is_prefill_side

__all__ = [
    "FinishedPrefill",
    "FrontState",
    "Load",
    "ModelFacts",
    "admin_endpoint",
    "apply_geometry",
    "await_message",
    "chosen_fields",
    "data_parallel_rank",
    "expect_control_answers",
    "front_state",
    "hidden_size",
    "http_app",
    "is_extend",
    "load_of",
    "load_plugins",
    "model_facts",
    "no_prefill",
    "parse_flags",
    "prefilled",
    "prefilling",
    "preload",
    "resolved_attention_backends",
    "serve_http",
    "unpaired_fields",
]


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's load. Tokens count allocated KV slots, cached prefixes included."""

    running_requests: int
    waiting_requests: int
    kv_used_tokens: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedPrefill:
    """A request whose first token exists."""

    rid: str
    input_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What matters of a model before it is loaded, read from its configuration."""

    name: str
    attention: str
    sliding_window_tokens: int | None
    is_hybrid: bool
    is_multimodal: bool
    is_encoder_decoder: bool
    is_generation: bool
    has_attention_sinks: bool
    context_tokens: int
    #: layers x (K and V) x heads x head width, in elements
    kv_elements_per_token: int
    #: its sizes, in words
    shape: str = ""


def model_facts(server_args: Any) -> ModelFacts:
    """Facts of the model of a parsed, unresolved ``ServerArgs`` record."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = model_config_of(server_args)
    return ModelFacts(
        name=str(model.hf_config.architectures[0]),
        attention=model.attention_arch.name,
        sliding_window_tokens=model.sliding_window_size,
        is_hybrid=bool(model.is_hybrid_swa) or mambaish_config(model) is not None,
        is_multimodal=bool(model.is_multimodal),
        is_encoder_decoder=bool(model.is_encoder_decoder),
        is_generation=bool(model.is_generation),
        has_attention_sinks=bool(model.has_attention_sinks),
        context_tokens=int(model.context_len),
        kv_elements_per_token=int(
            model.num_hidden_layers
            * model.get_num_kv_heads(1)
            * (model.head_dim + model.v_head_dim)
        ),
        shape=(
            f"{model.hf_config.architectures[0]} of {model.num_hidden_layers} layers, width "
            f"{model.hidden_size}, {model.num_attention_heads} heads"
        ),
    )


@dataclass(frozen=True, slots=True)
class FrontState:
    """What the running front knows of the pool."""

    served_model_name: str
    model_path: str
    tokenizer_path: str
    kv_capacity_tokens: int
    chunk_tokens: int
    page_tokens: int
    chat_template: str | None
    #: SGLang's flags, as given
    dtype: str
    kv_cache_dtype: str


def front_state() -> FrontState:
    """Of the front that runs in this process."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.runtime_context import get_model, get_schedule, get_serving

    state = get_global_state()
    kv_capacity_tokens = int(state.scheduler_info["max_total_num_tokens"])
    chunk_tokens = int(get_schedule().chunked_prefill_size or 0)
    return FrontState(
        served_model_name=str(state.tokenizer_manager.served_model_name),
        model_path=str(get_model().model_path),
        tokenizer_path=str(get_serving().tokenizer_path),
        kv_capacity_tokens=kv_capacity_tokens,
        chunk_tokens=chunk_tokens if chunk_tokens > 0 else kv_capacity_tokens,
        page_tokens=int(get_schedule().page_size),
        chat_template=get_serving().chat_template,
        dtype=str(state.tokenizer_manager.server_args.dtype),
        kv_cache_dtype=str(state.tokenizer_manager.server_args.kv_cache_dtype),
    )


def expect_control_answers(count: int) -> None:
    """From any thread of the front: control requests, one under way included, are complete
    with ``count`` answers."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS

    manager = get_global_state().tokenizer_manager

    def apply() -> None:
        for spec in _COMMUNICATOR_SPECS:
            communicator = getattr(manager, f"{spec[0]}_communicator")
            communicator.set_fan_out(count)
            if communicator._result_event is None:
                continue
            communicator._result_fan_out = count
            if len(communicator._result_values) >= count:
                communicator._result_event.set()

    if manager.event_loop is None:
        apply()  # no request has come yet, and so none is under way
    else:
        manager.event_loop.call_soon_threadsafe(apply)


def load_plugins() -> None:
    """Let SGLang load its plugins in this process, ours among them."""
    from sglang.srt.plugins import load_plugins as load

    load()


def parse_flags(flags: Sequence[str]) -> Any:
    """SGLang's ``ServerArgs`` record for a command line. Exits as SGLang's parser does."""
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(list(flags))


def chosen_fields(server_args: Any) -> set[str]:
    """The fields of an unresolved ``ServerArgs`` record that differ from SGLang's defaults."""
    import msgspec

    return {
        field.name
        for field in msgspec.structs.fields(server_args)
        if field.default is not msgspec.NODEFAULT
        and getattr(server_args, field.name) != field.default
    }


def http_app() -> Any:
    """The FastAPI application of the front."""
    from sglang.srt.entrypoints.http_server import app

    return app


def admin_endpoint(handler: Callable[..., Any]) -> Callable[..., Any]:
    """``handler``, open to whom SGLang lets use its own administrative endpoints: to everybody
    who reaches a front without keys."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    marked: Callable[..., Any] = auth_level(AuthLevel.ADMIN_OPTIONAL)(handler)
    return marked


def serve_http(server_args: Any, *, start: Callable[[], None]) -> None:
    """Launch SGLang and serve until interrupted.

    ``start`` runs on a thread of its own once the server listens; the server reports healthy
    when it returns. What it raises stops the server and is raised again here.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    failure: list[Exception] = []

    def warm_up(_: Any) -> bool:
        try:
            start()
        except Exception as exc:
            failure.append(exc)
            os.kill(os.getpid(), signal.SIGINT)
            return False
        http_server.get_global_state().tokenizer_manager.server_status = ServerStatus.Up
        return True

    try:
        http_server.launch_server(server_args, execute_warmup_func=warm_up)
    except KeyboardInterrupt:
        if not failure:
            return
    if failure:
        raise failure[0]


def resolved_attention_backends(server_args: Any) -> tuple[str, str]:
    """(prefill, decode) backend names of a resolved ``ServerArgs`` record."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    return tuple(attention_backends_of(resolved_view(server_args)))


def preload(server_args: Any, architecture: str) -> None:
    """Import and load in the front what its forked children need, so that they share it."""
    import gc

    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.managers import data_parallel_controller, detokenizer_manager, scheduler
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.utils.hf_transformers import tokenizer

    _ = (data_parallel_controller, detokenizer_manager, scheduler)
    ModelRegistry.resolve_model_cls([architecture])
    cfg = resolved_view(server_args)
    tokenizer.get_tokenizer(
        cfg.tokenizer_path,
        tokenizer_mode=cfg.tokenizer_mode,
        trust_remote_code=cfg.trust_remote_code,
        revision=cfg.revision,
        tokenizer_backend=cfg.tokenizer_backend,
    )
    # What exists now stays: a collection in a child would only copy the pages it shares.
    gc.collect()
    gc.freeze()


def data_parallel_rank() -> int:
    """This process's rank in the pool."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dp_rank or 0)


def unpaired_fields() -> dict[str, Any]:
    """Fields of a request to a pool that prefills only whose KV is sent nowhere."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}


def no_prefill(running_batch: Any) -> Any:
    """SGLang's plan for a step without a prefill."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def await_message(scheduler: Any, timeout_ms: int) -> None:
    """Wait until the rank's own socket has something to read."""
    scheduler.ipc_channels.recv_from_tokenizer.poll(timeout_ms)


def hidden_size(scheduler: Any) -> int:
    """Width of the model's hidden states."""
    return int(scheduler.model_config.hidden_size)


def load_of(scheduler: Any) -> Load:
    """Read from any thread: lengths and counters only."""
    capacity = int(scheduler.max_total_num_tokens)
    handshakes, sent = (
        (scheduler.disagg_prefill_bootstrap_queue.queue, scheduler.disagg_prefill_inflight_queue)
        if is_prefill_side(scheduler)
        else ((), ())
    )
    return Load(
        running_requests=len(scheduler.running_batch.reqs) + len(sent),
        waiting_requests=len(scheduler.waiting_queue) + len(handshakes),
        kv_used_tokens=capacity - int(scheduler.token_to_kv_pool_allocator.available_size()),
        kv_capacity_tokens=capacity,
    )


def apply_geometry(scheduler: Any, *, group: CpGroup | None) -> None:
    """Make ``group`` the CP group of this rank; None is the rank alone.

    Lists every holder of the CP geometry that SGLang fills at construction: the parallel
    context, the strategy singleton, the scheduler, its tree cache, and the grammar queue,
    whose ready set must be the same on all ranks that schedule in lockstep.
    """
    from sglang.srt.layers.cp import base
    from sglang.srt.runtime_context import get_parallel

    alone = get_parallel().tp_group  # a group of one: the launch topology is tp = cp = 1
    members: Any = group or alone
    get_parallel().override_permanently(
        attn_cp_size=members.world_size,
        attn_cp_rank=members.rank_in_group,
        attn_cp_group=members,
        enable_prefill_cp=group is not None,
        cp_strategy="zigzag",
    )
    base._STRATEGY = None  # built again on first use, for the new width
    scheduler.attn_cp_group = members
    scheduler.attn_cp_cpu_group = members.cpu_group
    if hasattr(scheduler.tree_cache, "attn_cp_group"):
        scheduler.tree_cache.attn_cp_group = members.cpu_group  # a process group, there
    grammar = scheduler.grammar_manager
    grammar.grammar_sync_group = members.cpu_group
    grammar.grammar_sync_size = members.world_size
    grammar.grammar_sync_entry = members.first_rank
    grammar.is_grammar_sync_entry = members.is_first_rank


def is_extend(batch: Any) -> bool:
    """Whether the step is (a chunk of) a prefill."""
    return bool(batch.forward_mode.is_extend())


def prefilling(batch: Any) -> list[str]:
    """Ids of the requests of an extend step that have no token yet. One that was retracted and
    goes on has had its prefill."""
    return [request.rid for request in batch.reqs if not request.output_ids]


def prefilled(batch: Any) -> list[FinishedPrefill]:
    """The requests of a processed extend step that need no further chunk."""
    return [
        FinishedPrefill(
            rid=request.rid,
            input_tokens=len(request.origin_input_ids),
            cached_tokens=int(request.cached_tokens),
        )
        for request in batch.reqs
        if request.output_ids or request.finished()
    ]
