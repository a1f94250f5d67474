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

__all__ = [
    "FinishedPrefill",
    "FrontState",
    "Load",
    "ModelFacts",
    "apply_geometry",
    "chosen_fields",
    "data_parallel_rank",
    "expect_control_answers",
    "flush",
    "front_state",
    "hidden_size",
    "http_app",
    "is_extend",
    "is_idle",
    "load_of",
    "load_plugins",
    "model_facts",
    "parse_flags",
    "prefilled",
    "preload",
    "resolved_attention_backends",
    "serve_http",
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


def is_idle(scheduler: Any) -> bool:
    """Whether no request is queued, running or being handed out."""
    return bool(scheduler.is_fully_idle())


def flush(scheduler: Any) -> None:
    """Forget all cached prefixes and compiled grammars of an idle rank."""
    scheduler.flush_cache(empty_cache=False)


def hidden_size(scheduler: Any) -> int:
    """Width of the model's hidden states."""
    return int(scheduler.model_config.hidden_size)


def load_of(scheduler: Any) -> Load:
    """Read from any thread: lengths and counters only."""
    capacity = int(scheduler.max_total_num_tokens)
    return Load(
        running_requests=len(scheduler.running_batch.reqs),
        waiting_requests=len(scheduler.waiting_queue),
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
