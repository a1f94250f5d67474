"""A whole rank runtime in each of several processes, on real links and SGLang's context."""

from types import SimpleNamespace
from typing import Any

import torch
from vertumnus_patches.regroup_message import regroup_knobs

from sgl_vertumnus.config import PoolConfig
from tests.patches.replica import launched, scheduler_of
from tests.patches.sglang_requests import generate_request

LAYERS, SLOTS, HEADS, WIDTH, VOCABULARY = 3, 32, 2, 4, 11


def regrouped(connection: Any, config: PoolConfig, number: int) -> list[dict[str, Any]]:
    """What rank ``number`` sees in each composition, alone, as a pair, as a four and alone."""
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
    rank = RankRuntime(config, "manifest")
    rank.on_parallel_ready()
    scheduler = scheduler_of(alone)
    scheduler.is_fully_idle = lambda: True
    scheduler.flush_cache = lambda empty_cache: True
    seen = [_step(rank, number)]
    for epoch, degree in enumerate((2, 4, 1), start=1):
        blocks = [(first, degree) for first in range(0, config.size, degree)]
        assert rank.reconfigure(scheduler, regroup_knobs(epoch, blocks))
        seen.append(_step(rank, number))
    return seen


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
