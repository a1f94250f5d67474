"""SGLang's own scheduler, tree and KV pool on a CPU, without a model and without sockets.

What a model would compute is a function of the tokens before it, so that any KV and any token
can be checked wherever it turns up.
"""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.patches.sglang_requests import generate_request

LAYERS, HEADS, WIDTH, VOCABULARY = 2, 1, 2, 97


@dataclass(frozen=True, slots=True)
class Size:
    """Of a scheduler; tokens."""

    page: int = 16
    capacity: int = 1024
    chunk: int = 64
    policy: str = "priority"


@contextmanager
def sglang_context(size: Size = Size()) -> Iterator[None]:
    """SGLang's configuration as a rank of a pool has it, for this process, for a while."""
    from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context
    from sglang.srt.server_args import ServerArgs

    context = RuntimeContext(parallel=ParallelContext())
    context.set_server_args(
        ServerArgs(
            model_path="none",
            device="cpu",
            page_size=size.page,
            chunked_prefill_size=size.chunk,
            radix_eviction_policy=size.policy,
            disable_overlap_schedule=True,
            pp_max_micro_batch_size=64,
        )
    )
    with use_context(context), context.parallel.override(tp_rank=0, pp_rank=0):
        yield


def value_of(tokens: Sequence[int], namespace: object = None) -> float:
    """What the KV of the last of ``tokens`` is filled with."""
    text = f"{namespace} {list(tokens)}".encode()
    return float(zlib.crc32(text) % 100_003)


def kv_of(tokens: Sequence[int], start: int, end: int, namespace: object = None) -> torch.Tensor:
    """KV of tokens [start, end), [layers, 2, tokens, KV heads, head width]."""
    values = [value_of(tokens[: at + 1], namespace) for at in range(start, end)]
    row = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1, 1)
    part = torch.arange(LAYERS * 2, dtype=torch.float32).view(LAYERS, 2, 1, 1, 1) / 8
    return (row + part).expand(LAYERS, 2, end - start, HEADS, WIDTH).contiguous()


def next_token(tokens: Sequence[int]) -> int:
    return int(value_of(tokens, "token")) % VOCABULARY


class Grammars:
    """A backend whose grammars are done when a test says so."""

    enable_strict_thinking = False

    def __init__(self) -> None:
        self.cached: dict[Any, Any] = {}
        self.futures: dict[Any, Any] = {}

    def get_request_grammar_key(self, key: Any, **_: Any) -> Any:
        return key

    def get_cached_or_future_value(self, key: Any, require_reasoning: bool) -> tuple[Any, bool]:
        from concurrent.futures import Future

        if key in self.cached:
            return self.cached[key].copy(), True
        return self.futures.setdefault(key, Future()), False

    def set_cache(self, key: Any, value: Any) -> None:
        self.cached[key] = value

    def reset(self) -> None:
        self.cached.clear()


class Grammar:
    """Remembers what it has accepted."""

    def __init__(self, accepted: Sequence[int] = ()) -> None:
        self.accepted = list(accepted)

    def accept_token(self, token: int) -> None:
        self.accepted.append(token)

    def is_terminated(self) -> bool:
        return False

    def copy(self) -> "Grammar":
        return Grammar(self.accepted)


class Outputs:
    """What a rank tells about requests outside their streams."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.sent.append((output, recv_obj))


def scheduler_with_pools(size: Size = Size(), *, events: bool = False) -> Any:
    """A ``Scheduler`` as its construction leaves it, in ``sglang_context``; with ``events`` its
    tree tells what it stores and removes."""
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    pool = MHATokenToKVPool(
        size=size.capacity,
        page_size=size.page,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=WIDTH,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    if size.page == 1:
        allocator: Any = TokenToKVPoolAllocator(size.capacity, torch.float32, "cpu", pool, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            size.capacity, size.page, torch.float32, "cpu", pool, False
        )
    rows = ReqToTokenPool(32, size.capacity, "cpu", False)
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.__dict__.update(
        page_size=size.page,
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=rows,
        tree_cache=UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=allocator,
                page_size=size.page,
                eviction_policy=size.policy,
                tree_components=(ComponentType.FULL,),
                enable_kv_cache_events=events,
                dynamo_kv_event_format=events,
            )
        ),
        model_config=SimpleNamespace(
            vocab_size=VOCABULARY,
            is_encoder_decoder=False,
            is_multimodal=False,
            hf_eos_token_id=set(),
            think_end_ids=None,
        ),
        tokenizer=SimpleNamespace(
            additional_stop_token_ids=None, eos_token_id=None, all_special_ids=[]
        ),
        device="cpu",
        waiting_queue=[],
        running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
        last_batch=None,
        cur_batch_for_debug=None,
        chunked_req=None,
        _pending_chunked_abort_req=None,
        chunked_prefill_size=size.chunk,
        max_prefill_tokens=4 * size.chunk,
        max_total_num_tokens=size.capacity,
        max_req_len=size.capacity,
        max_req_input_len=size.capacity,
        max_running_requests=32,
        max_prefill_bs=0,
        max_queued_requests=None,
        max_new_tokens_limit=None,
        kv_shard_widening=1,
        sliding_window_size=None,
        truncation_align_size=None,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        schedule_policy="fcfs",
        schedule_low_priority_values_first=False,
        priority_scheduling_preemption_threshold=0,
        processed_tokens_counter=0,
        prefill_decode_interval=0,
        _prefill_decode_interval_remaining=0,
        forward_ct=0,
        metrics_reporter=SimpleNamespace(enable_metrics=False, num_retracted_reqs=0),
        load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct: 0),
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=object(), prefill_aware_swa=False)
        ),
        beam_coordinator=SimpleNamespace(
            pending_member_rows=lambda batch: 0, retire_group=lambda request: None
        ),
        ipc_channels=SimpleNamespace(send_to_tokenizer=Outputs()),
        kv_events_publisher=SimpleNamespace(enable_kv_cache_events=False),
        dp_attn_adapter=SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        ),
        ngram_embedding_manager=SimpleNamespace(
            prepare_for_forward=lambda batch, chunked_req: batch
        ),
        **dict.fromkeys(
            (
                "enable_session_radix_cache",
                "enable_hisparse",
                "enable_lora",
                "enable_overlap",
                "enable_lmcache",
                "enable_hicache_storage",
                "enable_hierarchical_cache",
                "enable_unified_cache_external_linker",
                "enable_priority_scheduling",
                "abort_on_priority_when_disabled",
                "enable_continuous_input_polling",
                "enable_skip_finishing_decode",
                "is_hybrid_swa",
                "is_mixed_chunk",
                "require_mlp_sync",
            ),
            False,
        ),
        **dict.fromkeys(
            (
                "dllm_config",
                "rust_server",
                "mm_receiver",
                "hisparse_coordinator",
                "decode_offload_manager",
                "dynamic_chunk_sizer",
                "min_free_slots_delayer",
                "scheduler_stage_metrics",
            )
        ),
    )
    scheduler.init_schedule_policy()
    grammar = scheduler.grammar_manager = GrammarManager.__new__(GrammarManager)
    grammar.__dict__.update(
        scheduler=scheduler,
        grammar_queue=[],
        grammar_backend=Grammars(),
        _enable_strict_thinking=False,
        grammar_sync_size=1,
        pp_rank=0,
        pp_size=1,
        pp_group=None,
        SGLANG_GRAMMAR_POLL_INTERVAL=0.001,
        SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=10_000,
    )
    return scheduler


def receive(scheduler: Any, rid: str, tokens: Sequence[int], **fields: Any) -> Any:
    """The scheduler takes in a request; its ``Req``."""
    before = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    scheduler.handle_generate_request(message_of(rid, tokens, **fields))
    (made,) = (
        request
        for request in [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
        if request not in before
    )
    return made


def message_of(rid: str, tokens: Sequence[int], **fields: Any) -> Any:
    """A request as the front sends it."""
    message = generate_request(rid, tokens, **fields)
    message.sampling_params.normalize(None)
    return message


def namespace(request: Any) -> object:
    return (request.extra_key, request.cache_salt) if request.extra_key else request.cache_salt


def step(scheduler: Any) -> Any:
    """Plan one step with SGLang's scheduler, and do what its model and its result processor
    would; the batch, or None when there was nothing to do."""
    plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch is not None:
        forward(scheduler, batch)
        _hand_out(scheduler, batch)
    scheduler.last_batch = batch
    return batch


def forward(scheduler: Any, batch: Any) -> None:
    """What a model would compute of the batch."""
    from vertumnus_patches.new_kv import write_slots

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for request in batch.reqs:
        request.refresh_fill_ids()
        tokens = request.full_untruncated_fill_ids
        end = request.kv.kv_committed_len
        start = request.prefix_len if batch.forward_mode.is_extend() else end - 1
        row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        if start:
            cached = row[:start].to(torch.int64)
            assert torch.equal(_read(pool, cached), kv_of(tokens, 0, start, namespace(request))), (
                "attention would read other KV"
            )
        write_slots(
            pool, row[start:end].to(torch.int64), kv_of(tokens, start, end, namespace(request))
        )


def _read(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [
            torch.stack((k[slots], v[slots]))
            for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]
    )


def _hand_out(scheduler: Any, batch: Any) -> None:
    from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

    for request in batch.reqs:
        if request.finished():
            continue
        if request.inflight_middle_chunks > 0:
            request.inflight_middle_chunks -= 1
            continue
        request.output_ids.append(next_token(request.origin_input_ids + request.output_ids))
        if request.grammar is not None:
            request.grammar.accept_token(request.output_ids[-1])
        request.update_finish_state()
        if request.finished():
            release_kv_cache(request, scheduler.tree_cache, checkpoint=True)
        elif batch.forward_mode.is_extend():
            checkpoint_kv_cache(request, scheduler.tree_cache)


def answer(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens that a model alone would say."""
    said = array("q", tokens)
    for _ in range(count):
        said.append(next_token(said))
    return list(said[len(tokens) :])


def free_tokens(scheduler: Any) -> int:
    """Room for KV, unused cached prefixes counted; all of it when no request is in hand."""
    tree = scheduler.tree_cache
    return int(scheduler.token_to_kv_pool_allocator.available_size()) + int(tree.evictable_size())


def aborts(scheduler: Any) -> list[Any]:
    """What was sent about requests that ended outside their streams."""
    return [output for output, _ in scheduler.ipc_channels.send_to_tokenizer.sent]
