"""A whole rank runtime in each of several processes, on real links and SGLang's context."""

from types import SimpleNamespace
from typing import Any

import torch
from vertumnus_patches.regroup_message import Phase, regroup_knobs

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.environment import publish_pool_secret
from tests.patches.replica import launched
from tests.patches.schedulers import (
    aborts,
    free_tokens,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)
from tests.patches.sglang_requests import generate_request

#: Of the requests that are moved, and how many steps they take in each composition.
PROMPT, TOKENS, STEPS = 48, 24, 3
LAYERS, SLOTS, HEADS, WIDTH, VOCABULARY = 3, 32, 2, 4, 11


def regrouped(connection: Any, config: PoolConfig, number: int) -> list[dict[str, Any]]:
    """What rank ``number`` sees in each composition, alone, as a pair, as a four and alone."""
    with sglang_context():
        rank, scheduler = _joined(config, number)
        seen = [_step(rank, number)]
        for epoch, degree in enumerate((2, 4, 1), start=1):
            _commit(rank, scheduler, config, epoch, degree)
            seen.append(_step(rank, number))
        return seen


def moved(connection: Any, config: PoolConfig, number: int) -> dict[str, Any]:
    """One request at home on each rank, served alone, as a pair, as a four, as a pair, alone.

    What this rank has computed in each composition and, at the end, each request that it knew.
    """
    with sglang_context():
        rank, scheduler = _joined(config, number)
        _patched(rank)
        receive(
            scheduler,
            f"r{number}",
            prompt(number),
            routed_dp_rank=number,
            sampling={"max_new_tokens": TOKENS, "ignore_eos": True},
        )
        requests, batches = _known(scheduler), [_batches(scheduler)]
        for epoch, degree in enumerate((2, 4, 2, 1), start=1):
            _commit(rank, scheduler, config, epoch, degree)
            requests |= _known(scheduler)
            batches.append(_batches(scheduler))
        while step(scheduler) is not None:
            pass
        return {
            "batches": batches,
            "said": {rid: list(request.output_ids) for rid, request in requests.items()},
            "free": free_tokens(scheduler),
            "aborts": len(aborts(scheduler)),
        }


def prompt(number: int) -> list[int]:
    """Whole pages, so that all of it can be taken over."""
    return [number, *range(PROMPT - 1)]


def _joined(config: PoolConfig, number: int) -> tuple[Any, Any]:
    """Rank and scheduler, after their start."""
    from sglang.srt import runtime_context
    from vertumnus_patches import engine
    from vertumnus_patches.patches.topology_check import check_apart_from_cp

    from sgl_vertumnus.worker.rank import RankRuntime

    original = runtime_context._validate_parallel
    alone = launched()
    runtime_context._validate_parallel = lambda parallel, source: check_apart_from_cp(
        original, parallel, source
    )
    engine.data_parallel_rank = lambda: number
    publish_pool_secret("secret")
    rank = RankRuntime(config, "manifest")
    rank.on_parallel_ready()
    scheduler = scheduler_with_pools()
    scheduler.attn_cp_group, scheduler.attn_cp_cpu_group = alone, alone.cpu_group
    return rank, scheduler


def _patched(rank: Any) -> None:
    """What of the patches decides about a step."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from vertumnus_patches.patches.agreed_prefix import within_agreed
    from vertumnus_patches.patches.request_source import remember_message

    plan, make, longest = (
        Scheduler.get_new_batch_prefill,
        Scheduler._create_generation_req,
        Req._compute_max_prefix_len,
    )

    def made(scheduler: Any, message: Any, *args: Any, **fields: Any) -> Any:
        request = make(scheduler, message, *args, **fields)
        remember_message(request, scheduler, message, *args, **fields)
        return request

    Scheduler._create_generation_req = made
    Scheduler.get_new_batch_prefill = lambda scheduler, running: rank.admit_prefills(
        scheduler, running, lambda: plan(scheduler, running)
    )
    Req._compute_max_prefix_len = lambda request, input_len: within_agreed(
        longest, request, input_len
    )


def _commit(rank: Any, scheduler: Any, config: PoolConfig, epoch: int, degree: int) -> None:
    blocks = [(first, degree) for first in range(0, config.size, degree)]
    rank.follow(scheduler, regroup_knobs(Phase.COMMIT, epoch, blocks))
    assert (rank._serving.epoch, rank._serving.block.degree) == (epoch, degree)


def _known(scheduler: Any) -> dict[str, Any]:
    requests = [*scheduler.waiting_queue, *scheduler.running_batch.reqs]
    return {request.rid: request for request in requests}


def _batches(scheduler: Any) -> list[tuple[list[str], list[int] | None]]:
    """Some steps: who is in each, and how much of a prefill is cached."""
    batches = []
    for _ in range(STEPS):
        batch = step(scheduler)
        lengths = list(batch.prefix_lens) if batch.forward_mode.is_extend() else None
        batches.append(([request.rid for request in batch.reqs], lengths))
    return batches


def _step(rank: Any, number: int) -> dict[str, Any]:
    """One decode step, with everything that a block exchanges."""
    from sglang.srt.layers.cp.base import get_cp_strategy

    received = None if rank.is_member else [generate_request(f"from-{number}")]
    requests = rank.exchange_requests(received)
    ids = torch.tensor([number, number + 10])
    rank.sync_token_ids(ids)
    strategy = get_cp_strategy()
    runner, computed = _runner(number), []

    def compute() -> str:
        computed.append(number)
        return "logits"

    output = rank.compute_once(runner, _decode_of(runner), compute)
    return {
        "requests": [request.rid for request in requests],
        "ids": ids.tolist(),
        "member": rank.is_member,
        "strategy": strategy and (strategy.cp_size, strategy.cp_rank),
        "computed": computed,
        "kv": [float(pool[:, 0, 0].sum()) for pool in _pools(runner)],
        "logits": output if output == "logits" else list(output.next_token_logits.shape),
    }


def _runner(number: int) -> Any:
    """A rank whose KV at slots 5 and 9 is its own number, and 0 elsewhere."""
    pools = [torch.zeros(SLOTS, HEADS, WIDTH) for _ in range(2 * LAYERS)]
    for layer, pool in enumerate(pools):
        pool[[5, 9]] = float(number * 100 + layer)
    pool_of = SimpleNamespace(k_buffer=pools[:LAYERS], v_buffer=pools[LAYERS:])
    return SimpleNamespace(
        model_runner=SimpleNamespace(
            token_to_kv_pool=pool_of, model_config=SimpleNamespace(vocab_size=VOCABULARY)
        )
    )


def _pools(runner: Any) -> list[torch.Tensor]:
    pool = runner.model_runner.token_to_kv_pool
    return [*pool.k_buffer, *pool.v_buffer]


def _decode_of(runner: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=2,
        input_ids=torch.zeros(2),
        out_cache_loc=torch.tensor([5, 9]),
        return_logprob=False,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        attn_cp_metadata=None,
    )
